"""Shares of blocks, computed for real by a thread each, against the whole blocks."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from pipeplan.documents.forms import Form
from pipeplan.errors import InvalidInputError
from tests.waiting import PATIENCE_S
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.losses import default_loss
from worker_agent.models.parallel import Region, VocabularyLoss
from worker_agent.models.sharding import Sharding, module_styles, require_possible, shard

FAMILIES = {
    "llama": "hf:llama?num_hidden_layers=2&hidden_size=32&num_attention_heads=8&num_key_value_heads=4&head_dim=8"
    "&intermediate_size=48&vocab_size=64&max_position_embeddings=16&attention_bias=true&mlp_bias=true",
    "mistral": "hf:mistral?num_hidden_layers=1&hidden_size=32&num_attention_heads=4&num_key_value_heads=4"
    "&intermediate_size=48&vocab_size=64&sliding_window=null",
    "qwen2": "hf:qwen2?num_hidden_layers=1&hidden_size=32&num_attention_heads=4&num_key_value_heads=4"
    "&intermediate_size=48&vocab_size=64",
    "qwen3": "hf:qwen3?num_hidden_layers=1&hidden_size=32&num_attention_heads=4&num_key_value_heads=4&head_dim=8"
    "&intermediate_size=48&vocab_size=64",
    "latents": "hf:deepseek_v3?num_hidden_layers=1&first_k_dense_replace=1&hidden_size=32&num_attention_heads=4"
    "&num_key_value_heads=4&intermediate_size=48&vocab_size=64&q_lora_rank=12&kv_lora_rank=8&qk_rope_head_dim=4"
    "&qk_nope_head_dim=8&v_head_dim=8",
    "phi3": "hf:phi3?num_hidden_layers=1&hidden_size=32&num_attention_heads=8&num_key_value_heads=8"
    "&intermediate_size=48&vocab_size=64&max_position_embeddings=16&original_max_position_embeddings=16&pad_token_id=null"
    "&resid_pdrop=0&embd_pdrop=0",
    "gpt2": "hf:gpt2?n_layer=2&n_embd=32&n_head=4&vocab_size=64&n_positions=16&resid_pdrop=0&embd_pdrop=0&attn_pdrop=0",
    "gpt": "preset:transformer?hidden=32&heads=4&vocabulary=64&sequence_length=16",
    "fused gpt": "preset:transformer?hidden=32&heads=4&vocabulary=64&sequence_length=16&fused=true",
    "fused llama": "preset:transformer?hidden=32&heads=8&kv_heads=4&vocabulary=64&positions=rotary&norm=rms&bias=false"
    "&activation=swiglu&fused=true",
}
MIXERS = (
    "hf:nemotron_h?hidden_size=32&num_attention_heads=4&num_key_value_heads=4&head_dim=8&intermediate_size=48"
    "&vocab_size=64&mamba_num_heads=8&mamba_head_dim=8&n_groups=4&ssm_state_size=4&chunk_size=4"
    '&layer_types=["mamba","mlp"]'
)
"""Their weights are of parts of different sizes."""

OTHERS = {
    "dbrx": "hf:dbrx?n_layers=1&d_model=32&n_heads=8&vocab_size=64&max_seq_len=16"
    '&attn_config={"kv_n_heads":4,"rope_theta":10000,"clip_qkv":8}'
    '&ffn_config={"hidden_size":32,"ffn_hidden_size":48,"moe_num_experts":1,"moe_top_k":1}',
    "delta nets": "hf:kimi_linear?num_hidden_layers=2&hidden_size=32&num_attention_heads=4&num_key_value_heads=4"
    "&intermediate_size=48&vocab_size=64&kv_lora_rank=8&q_lora_rank=null&qk_nope_head_dim=8&qk_rope_head_dim=4"
    '&v_head_dim=8&linear_num_heads=4&linear_head_dim=8&layer_types=["linear_attention","full_attention"]'
    '&mlp_layer_types=["dense","dense"]&pad_token_id=0',
    "short convolutions": "hf:lfm2?num_hidden_layers=2&hidden_size=32&num_attention_heads=4&num_key_value_heads=4"
    '&intermediate_size=48&vocab_size=64&layer_types=["conv","full_attention"]&block_auto_adjust_ff_dim=false',
    "states": "hf:mamba?num_hidden_layers=1&hidden_size=16&intermediate_size=32&state_size=4&vocab_size=64"
    "&time_step_rank=2",
}
"""Models whose weights are packed in other ways."""

TOKENS = torch.randint(64, (3, 8), generator=torch.Generator().manual_seed(0))


@dataclass
class Meeting:
    """Where threads exchange their values: each puts its own down, and takes all when all are there."""

    devices: int
    values: list[Tensor] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.values = [torch.empty(0)] * self.devices
        self.barrier = threading.Barrier(self.devices, timeout=PATIENCE_S)


@dataclass
class ThreadPeers:
    """One thread's exchanges."""

    meeting: Meeting
    rank: int

    def gather(self, share: Tensor) -> Tensor:
        return torch.cat(self._all(share), dim=-2)

    def scatter(self, whole: Tensor) -> Tensor:
        return torch.stack(self._all(whole)).sum(0).chunk(self.meeting.devices, -2)[self.rank]

    def reduce(self, value: Tensor, *, largest: bool = False) -> Tensor:
        stacked = torch.stack(self._all(value))
        return stacked.amax(0) if largest else stacked.sum(0)

    def ring(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    ring_back = ring

    def trade(self, rows: Tensor, experts: int, chosen: int) -> Tensor:
        raise NotImplementedError

    def _all(self, value: Tensor) -> list[Tensor]:
        self.meeting.values[self.rank] = value.detach().clone()
        self.meeting.barrier.wait()
        values = list(self.meeting.values)
        self.meeting.barrier.wait()
        return values


@dataclass
class Passed:
    """What a device has after a forward and a backward: its blocks with their gradients, logits and loss."""

    blocks: Sequence[nn.Module]
    logits: Tensor
    loss: Tensor


def passed(blocks: Sequence[nn.Module], loss: Callable[[Tensor, Tensor], Tensor]) -> Passed:
    value: Tensor = TOKENS
    for block in blocks:
        value = block(value)
    found = loss(value, TOKENS.roll(1))
    torch.autograd.backward(found)
    return Passed(blocks=blocks, logits=value.detach(), loss=found.detach())


def passed_by_shares(spec: str, form: Form) -> list[Passed]:
    """What every device has; each has built the model for itself."""
    meeting = Meeting(form.tensor)

    def run(rank: int, chain: Chain) -> Passed:
        region = Region(form=form, peers=ThreadPeers(meeting, rank), rank=rank)
        styles = module_styles(chain.sharding, chain.root)
        return passed([shard(block, styles, region) for block in chain.blocks], VocabularyLoss(region))

    chains = [build_model(spec, seed=0, dtype=torch.float64) for _ in range(form.tensor)]
    with ThreadPoolExecutor(form.tensor) as pool:
        return list(pool.map(run, range(form.tensor), chains))


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-6, atol=1e-7)


