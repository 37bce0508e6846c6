"""Tensors pass through a rank as they are: from the buffer that received them to the block, and on to the send."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pipeplan.simulation.predict import program_of
from tests.worker_agent.runtime.plans import make_plan
from worker_agent.engine.clocks import HostClock
from worker_agent.engine.optimizers import Optimizer
from worker_agent.engine.weights import Weights, find_slots
from worker_agent.runtime.executor import Executor, Hooks
from worker_agent.runtime.mail import Mail
from worker_agent.runtime.recorder import Recorder
from worker_agent.runtime.stage import StageBlocks

Addresses = dict[str, list[int]]


class Doubled(torch.autograd.Function):
    """Twice its input; notes where its tensors are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seen: Addresses) -> Tensor:
        ctx.seen = seen
        y = 2 * x * weight
        seen["input"].append(x.data_ptr())
        seen["output"].append(y.data_ptr())
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        of_input = 2 * gradient
        ctx.seen["output's gradient"].append(gradient.data_ptr())
        ctx.seen["input's gradient"].append(of_input.data_ptr())
        return of_input, gradient.sum(0), None


class Block(nn.Module):
    """One call of it."""

    def __init__(self, seen: Addresses) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3) -> (B, 3)."""
        return torch.as_tensor(Doubled.apply(x, self.weight, self.seen))  # type: ignore[no-untyped-call]


class Post:
    """A rank's mail without other ranks: notes where the tensors are that it hands over and is given."""

    def __init__(self) -> None:
        self.seen: Addresses = {name: [] for name in NAMES}
        self._kept: list[Tensor] = []

    def receive_activation(self, microbatch: int, peer: int) -> list[Tensor]:
        """A new tensor."""
        return self._received("input")

    def receive_gradient(self, microbatch: int, peer: int) -> list[Tensor]:
        """A new tensor."""
        return self._received("output's gradient")

    def send_activation(self, microbatch: int, peer: int, tensors: tuple[Tensor, ...]) -> None:
        """Keeps it: no address is used twice."""
        self._sent("output", tensors)

    def send_gradient(self, peer: int, tensors: tuple[Tensor, ...]) -> None:
        """Keeps it: no address is used twice."""
        self._sent("input's gradient", tensors)

    def release(self, microbatch: int, *, kept: frozenset[int] = frozenset()) -> None:
        """Nothing is used again."""

    def flush(self) -> None:
        """Nothing is under way."""

    def _received(self, name: str) -> list[Tensor]:
        self._sent(name, (torch.ones(2, 3),))
        return [self._kept[-1]]

    def _sent(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._kept += tensors
        self.seen[name].append(tensors[0].data_ptr())


NAMES = ("input", "output", "output's gradient", "input's gradient")


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_stage_in_the_middle_copies_nothing(recompute: bool, split_backward: bool) -> None:
    """But for the first input of all where it recomputes: it finds out whether the blocks change it in place."""
    plan = make_plan("1f1b", (0, 1, 2, 3), recompute=recompute, split_backward=split_backward, dtype="float32")
    program = program_of(plan, batches=2)
    post, in_the_block = Post(), {name: list[int]() for name in NAMES}
    block = Block(in_the_block)
    stage = StageBlocks(
        [block],
        first_block=1,
        criterion=None,
        recompute=recompute,
        seed=0,
        device=torch.device("cpu"),
        split_backward=split_backward,
    )
    slots = find_slots([block], {block.weight: "weight"})
    executor = Executor(
        stream=program.streams[1],
        stage=stage,
        weights=Weights(slots, Optimizer("sgd", 0.1)),
        mail=cast(Mail, post),
        replicas=None,
        recorder=Recorder(HostClock()),
        hooks=Hooks(on_instruction=lambda *_: None, on_update=lambda *_: None, on_checkpoint=lambda _: None),
        inputs=None,
        targets=None,
        update_microbatches=plan.microbatches,
    )
    executor.run()
    first = 1 if recompute else 0
    for name in NAMES:
        assert len(post.seen[name]) == 2 * plan.microbatches
        assert set(post.seen[name][first:]) <= set(in_the_block[name])
