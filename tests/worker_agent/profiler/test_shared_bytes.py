"""Shared bytes: what blocks measured one by one keep together is what any stage of them keeps, or more."""

from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeplan.costs.memory import kept_bytes, passed_inputs
from pipeplan.documents.measurement import Measurement
from tests.properties import examples
from tests.worker_agent.measured import measurement_of
from worker_agent.models.values import as_values, carries_gradient
from worker_agent.profiler.block_memory import measure_memory
from worker_agent.runtime.stage import StageBlocks
from worker_agent.runtime.stage_by_block import StageByBlock

CPU, ROWS, WIDTH = torch.device("cpu"), 3, 8
NUMBER = ROWS * WIDTH * torch.float32.itemsize


class OnFirst(nn.Module):
    """A module on the first of two values; the second one travels on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.module(x), y


class Branch(nn.Module):
    """A residual branch begins: both values are one tensor."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Add(nn.Module):
    """A residual branch ends. Nothing is saved."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, y


class Gate(nn.Module):
    """Both values are saved."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y, y


class Halves(nn.Module):
    """Views of one tensor that is twice as large, and that the next block may save or not."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((x, y), dim=1)
        return both[:, :WIDTH], both[:, WIDTH:]


class Reshaped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1).view(ROWS, WIDTH)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: OnFirst(linear()),
    "relu": lambda: OnFirst(nn.ReLU()),
    "linear, relu in place": lambda: OnFirst(nn.Sequential(linear(), nn.ReLU(inplace=True))),
    "relu in place": lambda: OnFirst(nn.ReLU(inplace=True)),
    "linear, relu": lambda: OnFirst(nn.Sequential(linear(), nn.ReLU())),
    "sigmoid": lambda: OnFirst(nn.Sigmoid()),
    "view": lambda: OnFirst(Reshaped()),
    "nothing": lambda: OnFirst(nn.Identity()),
    "branch": Branch,
    "add": Add,
    "gate": Gate,
    "halves": Halves,
}


def mean(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return (output[0] - targets).square().mean() + output[1].mean()


def measured(blocks: Sequence[nn.Module]) -> list[Measurement]:
    microbatch = (torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)), torch.zeros(ROWS, WIDTH)
    memories = measure_memory(blocks, mean, microbatch, CPU)
    return [measurement_of(memory, ROWS) for memory in memories]


def received_by(blocks: Sequence[nn.Module], start: int) -> tuple[Tensor, ...]:
    """The inputs of a stage that begins with a block."""
    values: tuple[Tensor, ...] = torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
    for block in blocks[:start]:
        values = as_values(block(*values))
    return tuple(
        t.detach().clone(memory_format=torch.contiguous_format).requires_grad_(carries_gradient(t)) for t in values
    )


def sent_besides_bytes(blocks: Sequence[nn.Module], start: int, stop: int) -> int:
    """What the stage's outputs, as they are sent, hold besides what a microbatch keeps."""
    received = received_by(blocks, start)
    kept = {t.untyped_storage().data_ptr() for t in received}

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        values = tuple(torch.ops.aten._unsafe_view(t, t.shape) for t in received)
        for block in blocks[start:stop]:
            values = as_values(block(*values))
    sent = [t.detach().contiguous() for t in values]
    return sum(t.nbytes for t in sent if t.untyped_storage().data_ptr() not in kept)


def known(size_bytes: int | None) -> int:
    assert size_bytes is not None
    return size_bytes


def ran_bytes(blocks: Sequence[nn.Module], start: int, stop: int) -> int:
    """What the stage of these blocks keeps of a microbatch that it has received."""
    received = received_by(blocks, start)
    last = stop == len(blocks)
    stage = StageBlocks(
        blocks[start:stop], first_block=start, criterion=mean if last else None, recompute=False, seed=0, device=CPU
    )
    stage.forward(0, received, torch.zeros(ROWS, WIDTH))
    return known(stage.memory.tensors_bytes(0))


