"""Passage: one microbatch through the whole chain, forward and backward, block by block.

The graph is cut at every boundary, so that each block's backward can be run, and looked at, for itself:

    inputs -> [block 0] -> outputs || leaves -> [block 1] -> ... -> [last block, loss]
              gradients <- leaves.grad  ||  <- [block 1] <- ... <- [loss, last block]
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from worker_agent.models.losses import Loss
from worker_agent.models.user_code import user_code
from worker_agent.models.values import Value, as_values, carries_gradient

Direction = Literal["forward", "backward"]
Around = Callable[[Direction, int], AbstractContextManager[None]]
"""Entered around a block's forward and around its backward: where times are taken and saved tensors are seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One block's part of a passage: its inputs (leaves of its graph), the roots of its graph, what it gave."""

    inputs: tuple[Tensor, ...]
    roots: tuple[Tensor, ...]
    output_bytes: int

    @property
    def input_bytes(self) -> int:
        """The bytes of all its inputs."""
        return sum(tensor.nbytes for tensor in self.inputs)


def pass_forward(
    blocks: Sequence[nn.Module], loss: Loss, inputs: Value, targets: Value, around: Around
) -> list[Crossing]:
    """Runs every block on what the one before gave. The loss belongs to the last block, as it does to a last stage."""
    crossings: list[Crossing] = []
    values = as_values(inputs)
    for index, block in enumerate(blocks):
        leaves = values if index == 0 else tuple(t.detach().requires_grad_(carries_gradient(t)) for t in values)
        last = index == len(blocks) - 1
        with user_code(_place(index, block)), around("forward", index):
            result = block(*leaves)
            values = as_values(result)
            roots = (loss(result, targets),) if last else values
        size_bytes = sum(tensor.nbytes for tensor in values)
        graded = tuple(t for t in roots if carries_gradient(t))
        crossings.append(Crossing(inputs=leaves, roots=graded, output_bytes=size_bytes))
        del result, roots
    return crossings


def pass_backward(crossings: list[Crossing], around: Around) -> None:
    """Runs every block's backward, last to first, and drops its crossing: weights' gradients add up in `.grad`."""
    gradients = tuple(torch.ones_like(root) for root in crossings[-1].roots)
    while crossings:
        crossing = crossings.pop()
        pairs = [(root, g) for root, g in zip(crossing.roots, gradients, strict=True) if root.requires_grad]
        with user_code(f"the backward of block {len(crossings)}"), around("backward", len(crossings)):
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        wanted = [leaf for leaf in crossing.inputs if carries_gradient(leaf)]
        gradients = tuple(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in wanted)


def _place(index: int, block: nn.Module) -> str:
    return f"block {index} ({type(block).__name__})"


@contextmanager
def nothing_around(direction: Direction, index: int) -> Iterator[None]:
    """An `Around` that does nothing."""
    yield
