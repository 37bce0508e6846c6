"""Partition: the best way to lay contiguous stages of blocks on contiguous devices, all of which are used.

The recurrence of PipeDream (2018, section 3.2) from the other end: B(i, p) is the slowest stage of the best pipeline
of the blocks [i, n) on the devices [p, M),

    B(i, p) = min over j, r of max(cost of the stage [i, j) on the devices [p, p + r), B(j, p + r)),    B(n, M) = 0.

From the front or from the end the optimum is one; from the end a stage's first device is known, and with it the links
that it crosses and how many minibatches it has in flight. O(n^2 M^2) time, vectorised over everything but p.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from planner_service.core.cost.compute import FloatArray, IntArray

_CHUNK_ENTRIES = 1 << 18
"""Entries of a table that are worked on at once: few enough to stay in a core's cache."""

TableAt = Callable[[int, IntArray], FloatArray]
"""For stages that start on a device, by replicas: a (replicas, n, n) array over intervals of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is laid out: n blocks on M devices, by cost (the largest counts) and by traffic (the sum counts).

    `replicas_at_most` restricts the replicas of a stage: 1 asks for a straight pipeline.
    """

    blocks: int
    devices: int
    cost: TableAt
    traffic: TableAt
    replicas_at_most: int | None = None

    def replicas_from(self, first: int) -> Iterator[IntArray]:
        """The replicas that a stage from this device on may have, in chunks."""
        most = self.devices - first
        if self.replicas_at_most is not None:
            most = min(most, self.replicas_at_most)
        chunk = max(_CHUNK_ENTRIES // self.blocks**2, 1)
        for start in range(1, most + 1, chunk):
            yield np.arange(start, min(start + chunk, most + 1), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Blocks [start, stop) on the devices [first, first + replicas)."""

    start: int
    stop: int
    first: int
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The stages in order, and the cost of the worst of them."""

    shares: tuple[Share, ...]
    cost: float


def partition(layout: Layout) -> Partition | None:
    """The partition of the smallest largest cost; None where every one costs infinity (or there is none).

    Ties: fewer stages, then less traffic, then the lexicographically smallest cuts, then fewer replicas on the
    earlier stages. First the optimum is found, then the best under this order among all that reach it.
    """
    worst = _worst_costs(layout)
    optimum = float(worst[0, 0])
    if not np.isfinite(optimum):
        return None
    stages, traffic = _ranks(layout, optimum)
    return Partition(shares=tuple(_walk(layout, optimum, stages, traffic)), cost=optimum)


def _worst_costs(layout: Layout) -> FloatArray:
    """B(i, p) as [p, i]."""
    worst = np.full((layout.devices + 1, layout.blocks + 1), np.inf)
    worst[layout.devices, layout.blocks] = 0.0
    for first in reversed(range(layout.devices)):
        for replicas in layout.replicas_from(first):
            rest = worst[first + replicas][:, None, 1:]
            best = np.maximum(layout.cost(first, replicas), rest).min(axis=(0, 2))
            worst[first, :-1] = np.minimum(worst[first, :-1], best)
    return worst


def _ranks(layout: Layout, optimum: float) -> tuple[FloatArray, FloatArray]:
    """Fewest stages, and among those the least traffic, of the blocks [i, n) on the devices [p, M) as [p, i]."""
    stages = np.full((layout.devices + 1, layout.blocks + 1), np.inf)
    traffic = stages.copy()
    stages[layout.devices, layout.blocks] = traffic[layout.devices, layout.blocks] = 0.0
    for first in reversed(range(layout.devices)):
        for replicas in layout.replicas_from(first):
            count, sent = _candidates(layout, optimum, stages, traffic, first, replicas)
            fewest = count.min(axis=(0, 2))
            least = np.where(count == fewest[:, None], sent, np.inf).min(axis=(0, 2))
            _keep_lesser(stages[first, :-1], traffic[first, :-1], fewest, least)
    return stages, traffic


def _candidates(
    layout: Layout, optimum: float, stages: FloatArray, traffic: FloatArray, first: int, replicas: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Stages and traffic if a stage within the optimum comes first, (replicas, n, n); infinite for others."""
    within = layout.cost(first, replicas) <= optimum
    count = np.where(within, 1.0 + stages[first + replicas][:, None, 1:], np.inf)
    sent = np.where(within, layout.traffic(first, replicas) + traffic[first + replicas][:, None, 1:], np.inf)
    return count, sent


def _keep_lesser(stages: FloatArray, traffic: FloatArray, count: FloatArray, sent: FloatArray) -> None:
    lesser = (count < stages) | ((count == stages) & (sent < traffic))
    stages[lesser] = count[lesser]
    traffic[lesser] = sent[lesser]


def _walk(layout: Layout, optimum: float, stages: FloatArray, traffic: FloatArray) -> Iterator[Share]:
    """Reads the partition off the ranks from the front, so that ties go to the smallest next cut."""
    start = first = 0
    while start < layout.blocks:
        choices: list[tuple[int, int]] = []
        for replicas in layout.replicas_from(first):
            count, sent = _candidates(layout, optimum, stages, traffic, first, replicas)
            ranked = (count[:, start] == stages[first, start]) & (sent[:, start] == traffic[first, start])
            choices += [(int(j) + 1, int(replicas[r])) for r, j in np.argwhere(ranked)]
        stop, count_of_replicas = min(choices)
        yield Share(start=start, stop=stop, first=first, replicas=count_of_replicas)
        start, first = stop, first + count_of_replicas
