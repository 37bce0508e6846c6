"""Cut: blocks found by watching a forward are the library's model, to the last bit, whatever the family."""

import pytest
import torch
from torch import Tensor, nn

from pipeplan.errors import InvalidInputError
from tests.worker_agent.models.test_hugging_face import NARROW, SPECS, in_order
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.cut import find_cuts
from worker_agent.models.layers import AfterLayers, BeforeLayers
from worker_agent.models.values import as_values

SMALL = "num_hidden_layers=3&hidden_size=32&num_attention_heads=2&intermediate_size=48"
OTHERS = {
    "mamba": "hf:mamba?vocab_size=50&hidden_size=32&num_hidden_layers=3&state_size=4",
    "vit": f"hf:vit?{SMALL}&image_size=8&patch_size=4&num_labels=7",
    "resnet": "hf:resnet?embedding_size=8&hidden_sizes=[8,16,32]&depths=[1,2,1]&layer_type=basic&num_labels=7",
    "swin": "hf:swin?image_size=8&patch_size=1&embed_dim=8&depths=[1,1]&num_heads=[2,2]&window_size=2&num_labels=7",
    "gemma2": f"hf:gemma2?{NARROW}&head_dim=16&sliding_window=16",
    "roberta": f"hf:roberta?{SMALL}&vocab_size=50&max_position_embeddings=20",
    "gptj": "hf:gptj?n_layer=3&n_embd=32&n_head=2&vocab_size=50&n_positions=16&rotary_dim=8",
    "gpt_bigcode": "hf:gpt_bigcode?n_layer=3&n_embd=32&n_head=2&vocab_size=50&n_positions=16",
    "olmo": f"hf:olmo?{NARROW}",
    "falcon": "hf:falcon?num_hidden_layers=3&hidden_size=32&num_attention_heads=2&vocab_size=50",
    "stablelm": f"hf:stablelm?{NARROW}",
    "starcoder2": f"hf:starcoder2?{NARROW}",
    "olmo2": f"hf:olmo2?{NARROW}",
    "granite": f"hf:granite?{NARROW}&embedding_multiplier=3.0",
    "distilbert": "hf:distilbert?n_layers=3&dim=32&hidden_dim=48&n_heads=2&vocab_size=50&max_position_embeddings=20",
    "electra": f"hf:electra?{SMALL}&embedding_size=32&vocab_size=50&max_position_embeddings=20",
    "nanochat": f"hf:nanochat?{NARROW}",  # one norm is called before the layers and after them
    "xglm": "hf:xglm?d_model=32&ffn_dim=48&num_layers=3&attention_heads=2&vocab_size=50&max_position_embeddings=16",
    "ctrl": "hf:ctrl?n_layer=3&n_embd=32&n_head=2&dff=48&vocab_size=50&n_positions=16",  # scales embeddings in place
    "openai-gpt": "hf:openai-gpt?n_layer=3&n_embd=32&n_head=2&vocab_size=50&n_positions=16",  # holds positions
    "apertus": f"hf:apertus?{NARROW}",  # its activations have weights that their constructors compute
    "pvt": "hf:pvt?num_encoder_blocks=2&depths=[1,2]&hidden_sizes=[8,16]&patch_sizes=[4,2]&strides=[4,2]&image_size=8"
    "&sequence_reduction_ratios=[2,1]&num_attention_heads=[1,2]&mlp_ratios=[2,2]&num_labels=7",  # its rows take turns
    "convnextv2": "hf:convnextv2?hidden_sizes=[8,16]&depths=[1,2]&num_stages=2&num_labels=7&image_size=8&patch_size=2",
    "segformer": "hf:segformer?num_encoder_blocks=2&depths=[1,1]&hidden_sizes=[8,16]&patch_sizes=[4,2]&strides=[4,2]"
    "&sr_ratios=[2,1]&num_attention_heads=[1,2]&mlp_ratios=[2,2]&num_labels=7",
    "xlnet": "hf:xlnet?n_layer=3&d_model=32&n_head=2&d_inner=48&vocab_size=50",  # as long as you like: -1
    "mobilenet_v2": "hf:mobilenet_v2?depth_multiplier=0.1&image_size=8&num_labels=7",
    "squeezebert": f"hf:squeezebert?{SMALL}&embedding_size=32&vocab_size=50&max_position_embeddings=20",
    "clip": (
        'hf:clip?vision_config={"num_hidden_layers":3,"hidden_size":32,"num_attention_heads":2,"intermediate_size":48,'
        '"image_size":8,"patch_size":4}&num_labels=7'
    ),
}


def inputs_of(chain: Chain, samples: int) -> Tensor:
    """Other inputs than those with which the cuts were found, in number and length."""
    generator = torch.Generator().manual_seed(1)
    if chain.tokens is None:
        return torch.randn(samples, 3, 8, 8, generator=generator)
    return torch.randint(3, 50, (samples, 5 + samples), generator=generator)


