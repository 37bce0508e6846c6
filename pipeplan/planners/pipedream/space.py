"""Space: the terms of PipeDream's recurrence: states, network levels, and the time that a stage takes on them.

PipeDream (2018, section 3.2) defines the recurrence for one level of network: the layers 1..N on M machines that are
joined by links of bandwidth B. The cases are the paper's; comments in the solvers refer to our step numbers.

    step 1   W_l^m = 4 (m - 1)/m |w_l| / B     C_i = a_i / B                  exchange of weights; boundary
    step 2   T(i->j, m) = 1/m max(sum T_l, sum W_l^m)      l = i..j           a stage, replicated on m machines
    step 3   A(j, m) = T(1->j, m)                                             case 1: a single stage
    step 4   A(j, m) = min over i < j, m' < m of                              case 2: several stages, of which the
                       max(A(i, m - m'), 2 C_i, T(i+1->j, m'))                last has the layers i+1..j

A is the smaller of the two cases. The paper's initialization, A(1, m) = T(1->1, m) and A(i, 1) = T(1->i, 1), is step 3
where step 4 has nothing to choose from. SOSP 2019, section 3.1, nests levels: level k joins `units` of level k - 1, and
level 1 joins devices. A^0(i->j) is the compute of the layers.

    step 2   T^k(i->j, m) = 1/m max(A^{k-1}(i->j, all units of level k - 1), W_k(m))
    step 3   A^k(i->j, m) = T^k(i->j, m)
    step 4   A^k(i->j, m) = min over s, m' of max(A^k(i->s, m - m'), 2 a_s / B_k, T^k(s+1->j, m'))

Where we differ: W_k(m) = 4 (m - 1)/m |w| / B_k has the factor 4 of a parameter server (2018) on every level, or 2 for
an all-reduce (`exchange`). A stage lies between two states, [i, j), which need not be places of a chain: `states` has
those of a graph. Memory is not in the papers' recurrence; `memory_recurrence` adds it.
"""

from dataclasses import dataclass

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.planners.pipedream.states import States

ROUNDING = 1e-12
"""Times whose relative difference is smaller count as equal: sums in different orders differ by that much."""

STEP = 4e-12
"""A plan is better than another only if it is faster by more than this, relatively."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelLinks:
    """One level of the network: the number of its units, and the speed of the links that join them."""

    units: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionSpace:
    """States by the compute before them, ascending. `original` is the index of each state outside this space.

    `exchange` is the factor of step 1: W = exchange (m - 1)/m |w| / B.
    """

    states: States
    original: IntArray
    levels: tuple[LevelLinks, ...]
    exchange: float

    def __len__(self) -> int:
        return len(self.states)

    @property
    def compute_s(self) -> FloatArray:
        return self.states.compute_s

    @property
    def weight_bytes(self) -> FloatArray:
        return self.states.weight_bytes

    @property
    def boundary_bytes(self) -> FloatArray:
        return self.states.boundary_bytes

    @property
    def before(self) -> BoolArray | None:
        """See `States.before`."""
        return self.states.before

    @property
    def last(self) -> int:
        """The state after all blocks."""
        return len(self) - 1

    def devices_inside(self, level: int) -> int:
        """The devices of one unit that this level (from 0) joins."""
        return int(np.prod([links.units for links in self.levels[:level]], dtype=np.int64))

    def boundaries_s(self, level: int) -> FloatArray:
        """2 a / B in seconds by state."""
        return np.asarray(2.0 * self.boundary_bytes / self.levels[level].bandwidth_bytes_per_s)

    def allowed(self, level: int, bottleneck_s: float) -> BoolArray:
        """The states where a cut takes at most the bottleneck: 2 a / B, activations and gradients; always both ends."""
        # the boundary term of step 4, solved for the bytes
        limit = bottleneck_s * self.levels[level].bandwidth_bytes_per_s * (1 + ROUNDING)
        return np.asarray(2.0 * self.boundary_bytes <= limit)

    def within(self, start: int, stop: int) -> IntArray:
        """The states on the paths from one state to another, both included."""
        if self.before is None:
            return np.arange(start, stop + 1)
        inner = np.flatnonzero(self.before[start] & self.before[:, stop])
        return np.concatenate(([start], inner, [stop]))

    def successors(self, start: int) -> IntArray:
        """The states that a stage from here may end at."""
        if self.before is None:
            return np.arange(start + 1, len(self))
        return np.asarray(self.before[start].nonzero()[0])

    def exchange_s(self, level: int, weight_bytes: FloatArray | float, units: FloatArray | float) -> FloatArray:
        """W_k(m), not yet divided by m."""
        # step 1
        share = self.exchange * (np.asarray(units, dtype=np.float64) - 1) / units
        return np.asarray(share * weight_bytes / self.levels[level].bandwidth_bytes_per_s)


def space_of(states: States, levels: tuple[LevelLinks, ...], exchange: float) -> PartitionSpace:
    """The states, sorted by compute: the states within a stage's reach are then a range."""
    order = np.argsort(states.compute_s, kind="stable")
    return PartitionSpace(states=states.some(order), original=order, levels=levels, exchange=exchange)