def fits(whole: Tensor, shares: Sequence[Tensor]) -> bool:
    """Whether shares of a gradient, or the summands of it, make up the whole one."""
    if all(same(share, whole) for share in shares) or same(torch.stack(list(shares)).sum(0), whole):
        return True
    put_together = [
        torch.cat([share.chunk(parts, dim)[part] for part in range(parts) for share in shares], dim)
        for dim in range(shares[0].dim())
        for parts in (1, 2, 3)
    ]
    return any(same(made, each) for made in put_together for each in (whole, whole.t() if whole.dim() == 2 else whole))


@pytest.mark.each_case
@pytest.mark.parametrize("form", [Form(tensor=2), Form(tensor=4), Form(tensor=4, sequence_parallel=True)], ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_shares_compute_what_the_whole_model_does(family: str, form: Form) -> None:
    chain = build_model(FAMILIES[family], seed=0, dtype=torch.float64)
    whole, shares = passed(chain.blocks, default_loss), passed_by_shares(FAMILIES[family], form)
    assert same(torch.cat([share.logits for share in shares], dim=-1), whole.logits)
    for share in shares:
        torch.testing.assert_close(share.loss, whole.loss, rtol=1e-6, atol=1e-6)
    for number, block in enumerate(whole.blocks):
        held = [dict(share.blocks[number].named_parameters()) for share in shares]
        for name, parameter in block.named_parameters():
            gradients = [each[name].grad for each in held]
            assert parameter.grad is not None and fits(parameter.grad, [g for g in gradients if g is not None]), name


@pytest.mark.each_case
@pytest.mark.parametrize("form", [Form(tensor=2), Form(tensor=4, sequence_parallel=True)], ids=str)
def test_shares_of_mixers_compute_what_the_whole_model_does(form: Form) -> None:
    chain = build_model(MIXERS, seed=0, dtype=torch.float64)
    whole, shares = passed(chain.blocks, default_loss), passed_by_shares(MIXERS, form)
    torch.testing.assert_close(torch.cat([each.logits for each in shares], dim=-1), whole.logits, rtol=1e-5, atol=1e-6)
    held = [dict(each.blocks[1].named_parameters())["quick.layer.norm.weight"].grad for each in shares]
    gradients = [each for each in held if each is not None]
    summed = gradients[0] if not form.sequence_parallel and same(gradients[0], gradients[1]) else sum(gradients)
    expected = dict(whole.blocks[1].named_parameters())["quick.layer.norm.weight"].grad
    torch.testing.assert_close(summed, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.each_case
@pytest.mark.parametrize("form", [Form(tensor=4, sequence_parallel=True), Form(tensor=2)], ids=str)
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_shares_of_other_models_compute_what_the_whole_model_does(name: str, form: Form) -> None:
    chain = build_model(OTHERS[name], seed=0, dtype=torch.float64)
    whole, shares = passed(chain.blocks, default_loss), passed_by_shares(OTHERS[name], form)
    torch.testing.assert_close(torch.cat([each.logits for each in shares], dim=-1), whole.logits, rtol=1e-5, atol=1e-6)


def test_a_vocabulary_that_is_not_divisible_is_rounded_up() -> None:
    chain = build_model("preset:transformer?vocabulary=65", seed=0)
    region = Region(form=Form(tensor=2), peers=ThreadPeers(Meeting(2), 1), rank=1)
    first, *_, last = (shard(block, module_styles(chain.sharding, chain.root), region) for block in chain.blocks)
    for weight in (first.get_parameter("tokens.weight"), last.get_parameter("output.weight")):
        assert len(weight) == 33 and not weight[-1].any() and weight[:-1].any(dim=1).all()


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("spec", "form", "sentence"),
    [
        (
            "hf:llama?num_attention_heads=6&hidden_size=96",
            Form(tensor=4),
            "tensor: must divide num_attention_heads, wh",
        ),
        (
            "hf:llama?num_key_value_heads=4",
            Form(tensor=8),
            "tensor: must divide num_key_value_heads, which is 4, got 8",
        ),
        ("preset:transformer?heads=4&ffn=6", Form(tensor=4), "tensor: must divide ffn, which is 6, got 4"),
        ("preset:transformer", Form(context=3), "context: must divide the 64 tokens of a sequence, got 3"),
        (
            "preset:transformer?heads=4",
            Form(tensor=4, context=32, sequence_parallel=True),
            "tensor: must divide the 2 t",
        ),
        (
            "hf:bert",
            Form(tensor=2),
            "tensor: needs a sharding plan, and none is known for bert.encoder",
        ),
        ("hf:llama?attn_implementation=eager", Form(context=2), "context: must be 1: attention of several kernels of"),
        ("hf:jamba", Form(context=2), "context: must be 1: model.layers.0.mamba of hf:jamba sees the whole sequence"),
        (
            "hf:bloom",
            Form(tensor=2),
            "tensor: needs a sharding plan, and none is known for ALiBi attention of hf:bloom",
        ),
        (
            "hf:falcon_h1",
            Form(tensor=2),
            "tensor: needs a sharding plan, and none is known for layers that exchange several tensors of hf:falcon_h1",
        ),
        ("hf:mixtral?num_local_experts=4", Form(expert=8), "expert: must divide the 4 experts of a layer, got 8"),
        ("hf:llama", Form(expert=2), "expert: must be 1 for a model without experts, got 2"),
        (
            "hf:llama",
            Form(tensor=2, expert_tensor=1),
            "expert_tensor: must be left out for a model without experts, got 1",
        ),
        ("hf:mixtral", Form(tensor=2), "sequence_parallel: is needed for a model with experts and tensor parallelism"),
        ("preset:mlp", Form(tensor=2), "tensor: needs a sharding plan, which preset:mlp"),
    ],
)
def test_what_a_degree_does_not_divide_is_named(spec: str, form: Form, sentence: str) -> None:
    small = "&num_hidden_layers=1&vocab_size=64" if spec.startswith("hf:") else ""
    text = spec + (small if "?" in spec else small.replace("&", "?", 1))
    plan = build_model(text, seed=0).sharding
    with pytest.raises(InvalidInputError) as caught:
        require_possible(plan, form, name=spec, sequence_length=64)
    assert str(caught.value).startswith(sentence)


def test_balanced_experts_compute_what_the_librarys_do_where_tokens_are_balanced() -> None:
    spec = "hf:mixtral?num_hidden_layers=1&hidden_size=16&num_attention_heads=2&num_key_value_heads=2&vocab_size=64"
    chain = build_model(f"{spec}&intermediate_size=24&num_local_experts=4&sliding_window=null", seed=0)
    region = Region(form=Form(), peers=ThreadPeers(Meeting(1), 0))
    layers = chain.blocks[1], shard(chain.blocks[1], module_styles(chain.sharding, chain.root), region)
    routed, balanced = (layer.get_submodule("quick.layer.mlp.experts") for layer in layers)
    generator = torch.Generator().manual_seed(0)
    hidden, weights = torch.randn(6, 16, generator=generator), torch.rand(6, 2, generator=generator)
    chosen = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [2, 0], [3, 1]])  # every expert three times
    torch.testing.assert_close(balanced(hidden, chosen, weights), routed(hidden, chosen, weights))


