"""Counts found on fake tensors, against closed forms and against what real passes do and keep."""

from collections.abc import Sequence
from operator import attrgetter

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from pipeplan.errors import InvalidInputError
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.losses import default_loss, mean_of_squares
from worker_agent.profiler.block_memory import measure_memory
from worker_agent.profiler.counts import BlockCounts, count_blocks
from worker_agent.profiler.operations import DeviceOperation

SPECS = {
    "gpt2": "hf:gpt2?n_layer=2&n_embd=32&n_head=2&vocab_size=50&n_positions=16",
    "llama": "hf:llama?num_hidden_layers=2&hidden_size=32&num_attention_heads=2&num_key_value_heads=1&head_dim=16"
    "&intermediate_size=48&vocab_size=50&max_position_embeddings=16",
    "bert": "hf:bert?num_hidden_layers=2&hidden_size=32&num_attention_heads=2&intermediate_size=48&vocab_size=50"
    "&max_position_embeddings=16",
}
TOKENS = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(0))


def counted(spec: str, tokens: Tensor, *, dtype: torch.dtype = torch.float32, gpu: bool = False) -> list[BlockCounts]:
    fake = FakeTensorMode()
    with fake:
        chain = build_model(spec, seed=0, dtype=dtype)
    return list(count_blocks(fake, chain.blocks, default_loss, (tokens, tokens), floating=dtype, gpu=gpu))


def count(*blocks: nn.Module, width: int = 4, gpu: bool = False) -> list[BlockCounts]:
    """Blocks on (8, width) of float32; they must have no parameters, or be made under the mode that is given."""
    fake = FakeTensorMode()
    pair = (torch.zeros(8, width), torch.zeros(8))
    return list(count_blocks(fake, blocks, mean_of_squares, pair, floating=torch.float32, gpu=gpu))


def flops(operations: Sequence[DeviceOperation]) -> int:
    return sum(operation.flops for operation in operations)


def moved(operations: Sequence[DeviceOperation], name: str) -> list[int]:
    return [operation.moved_bytes for operation in operations if operation.name == name]


def test_a_gpt2_layer_has_the_flops_of_the_closed_form_and_twice_as_many_backward() -> None:
    #   b s h^2 (6 query, key, value; 2 projection; 16 MLP) and 4 b s^2 h for scores and values
    b, s, h = 3, 16, 32
    forward = 24 * b * s * h**2 + 4 * b * s**2 * h
    layer = counted(f"{SPECS['gpt2']}&attn_implementation=eager", TOKENS)[1]
    assert (flops(layer.forward), flops(layer.backward)) == (forward, 2 * forward)
    assert flops(layer.backward_input) == forward + 4 * b * s**2 * h  # both products of attention have two inputs


@pytest.mark.each_case
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", sorted(SPECS))
def test_bytes_are_those_that_the_measuring_profiler_finds(family: str, attention: str) -> None:
    spec = f"{SPECS[family]}&attn_implementation={attention}"
    chain = build_model(spec, seed=0)
    measured = measure_memory(chain.blocks, default_loss, (TOKENS, TOKENS), torch.device("cpu"))
    found = counted(spec, TOKENS)
    bytes_of = attrgetter("input_bytes", "output_bytes", "activation_bytes", "kept_output_bytes", "passed_bytes")
    assert list(map(bytes_of, found)) == list(map(bytes_of, measured))
    assert min(c.activation_bytes for c in found) > 0


@pytest.mark.each_case
@pytest.mark.parametrize("family", sorted(SPECS))
def test_flops_are_those_that_torch_counts_on_the_real_model(family: str) -> None:
    spec = f"{SPECS[family]}&attn_implementation=eager"
    assert flops([o for c in counted(spec, TOKENS) for o in (*c.forward, *c.backward)]) == real_flops(
        build_model(spec, seed=0)
    )


def real_flops(chain: Chain) -> int:
    with FlopCounterMode(display=False) as counter:
        value: Tensor = TOKENS
        for block in chain.blocks:
            value = block(value)
        torch.autograd.backward(default_loss(value, TOKENS))
    total: int = counter.get_total_flops()
    return total


def test_attention_for_cpus_is_counted_like_a_gpus() -> None:
    b, s, h = 3, 16, 32
    layer = counted(SPECS["bert"].replace("?", "?attention_probs_dropout_prob=0&"), TOKENS)[1]
    names = [operation.name for operation in layer.forward]
    assert "_scaled_dot_product_flash_attention_for_cpu" in names
    assert flops([o for o in layer.forward if "attention" in o.name]) == 4 * b * s**2 * h
    assert flops([o for o in layer.backward if "attention" in o.name]) == 10 * b * s**2 * h  # scores once more


class Counting(nn.Module):
    """Notes how often it runs."""

    runs = 0

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        Counting.runs += 1
        return (x * self.factor).exp()


def test_equal_blocks_run_once_and_other_settings_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "runs", 0)
    count(nn.Tanh(), *(Counting() for _ in range(50)), nn.Tanh())
    assert Counting.runs == 1
    count(nn.Tanh(), Counting(2.0), Counting(3.0), Counting(2.0), nn.Tanh())
    assert Counting.runs == 1 + 2


