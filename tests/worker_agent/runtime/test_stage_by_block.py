"""A stage that recomputes by block computes what the whole stage does, to the last bit, and holds what is predicted."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrizations import spectral_norm

from pipeplan.errors import RunFailedError
from worker_agent.engine.casts import keeping_casts
from worker_agent.engine.graphs import NODE_BYTES, graph_bytes
from worker_agent.models.spec import UserCodeError
from worker_agent.models.values import carries_gradient
from worker_agent.runtime.stage import StageBlocks
from worker_agent.runtime.stage_by_block import StageByBlock

CPU = torch.device("cpu")
MICROBATCHES = 5


class Residual(nn.Module):
    """Hands on what it computes with its input, a mask and token numbers, in a tuple."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert not mask.requires_grad  # nothing trained leads to it: no block is asked for its gradient
        return x + torch.relu(self.layer(x)) * mask + tokens, mask, tokens


class Opening(nn.Module):
    """Makes of one tensor three."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(x), (x.detach() > 0).to(x.dtype), torch.arange(x.shape[-1])


class Closing(nn.Module):
    """Takes the first of several tensors."""

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return x


class Doubling(nn.Module):
    """Changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Gate(nn.Module):
    """Returns its own input beside what it computes of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.where(x > 0.5, x, -x)


class DoublingFirst(nn.Module):
    """Changes the first of two tensors."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(2) + y