class Branches(nn.Module):
    """Two layers that read one value, by a plan of its own."""

    def __init__(self, style: str, features: int = 8) -> None:
        super().__init__()
        self.left = nn.Linear(4, features)
        self.right = nn.Linear(4, features)
        self.sharding = Sharding(styles={"left": style, "right": style}, divided={})

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = self.left(x) + self.right(x)
        return joined


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        (Branches("sideways"), "model.sharding: must name a style that fits Linear, got 'sideways'"),
        (Branches("colwise", features=7), "tensor: must divide the 7 features of a layer, got 2"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(block: Branches, sentence: str) -> None:
    region = Region(form=Form(tensor=2), peers=ThreadPeers(Meeting(2), 0))
    styles = module_styles(block.sharding, block)
    with pytest.raises(InvalidInputError) as caught:
        shard(block, styles, region)
    assert str(caught.value) == sentence


def test_sharding_leaves_the_block_as_it_is() -> None:
    block = Branches("colwise")
    region = Region(form=Form(tensor=2), peers=ThreadPeers(Meeting(2), 0))
    share = shard(block, module_styles(block.sharding, block), region)
    assert [tuple(p.shape) for p in share.parameters()] == [(4, 4), (4,)] * 2
    assert [tuple(p.shape) for p in block.parameters()] == [(8, 4), (8,)] * 2
    assert block(torch.ones(1, 2, 4)).shape == (1, 2, 8)  # it exchanges nothing