class Traffic(nn.Module):
    """One operation of each kind that moves bytes in its own way."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + x.t().t()  # the same tensor twice is read once
        shifted = total + x[:1].expand(8, 4)
        return shifted.reshape(4, 8).reshape(8, 4).sigmoid()


def test_operations_move_what_they_read_and_write_and_views_nothing() -> None:
    _, middle, _ = count(nn.Tanh(), Traffic(), nn.Tanh())
    whole, row = 8 * 4 * 4, 4 * 4
    assert [(o.name, o.moved_bytes) for o in middle.forward] == [
        ("add", 2 * whole),  # x once, the sum
        ("add", 2 * whole + row),  # an expanded row is read once
        ("sigmoid", 2 * whole),
    ]


def test_an_embedding_reads_its_rows_only() -> None:
    embedding = counted(SPECS["gpt2"], TOKENS)[0]
    rows = 3 * 16 * 32 * 4
    assert moved(embedding.forward, "embedding")[0] == 2 * rows + TOKENS.nbytes


class Widening(nn.Module):
    """Takes twice its input's bytes for a moment, and keeps none of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.double().float()


def test_an_output_that_its_block_saves_is_kept_in_any_case() -> None:
    fake = FakeTensorMode()
    with fake:
        blocks = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    pair = (torch.zeros(8, 4), torch.zeros(8))
    found = count_blocks(fake, blocks, mean_of_squares, pair, floating=torch.float32, gpu=False)
    assert [block.kept_output_bytes for block in found[:2]] == [0, 8 * 4 * 4]


class OnFirst(nn.Module):
    """The sine of the first value; the second one travels on."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), y


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()


def test_what_a_block_passes_on_is_found() -> None:
    found = count(Twice(), OnFirst(), OnFirst())
    assert [block.passed_bytes for block in found[:2]] == [0, 8 * 4 * 4]


def test_the_workspace_is_what_is_there_only_meanwhile() -> None:
    _, middle, _ = count(nn.Tanh(), Widening(), nn.Tanh())
    assert (middle.activation_bytes, middle.workspace_bytes) == (0, 2 * 8 * 4 * 4)


def test_a_gpus_dropout_keeps_a_byte_an_element_and_its_attention_no_scores() -> None:
    number, b, s, h, heads = 2, 3, 16, 32, 2
    cpu, gpu = (counted(SPECS["gpt2"], TOKENS, dtype=torch.bfloat16, gpu=kind)[1] for kind in (False, True))
    assert "native_dropout" in {o.name for o in gpu.forward}
    assert "_scaled_dot_product_flash_attention" in {o.name for o in gpu.forward}
    scores = b * heads * s**2 * number
    masks = 2 * b * s * h * (number - 1)
    assert cpu.activation_bytes - gpu.activation_bytes > 3 * scores + masks  # probabilities, their mask and product


@pytest.mark.parametrize(
    ("dtype", "mask", "kernel"),
    [
        (torch.bfloat16, False, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, True, "_scaled_dot_product_efficient_attention"),
        (torch.float32, False, "_scaled_dot_product_efficient_attention"),
        (torch.float64, False, "bmm"),
    ],
)
def test_attention_takes_the_kernel_that_a_gpu_has_for_it(dtype: torch.dtype, mask: bool, kernel: str) -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.to(dtype).view(1, 2, 4, 8)
            allowed = torch.ones(4, 4, dtype=torch.bool) if mask else None
            return functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=allowed, dropout_p=0.5)

    _, middle, _ = count(nn.Tanh(), Attention(), nn.Tanh(), width=8, gpu=True)
    assert kernel in {o.name for o in middle.forward}
    assert flops(middle.forward) == 4 * 2 * 4**2 * 8 and flops(middle.backward) > 0


def test_a_gpus_rms_norm_is_one_kernel_each_way() -> None:
    spec = "preset:transformer?layers=1&norm=rms&bias=false&positions=none"
    cpu, gpu = (counted(spec, TOKENS, dtype=torch.bfloat16, gpu=kind)[1] for kind in (False, True))
    names = [[o.name for o in operations] for operations in (gpu.forward, gpu.backward)]
    assert names[0].count("pipeplan.rms_norm") == 2 and names[1].count("pipeplan.rms_norm_backward") == 2
    assert not {"pow", "rsqrt", "mean"} & {*names[0], *names[1]}
    assert "rsqrt" in {o.name for o in cpu.forward}


def test_a_block_that_needs_contents_is_refused_by_its_place() -> None:
    class Choosing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(InvalidInputError) as caught:
        count(nn.Tanh(), Choosing())
    sentence = "model: must have blocks that run on tensors without contents to be estimated; block 1 does not (Data"
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


def test_a_block_that_returns_no_tensor_is_refused() -> None:
    class Naming(nn.Module):
        def forward(self, x: Tensor) -> tuple[object, ...]:
            return x, "name"

    with pytest.raises(InvalidInputError, match="a block must return a tensor or a tuple of tensors, and this one"):
        count(Naming(), nn.Tanh())
