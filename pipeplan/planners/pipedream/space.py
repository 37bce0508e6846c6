"""Space: states and network levels in the form in which partitions are searched, and what a stage on them takes.

Level k joins `units` of level k - 1; level 1 joins devices. With A^0 the compute of a stage's blocks (SOSP 2019,
section 3.1; on one level PipeDream 2018, section 3.2)

    T^k(i..j, m) = 1/m max(A^{k-1}(i..j, all units of level k - 1), W_k(m))     W_k(m) = 4 (m - 1)/m |w| / B_k
    A^k(i..j, m) = min(T^k(i..j, m), min over s, m' of max(A^k(i..s, m - m'), 2 a_s / B_k, T^k(s+1..j, m')))

W_k is the exchange through a parameter server; an all-reduce moves half of it.
"""

from dataclasses import dataclass

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.planners.pipedream.states import States

ROUNDING = 1e-12
"""Times that differ by less, relatively, are equal: sums in different orders differ so."""

STEP = 4e-12
"""A plan is better than another only by more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelLinks:
    """One level of the network: so many units behind links of this speed."""

    units: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionSpace:
    """States in the order of what is computed before them, sources first; `original` is each one's index outside.

    `exchange` is the law's factor: W = exchange (m - 1)/m |w| / B.
    """

    compute_s: FloatArray
    weight_bytes: FloatArray
    boundary_bytes: FloatArray
    original: IntArray
    levels: tuple[LevelLinks, ...]
    exchange: float
    before: BoolArray | None = None

    def __len__(self) -> int:
        return len(self.compute_s)

    @property
    def last(self) -> int:
        """The state with everything before it."""
        return len(self) - 1

    def devices_inside(self, level: int) -> int:
        """The devices of one unit that this level (from 0) joins."""
        return int(np.prod([links.units for links in self.levels[:level]], dtype=np.int64))

    def allowed(self, level: int, bottleneck_s: float) -> BoolArray:
        """The states that may be cut within the bottleneck: 2 a / B, activations and gradients. The ends always are."""
        limit = bottleneck_s * self.levels[level].bandwidth_bytes_per_s * (1 + ROUNDING)
        return np.asarray(2.0 * self.boundary_bytes <= limit)

    def within(self, start: int, stop: int) -> IntArray:
        """The states from one to another, both included, that lie between them."""
        if self.before is None:
            return np.arange(start, stop + 1)
        inner = np.flatnonzero(self.before[start] & self.before[:, stop])
        return np.concatenate(([start], inner, [stop]))

    def successors(self, start: int) -> IntArray:
        """The states that a stage from here may end at."""
        if self.before is None:
            return np.arange(start + 1, len(self))
        return np.flatnonzero(self.before[start])

    def exchange_s(self, level: int, weight_bytes: FloatArray | float, units: FloatArray | float) -> FloatArray:
        """W_k(m), not yet divided by m."""
        share = self.exchange * (np.asarray(units, dtype=np.float64) - 1) / units
        return np.asarray(share * weight_bytes / self.levels[level].bandwidth_bytes_per_s)


def space_of(states: States, levels: tuple[LevelLinks, ...], exchange: float) -> PartitionSpace:
    """The states, sorted by their compute: what a stage of so much work can reach is then a range of them."""
    order = np.argsort(states.compute_s, kind="stable")
    before = None if states.before is None else np.ascontiguousarray(states.before[np.ix_(order, order)])
    return PartitionSpace(
        compute_s=np.asarray(states.compute_s, dtype=np.float64)[order],
        weight_bytes=np.asarray(states.weight_bytes, dtype=np.float64)[order],
        boundary_bytes=np.asarray(states.boundary_bytes, dtype=np.float64)[order],
        original=order,
        levels=levels,
        exchange=exchange,
        before=before,
    )
