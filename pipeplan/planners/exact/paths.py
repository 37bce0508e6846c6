"""Paths: the recurrence that finds the stages whose slowest takes least, over every way to place them.

A step is a stage of one kind: it leads from a node to others, those of `places.Lattice`, or along a row of given kinds.
Let t[i, j] be a stage's entry in the table of its kind. Then B(v, j), the least largest entry of the stages before
block j over all paths to the node v, is the minimum over the steps to v, from any u, and over i < j:

    B(v, j) = min max(B(u, i), t[i, j])

No order among the entries is assumed: the recurrence is exact for any tables.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from pipeplan.arrays import FloatArray

END = "end"
"""The node after the last stage."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class StageStep(Generic[K]):
    """One stage. The steps of a path come in order; a node that no step before leads to is a first stage."""

    node: Hashable
    kind: K
    targets: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Path(Generic[K]):
    """The kinds of the stages from a first one to the end, where each stops, and the largest entry."""

    kinds: tuple[K, ...]
    stops: tuple[int, ...]
    worst: float


def in_a_row(kinds: Sequence[K]) -> list[StageStep[K]]:
    """The steps of stages whose kinds are known."""
    last = len(kinds) - 1
    return [StageStep(s, kind, (s + 1 if s < last else END,)) for s, kind in enumerate(kinds)]


def best_path(
    steps: Sequence[StageStep[K]], table: Callable[[K], FloatArray], *, fewest: bool = False
) -> Path[K] | None:
    """The path with the least largest entry; None where there is none.

    Ties prefer (with `fewest`) the fewest stages, then the least sum of squares: the most even stages; then the first
    steps. Takes O(blocks^2) for each step.
    """
    if not steps:
        return None
    worst = float(_fold(steps, table, np.maximum, -np.inf)[END][-1])
    if worst == np.inf:
        return None
    blocks = len(table(steps[0].kind)) - 1
    each_stage = blocks * worst**2 if fewest else 0.0  # more than all squares together

    def squares(kind: K) -> FloatArray:
        entries = table(kind)
        return np.where(entries <= worst, np.square(entries) + each_stage, np.inf)

    # From the end back, each stage is one that the sum is made of.
    sums, arriving = _fold(steps, squares, np.add, 0.0), dict[Hashable, list[StageStep[K]]]()
    for step in steps:
        for target in step.targets:
            arriving.setdefault(target, []).append(step)
    node: Hashable = END
    stop, taken = blocks, list[tuple[K, int]]()
    while node in arriving:
        reached = ((step, sums[step.node] + squares(step.kind)[:, stop]) for step in arriving[node])
        step, before = next((step, before) for step, before in reached if before.min() == sums[node][stop])
        taken.append((step.kind, stop))
        node, stop = step.node, int(np.argmin(before))
    taken.reverse()
    return Path(tuple(kind for kind, _ in taken), tuple(stop for _, stop in taken), worst)


def every_path(steps: Sequence[StageStep[K]]) -> Iterator[tuple[K, ...]]:
    """The kinds of the stages on every path from a first stage to the end, depth first."""
    by_node, targets = dict[Hashable, list[StageStep[K]]](), {target for step in steps for target in step.targets}
    for step in steps:
        by_node.setdefault(step.node, []).append(step)

    def onward(node: Hashable) -> Iterator[tuple[K, ...]]:
        for step in by_node.get(node, ()):
            for target in step.targets:
                if target == END:
                    yield (step.kind,)
                else:
                    yield from ((step.kind, *later) for later in onward(target))

    for node in by_node:
        if node not in targets:
            yield from onward(node)


def _fold(
    steps: Sequence[StageStep[K]], table: Callable[[K], FloatArray], combine: np.ufunc, nothing: float
) -> Mapping[Hashable, FloatArray]:
    """By node, the best of the stages before every block."""
    first = np.full(len(table(steps[0].kind)), np.inf)
    first[0] = nothing
    best: dict[Hashable, FloatArray] = {END: np.full_like(first, np.inf)}
    for step in steps:
        before = best.setdefault(step.node, first)
        reached = combine(before[:, None], table(step.kind)).min(axis=0) if before.min() < np.inf else before
        for node in step.targets:
            best[node] = np.minimum(best[node], reached) if node in best else reached
    return best