class Sometimes(nn.Module):
    """Trains its weight after the first microbatch only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) if self.calls > 3 else x.detach() * 2


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, __: Tensor) -> Tensor:
        raise RuntimeError("as it should")


class Failing(nn.Linear):
    """Fails in its backward."""

    def forward(self, x: Tensor) -> Tensor:
        failing: Tensor = _Fails.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return failing


def several() -> list[nn.Module]:
    return [Opening(4), Residual(4), Residual(4), Closing(), nn.Linear(4, 4)]


def dropping() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)), nn.Tanh()]


def in_place() -> list[nn.Module]:
    return [
        nn.Linear(4, 4),
        nn.Identity(),
        Doubling(),
        nn.Flatten(),
        Doubling(),
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
    ]


def in_an_earlier_blocks_place() -> list[nn.Module]:
    return [nn.Linear(4, 4), Gate(), DoublingFirst(), nn.Linear(4, 4)]


def noting() -> list[nn.Module]:
    return [spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)]


def tied() -> list[nn.Module]:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return [first, nn.Tanh(), second, nn.Tanh(), first]


def same_norm_twice() -> list[nn.Module]:
    norm = nn.BatchNorm1d(4)
    return [nn.Linear(4, 4), norm, nn.Linear(4, 4), norm]


def frozen() -> list[nn.Module]:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    for layer in (first, last):
        layer.requires_grad_(requires_grad=False)
    return [first, nn.Tanh(), nn.Linear(4, 4), last]


def all_frozen() -> list[nn.Module]:
    return [nn.Linear(4, 4).requires_grad_(requires_grad=False), nn.Tanh()]


MODELS = [several, dropping, in_place, in_an_earlier_blocks_place, noting, tied, same_norm_twice, frozen, all_frozen]


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def made(model: Callable[[], list[nn.Module]]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [block.double() for block in model()]


def pass_microbatches(
    stage: StageBlocks | StageByBlock,
    blocks: Sequence[nn.Module],
    *,
    first: bool,
    last: bool,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """All forwards, then the backwards of the odd microbatches and those of the even ones; all that comes of it."""
    generator = torch.Generator().manual_seed(1)
    found: list[Tensor] = []
    made_outputs: dict[int, tuple[Tensor, ...]] = {}
    for k in range(1, MICROBATCHES + 1):
        inputs = torch.randn(3, 4, generator=generator, dtype=dtype).requires_grad_(not first)
        targets = torch.randn(3, 4, generator=generator, dtype=dtype)
        made_outputs[k] = stage.forward(k, (inputs,), targets if last else None)
        found += made_outputs[k]
    stage.end_minibatch()
    for k in sorted(made_outputs, key=lambda k: (k % 2 == 0, k)):
        torch.manual_seed(k)
        gradients = tuple(torch.randn_like(t) for t in made_outputs[k] if carries_gradient(t))
        if isinstance(stage, StageBlocks) and stage.recompute:
            stage.recompute_forward(k)
        found += stage.backward(k, gradients)
    for block in blocks:
        found += [torch.zeros(()) if p.grad is None else p.grad for p in block.parameters()]
        found += [torch.full((), p.grad is not None) for p in block.parameters()]
        found += list(block.buffers())
    return found


@pytest.mark.each_case
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_a_stage_by_block_computes_what_the_whole_stage_does_to_the_last_bit(
    model: Callable[[], list[nn.Module]], first: bool, last: bool, statistics: bool
) -> None:
    if first and last and model is all_frozen:
        pytest.skip("nothing has a gradient")
    options: dict[str, Any] = {
        "first_block": 3,
        "criterion": squares if last else None,
        "seed": 7,
        "device": CPU,
        "minibatch_statistics": statistics,
    }
    blocks, others = made(model), made(model)
    whole = pass_microbatches(StageBlocks(blocks, recompute=False, **options), blocks, first=first, last=last)
    by_block = pass_microbatches(StageByBlock(others, **options), others, first=first, last=last)
    assert len(whole) == len(by_block)
    assert all(torch.equal(one, other) for one, other in zip(whole, by_block, strict=True))


@pytest.mark.parametrize("kind", [StageBlocks, StageByBlock])
def test_a_norm_in_two_blocks_keeps_statistics_of_all_that_passes_it(
    kind: type[StageBlocks] | type[StageByBlock],
) -> None:
    """It was lent other buffers twice at each call, and lost its own."""
    norm = nn.BatchNorm1d(4, affine=False).double()
    blocks = [norm, nn.Identity(), norm]
    options: dict[str, Any] = {} if kind is StageByBlock else {"recompute": False}
    stage = kind(blocks, first_block=0, criterion=None, seed=0, device=CPU, minibatch_statistics=True, **options)
    own, passed = list(norm.buffers()), []
    generator = torch.Generator().manual_seed(1)
    for k in (1, 2):
        inputs = torch.randn(6, 4, generator=generator, dtype=torch.float64) + 3
        (outputs,) = stage.forward(k, (inputs.requires_grad_(),))
        between = (inputs - inputs.mean(0)) / (inputs.var(0, unbiased=False) + norm.eps).sqrt()
        passed += [inputs.detach(), between.detach()]
        assert torch.isfinite(outputs).all()
    stage.end_minibatch()
    assert all(one is other for one, other in zip(own, norm.buffers(), strict=True))
    values = torch.cat(passed)
    assert norm.running_mean is not None and norm.running_var is not None
    torch.testing.assert_close(norm.running_mean, 0.1 * values.mean(0))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * values.var(0))


@pytest.mark.parametrize("model", [several, dropping, in_place, frozen])
def test_under_autocast_it_computes_what_recomputation_of_the_whole_stage_does(
    model: Callable[[], list[nn.Module]],
) -> None:
    found = []
    for by_block in (False, True):
        blocks = [block.float() for block in made(model)]
        options: dict[str, Any] = {
            "first_block": 0,
            "criterion": None,
            "seed": 7,
            "device": CPU,
            "autocast": torch.bfloat16,
        }
        stage = StageByBlock(blocks, **options) if by_block else StageBlocks(blocks, recompute=True, **options)
        with keeping_casts():
            found.append(pass_microbatches(stage, blocks, first=True, last=False, dtype=torch.float32))
        assert stage.autocasts
        stage.weights_changed()
        stage.memory.held_bytes()  # with the most that the backward held
        assert stage.memory.held_bytes() == 0  # no copy is left
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def stage_of(blocks: Sequence[nn.Module], criterion: Any = None) -> StageByBlock:
    return StageByBlock(blocks, first_block=0, criterion=criterion, seed=0, device=CPU)


def test_a_stage_by_block_holds_all_blocks_inputs_and_one_blocks_activations() -> None:
    # Inputs of 4, 6 and 4 numbers a row; the middle block keeps its input and two times 10 numbers.
    middle = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Sigmoid(), nn.Linear(10, 4))
    stage = stage_of([nn.Linear(4, 6), middle, nn.Linear(4, 2)])
    row = 3 * torch.float32.itemsize
    inputs_bytes = (4 + 6 + 4) * row
    for k in (1, 2):
        stage.forward(k, (torch.ones(3, 4, requires_grad=True),))
        assert stage.memory.held_bytes() == k * inputs_bytes
    stage.backward(1, (torch.ones(3, 2),))
    # The last block keeps its input, the middle one 6 + 10 + 10 and a graph, and the first one its input. The graph
    # begins at a view of the input. It saves this, and the second function's result twice.
    graph = NODE_BYTES + graph_bytes([middle(torch.ones(3, 6))], saved=4, device=CPU)
    assert stage.memory.held_bytes() == inputs_bytes + (4 + 6 + 10 + 10) * row + graph
    assert stage.memory.held_bytes() == inputs_bytes
    stage.backward(2, (torch.ones(3, 2),))
    assert stage.memory.held_bytes() == (4 + 6 + 10 + 10) * row + graph
    assert stage.memory.held_bytes() == 0


def test_what_blocks_only_pass_on_is_held_once() -> None:
    stage = stage_of(made(several))
    for k in (1, 2):
        stage.forward(k, (torch.ones(3, 4, dtype=torch.float64, requires_grad=True),))
    both = stage.memory.held_bytes()
    assert both is not None
    stage.backward(1, (torch.ones(3, 4, dtype=torch.float64),))
    stage.memory.held_bytes()
    # Four numbers a row: the input, x before each residual block and after the last, a mask; and four token numbers. In
    # the first microbatch blocks get copies, to see if they change them.
    assert stage.memory.held_bytes() == 8 * (5 * 12 + 4) < both / 2


def test_a_block_runs_again_when_the_activations_of_all_others_are_gone() -> None:
    made_tensors: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Counted(nn.Module):
        """Counts what graphs keep of what its like have made."""

        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(made() is not None for made in made_tensors))
            between = x.exp()
            if between.requires_grad:
                made_tensors.append(weakref.ref(between))
            return between.sin()

    stage = stage_of([Counted() for _ in range(4)])
    stage.forward(1, (torch.ones(3, 4, requires_grad=True),))
    alive.clear()
    stage.backward(1, (torch.ones(3, 4),))
    assert alive == [0, 0, 0, 0]


def test_a_blocks_input_is_gone_when_the_block_before_runs_again() -> None:
    """It stayed until that one had run, beside the gradient in its place."""
    inputs: list[StorageWeakRef] = []
    alive: list[int] = []

    class Watched(nn.Linear):
        """Counts the inputs of its like that are still there when it runs again."""

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                alive.append(sum(not storage.expired() for storage in inputs))  # type: ignore[no-untyped-call]
            else:
                inputs.append(StorageWeakRef(x.untyped_storage()))  # type: ignore[no-untyped-call]
            return super().forward(x)

    stage = stage_of([Watched(4, 4) for _ in range(4)])
    for microbatch in (1, 2):  # the first one finds what has a gradient, and what changes its input
        inputs.clear()
        alive.clear()
        stage.forward(microbatch, (torch.ones(3, 4, requires_grad=True),))
        alive.clear()
        stage.backward(microbatch, (torch.ones(3, 4),))
    assert alive == [4, 3, 2, 1]


def test_an_input_that_was_changed_after_its_forward_is_an_error() -> None:
    stage = stage_of([nn.Tanh(), nn.Tanh()])
    inputs = torch.ones(3, 4)
    stage.forward(1, (inputs,))
    inputs.add_(1)
    with pytest.raises(RunFailedError, match=r"an input of block 0 \(Tanh\) was changed in place after its forward"):
        stage.backward(1, (torch.ones(3, 4),))


def test_an_output_that_is_trained_only_later_is_an_error() -> None:
    stage = stage_of([Sometimes(), nn.Linear(4, 4)])
    with pytest.raises(RunFailedError, match=r"an output of block 0 \(Sometimes\) depends on what is trained"):
        for k in range(1, 4):
            stage.forward(k, (torch.ones(3, 4),))
            stage.backward(k, (torch.ones(3, 4),))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_backward_that_fails_names_its_block(place: int) -> None:
    blocks: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    blocks[place] = Failing(4, 4)
    stage = stage_of(blocks)
    stage.forward(1, (torch.ones(3, 4, requires_grad=True),))
    with pytest.raises(UserCodeError, match=rf"the backward of block {place} \(Failing\)"):
        stage.backward(1, (torch.ones(3, 4),))


def test_a_stage_by_block_neither_recomputes_as_a_whole_nor_splits_its_backward() -> None:
    stage = stage_of([nn.Tanh()])
    wrong: list[Callable[[], object]] = [
        lambda: stage.recompute_forward(1),
        lambda: stage.waiting([1]),
        lambda: stage.backward_weight([1]),
    ]
    for ask in wrong:
        with pytest.raises(RunFailedError, match="on a stage that recomputes by block"):
            ask()
