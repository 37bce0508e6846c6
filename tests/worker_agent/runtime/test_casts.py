"""Weights under autocast: cast once a version, with the numbers that a cast in every microbatch gives."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from worker_agent.engine.casts import keeping_casts
from worker_agent.runtime.stage import StageBlocks

CPU = torch.device("cpu")
SHAPE = (7, 5)


class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """How often a weight of the shape is cast."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Counts, and calls."""
        named = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and named.get("dtype") is torch.bfloat16:
            self.count += tuple(args[0].shape) == SHAPE
        return func(*args, **named)


class Noisy(nn.Linear):
    """A layer that adds something to its weight for one forward: what was cast before is no longer its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """With a different weight each time."""
        with torch.no_grad():
            noise = torch.rand_like(self.weight)
            self.weight.add_(noise)
        y = super().forward(x)
        with torch.no_grad():
            self.weight.sub_(noise)
        return y


def stage_of(layer: nn.Module, *, recompute: bool, split: bool = False) -> StageBlocks:
    return StageBlocks(
        [layer],
        first_block=0,
        criterion=None,
        recompute=recompute,
        seed=3,
        device=CPU,
        autocast=torch.bfloat16,
        split_backward=split,
    )


@contextmanager
def fresh_weights(layer: nn.Linear) -> Iterator[None]:
    """The layer with other weights, as an update makes them: torch does not see that they were written to."""
    kept = layer.weight.detach().clone()
    layer.weight.detach().numpy()[:] *= 3.0
    yield
    layer.weight.detach().numpy()[:] = kept.numpy()


def train(stage: StageBlocks, microbatches: int) -> None:
    """Two in flight at a time, and an update in the middle."""
    for k in range(1, microbatches + 1, 2):
        for number in (k, k + 1):
            stage.forward(number, (torch.full((4, 5), 1.0 + number),))
        for number in (k, k + 1):
            if stage.recompute:
                stage.recompute_forward(number)
            stage.backward(number, (torch.ones(4, 7, dtype=torch.bfloat16),))
    if stage.defers:
        stage.backward_weight(range(1, microbatches + 1))


def trained(kind: type[nn.Linear], *, recompute: bool, keep: bool, split: bool = False) -> tuple[int, Tensor]:
    """The casts of two versions, and the gradient that both left."""
    torch.manual_seed(0)
    layer = kind(5, 7)
    stage, casts = stage_of(layer, recompute=recompute, split=split), Casts()  # type: ignore[no-untyped-call]
    with casts, keeping_casts() if keep else nullcontext():
        train(stage, 4)
        stage.weights_changed()
        with fresh_weights(layer):
            train(stage, 4)
        stage.weights_changed()
    assert layer.weight.grad is not None
    return casts.count, layer.weight.grad


@pytest.mark.parametrize("recompute", [False, True])
def test_a_weight_is_cast_once_a_version(recompute: bool) -> None:
    count, gradient = trained(nn.Linear, recompute=recompute, keep=True)
    plain_count, plain = trained(nn.Linear, recompute=recompute, keep=False)
    assert (count, plain_count) == (2, 16 if recompute else 8)
    assert torch.equal(gradient, plain)


def test_a_weight_whose_gradient_waits_is_cast_once_a_version_too() -> None:
    _, gradient = trained(nn.Linear, recompute=False, keep=True)
    count, split = trained(nn.Linear, recompute=False, keep=True, split=True)
    assert count == 2
    assert torch.equal(gradient, split)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_weight_that_its_block_changes_is_cast_in_every_forward(recompute: bool, split: bool) -> None:
    _, gradient = trained(Noisy, recompute=recompute, keep=True, split=split)
    _, plain = trained(Noisy, recompute=recompute, keep=False)
    assert torch.equal(gradient, plain)


@pytest.mark.parametrize("split", [False, True])
def test_copies_are_held_once_beside_what_each_microbatch_keeps(split: bool) -> None:
    """Of each its input, in float32 and cast to bfloat16; the weight's copy, 2 bytes a number, is all microbatches'."""
    stage = stage_of(nn.Linear(5, 7), recompute=False, split=split)
    with keeping_casts():
        for k in (1, 2, 3):
            stage.forward(k, (torch.ones(4, 5, requires_grad=True),))
    assert [stage.memory.tensors_bytes(k) for k in (1, 2, 3)] == [4 * 5 * (4 + 2)] * 3
    assert stage.memory.cast_bytes == 2 * 7 * 5
    stage.weights_changed()
    assert stage.memory.cast_bytes == 0


def test_nothing_is_kept_once_the_run_is_over() -> None:
    layer = nn.Linear(5, 7)
    x = torch.ones(4, 5)
    with keeping_casts(), torch.autocast("cpu", torch.bfloat16):
        layer(x)
    with Casts() as casts, torch.autocast("cpu", torch.bfloat16):  # type: ignore[no-untyped-call]
        layer(x)
    assert casts.count == 1