def inputs_kept(blocks: Sequence[nn.Module], start: int, stop: int) -> int:
    """What the stage of these blocks keeps of a microbatch until its backward if it recomputes by block."""
    criterion = mean if stop == len(blocks) else None
    stage = StageByBlock(blocks[start:stop], first_block=start, criterion=criterion, seed=0, device=CPU)
    held = []
    for microbatch in range(2):  # the first one is copied, to find changes in place
        stage.forward(microbatch, received_by(blocks, start), torch.zeros(ROWS, WIDTH))
        held.append(known(stage.memory.held_bytes()))
    return held[1] - held[0]


@examples(100)
@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=6))
def test_no_stage_keeps_more_than_its_blocks_are_said_to_keep_together(kinds: list[str]) -> None:
    blocks = [KINDS["linear"](), *(KINDS[kind]() for kind in kinds)]
    found = measured(blocks)
    for start, stop in combinations(range(len(blocks) + 1), 2):
        assert ran_bytes(blocks, start, stop) <= kept_bytes(found[start:stop])


@examples(100)
@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=6))
def test_no_stages_outputs_hold_more_besides_than_is_said(kinds: list[str]) -> None:
    blocks = [KINDS["linear"](), *(KINDS[kind]() for kind in kinds)]
    found = measured(blocks)
    for start, stop in combinations(range(len(blocks)), 2):
        said = found[stop - 1].output_bytes - found[stop - 1].kept_output_bytes
        assert sent_besides_bytes(blocks, start, stop) <= said, (start, stop)


@examples(100)
@given(st.lists(st.sampled_from(sorted(kind for kind in KINDS if "in place" not in kind)), min_size=2, max_size=6))
def test_no_stage_by_block_keeps_more_inputs_than_is_said(kinds: list[str]) -> None:
    blocks = [KINDS["linear"](), *(KINDS[kind]() for kind in kinds)]
    found = measured(blocks)
    for start, stop in combinations(range(len(blocks) + 1), 2):
        said = sum(block.input_bytes for block in found[start:stop]) - sum(passed_inputs(found[start:stop]))
        assert inputs_kept(blocks, start, stop) <= said, (start, stop)


def test_what_blocks_pass_on_is_kept_once() -> None:
    blocks = [KINDS[kind]() for kind in ("linear", "gate", "branch", "add", "linear")]
    found = measured(blocks)
    # The second value is passed on, but by the branch, which gives its first value twice.
    assert [block.passed_bytes // NUMBER for block in found] == [1, 1, 2, 1, 0]
    assert inputs_kept(blocks, 0, 5) == (2 + 1 + 1 + 0 + 1) * NUMBER


@pytest.mark.parametrize(
    "kinds",
    [
        ["linear", "linear", "linear"],
        ["linear, relu", "linear, relu", "linear"],
        ["linear, relu in place", "linear, relu in place", "linear"],
        ["linear", "relu", "linear", "sigmoid", "linear"],
        ["linear, relu", "branch", "linear", "relu", "add", "linear"],
        ["linear", "gate", "linear", "gate"],
        ["linear, relu", "view", "linear"],
        ["linear", "relu in place", "linear", "relu in place", "linear"],
    ],
)
def test_and_where_each_block_reads_the_one_before_it_keeps_just_that(kinds: list[str]) -> None:
    blocks = [KINDS[kind]() for kind in kinds]
    found = measured(blocks)
    for start, stop in combinations(range(len(blocks) + 1), 2):
        assert ran_bytes(blocks, start, stop) == kept_bytes(found[start:stop]), (start, stop)


def test_a_block_that_saves_nothing_adds_nothing_but_keeps_what_it_receives() -> None:
    _, add, _ = measured([KINDS["linear"](), KINDS["add"](), KINDS["linear"]()])
    assert (add.activation_bytes, add.shared_bytes, add.added_bytes) == (2 * NUMBER, 2 * NUMBER, 0)