@pytest.mark.each_case
@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("family", sorted(OTHERS))
def test_the_blocks_in_order_give_exactly_the_models_outputs_and_gradients(family: str, samples: int) -> None:
    chain = build_model(OTHERS[family], seed=0)
    chain.root.eval()
    given = inputs_of(chain, samples)
    ours, theirs = in_order(chain, given), chain.root(given)[0]
    assert torch.equal(ours, theirs)
    parameters = list(chain.root.parameters())
    along = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2))
    found, expected = (torch.autograd.grad(out, parameters, along, allow_unused=True) for out in (ours, theirs))
    assert sum(gradient is not None for gradient in expected) > 10
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None) and (one is None or other is None or torch.equal(one, other))


@pytest.mark.each_case
@pytest.mark.parametrize("family", sorted(OTHERS | SPECS))
def test_a_stage_needs_its_own_blocks_alone(family: str) -> None:
    """The other blocks stay on the meta device: nothing of them is looked at."""
    spec = (OTHERS | SPECS)[family]
    whole = build_model(spec, seed=4)
    whole.root.eval()
    given = inputs_of(whole, 2)
    values: tuple[Tensor, ...] = (given,)
    for number in range(len(whole.blocks)):
        alone = build_model(spec, seed=4, empty=True)
        alone.materialise(number, number + 1)
        alone.root.eval()
        values = as_values(alone.blocks[number](*values))
    assert torch.equal(values[0], whole.root(given)[0])


def test_what_is_more_than_modules_in_a_row_runs_the_models_own_forward() -> None:
    kinds = {
        name: [getattr(block, "quick") for block in build_model((OTHERS | SPECS)[name], seed=0, empty=True).blocks]  # noqa: B009
        for name in ("opt", "gemma2", "llama")
    }
    assert isinstance(kinds["opt"][0], BeforeLayers) and isinstance(kinds["opt"][-1], nn.Sequential)
    assert isinstance(kinds["gemma2"][0], nn.Embedding) and isinstance(kinds["gemma2"][-1], AfterLayers)
    assert isinstance(kinds["llama"][0], nn.Embedding) and isinstance(kinds["llama"][-1], nn.Sequential)


def test_a_models_own_forward_is_as_it_was_afterwards() -> None:
    chain = build_model(OTHERS["gemma2"], seed=0)
    in_order(chain, inputs_of(chain, 2))
    assert not any("forward" in vars(module) for module in chain.root.modules())


class Skipping(nn.Module):
    """A model whose layers get, or whose head uses, more than the layer before gives."""

    _no_split_modules = ("Linear",)
    config = None

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.last = nn.Linear(3, 3)
        self.where = where

    def forward(self, x: Tensor) -> tuple[Tensor]:
        begun = hidden = self.first(x)
        for layer in self.layers:
            hidden = layer(hidden + begun if self.where == "layers" else hidden)
        return (self.last(hidden + begun if self.where == "head" else hidden) * 2,)


@pytest.mark.parametrize(("where", "sentence"), [("layers", "blocks can make"), ("head", "use nothing but the last")])
def test_what_skips_layers_is_refused_and_not_cut_wrongly(where: str, sentence: str) -> None:
    inputs = {"x": torch.zeros(2, 3)}
    assert len(find_cuts(Skipping("nowhere").to("meta"), inputs).layers) == 3
    with pytest.raises(InvalidInputError, match=sentence):
        find_cuts(Skipping(where).to("meta"), inputs)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("hf:yolos", "must be a model for one of"),
        (
            "hf:albert?num_hidden_layers=2&hidden_size=32&num_attention_heads=2&embedding_size=8",
            "call every layer once",
        ),
        ("hf:flaubert?n_layers=2&emb_dim=32&n_heads=2&n_words=50", "not change in place what crosses a cut"),
        ("hf:cohere_asr", "have a whole number as max_source_positions in its config"),
    ],
)
def test_what_cannot_be_cut_says_where_and_why_and_shows_the_factory(spec: str, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence) as caught:
        build_model(spec, seed=0)
    assert "or be cut by a factory of your own: --model yours:blocks" in str(caught.value)


def test_layers_are_skipped_at_random_each_by_its_own_block() -> None:
    """A block draws for its own layer, whatever the others do: so any cut skips the same layers."""
    spec = f"{SPECS['opt']}&dropout=0.0&layerdrop=0.5"
    chain = build_model(spec, seed=0)
    tokens = torch.randint(3, 50, (2, 5), generator=torch.Generator().manual_seed(1))
    plain = build_model(SPECS["opt"], seed=0)
    plain.root.eval()
    layer = chain.blocks[1]
    begun = chain.blocks[0](tokens)
    skipped = 0
    with torch.random.fork_rng(devices=[]):
        for seed in range(20):
            torch.manual_seed(seed)
            skipped += torch.equal(layer(*begun)[0], begun[0] + begun[1])  # a layer gets the sum of two embeddings
    assert 3 < skipped < 17
    chain.root.eval()
    value = tokens
    for block in chain.blocks:
        value = block(*value) if isinstance(value, tuple) else block(value)
    assert torch.equal(value, plain.root(tokens)[0])
