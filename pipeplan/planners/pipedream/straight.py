"""Straight: PipeDream's recurrence (2018, section 3.2) without replication: one device a stage, all devices used.

The stages are counted from the end. A stage with j - 1 downstream keeps j minibatches in flight, and the cut before it
crosses the level whose units j stages fill. So all terms are known, and the plain recurrence gives the optimum.
O(n^2 M), less the stages beyond a bound on their work.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.planners.pipedream.fitting import Memory
from pipeplan.planners.pipedream.probe import Stages
from pipeplan.planners.pipedream.space import ROUNDING, PartitionSpace


@dataclass(frozen=True, kw_only=True, eq=False)
class Straight:
    """Pipelines of one device a stage. `memory` leaves out what does not fit; `of_bytes` minimises bytes, not time."""

    space: PartitionSpace
    memory: Memory | None = None
    of_bytes: bool = False

    def optimum(self, stages: int) -> tuple[float, Stages] | None:
        """The least bottleneck (or bytes) of exactly `stages` stages, and these; None if there are none.

        Ties: fewer bytes sent, then the smaller first cut, and so on.
        """
        if stages > self.space.last:
            return None
        total_s = float(self.space.compute_s[-1])
        bound_s, best = 0.0, np.inf
        longest_s = max(2 * total_s / stages, float(np.diff(self.space.compute_s).max()))
        while best > bound_s and bound_s < total_s:
            # A cost beyond the bound becomes the next bound: no better pipeline has a longer stage.
            next_s = best if np.isfinite(best) else max(2 * bound_s, longest_s)
            bound_s = total_s if self.of_bytes else min(next_s, total_s)
            # V by j and first state, V(end, 0) = 0; and the same with the cut before that state
            values = np.full((stages + 1, len(self.space)), np.inf)
            values[0, -1] = 0.0
            after = values.copy()
            cuts_s = self._cuts_s(stages)
            for here, window, cost in self._rows(stages, bound_s):
                # step 4 of `space` with m' = 1: V(a, j) = min over b of max(T(a..b), 2 a_b / B, V(b, j - 1))
                values[1:, here] = np.maximum(cost, after[:-1, window]).min(axis=1, initial=np.inf)
                after[:, here] = np.maximum(values[:, here], cuts_s[:, here])
            best = float(values[stages, 0])
        return (best, tuple(self._preferred(stages, best))) if np.isfinite(best) else None

    def _rows(self, stages: int, bound_s: float) -> Iterator[tuple[int, slice, FloatArray]]:
        """By first state, from the last: the states at which a stage within the bound may end, and its cost.

        The last is by j as well if memory counts.
        """
        space, held = self.space, np.arange(1.0, stages + 1)[:, None]
        messages = self._messages(stages)
        ends = np.searchsorted(space.compute_s, (space.compute_s + bound_s) * (1 + ROUNDING), side="right")
        for here in reversed(range(space.last)):
            window = slice(here + 1, int(ends[here]))
            cost = (space.compute_s[window] - space.compute_s[here])[None]
            if self.memory is not None:
                columns = np.arange(window.start, window.stop)
                held_bytes = self.memory.held_bytes(np.array([here]), columns, held) + messages(here, columns)
                fits = held_bytes <= self.memory.law.limit_bytes
                cost = held_bytes if self.of_bytes else np.where(fits, cost, np.inf)
            yield here, window, cost if space.before is None else np.where(space.before[here, window], cost, np.inf)

    def _messages(self, stages: int) -> Callable[[int, IntArray], FloatArray]:
        """The bytes in transit of stages from one state to others, by the number of stages from there to the end."""
        memory = self.memory
        if memory is None or memory.law.buffers is None:
            return lambda here, columns: np.zeros((1, 1))
        every = [memory.law.buffers((int(left < stages), 1, int(left > 1), left - 1)) for left in range(1, stages + 1)]
        counts = [(each.inputs, each.outputs, each.kept_outputs) for each in every]
        inputs, outputs, kept = np.array(counts, dtype=np.float64).T[:, :, None]
        boundary, kept_bytes = memory.states.boundary_bytes, memory.kept_output_bytes
        return lambda here, columns: inputs * boundary[here] + outputs * boundary[columns] - kept * kept_bytes[columns]

    def _cuts_s(self, stages: int) -> FloatArray:
        """The seconds of a cut at each state, by the number of stages downstream: 2 a / B of the level crossed."""
        if self.of_bytes:
            return np.zeros((stages + 1, len(self.space)))
        downstream = np.arange(stages + 1)
        bandwidth = np.full(stages + 1, np.inf)
        for level, links in enumerate(self.space.levels):
            bandwidth[downstream % self.space.devices_inside(level) == 0] = links.bandwidth_bytes_per_s
        bandwidth[0] = np.inf
        return np.asarray(2.0 * self.space.boundary_bytes / bandwidth[:, None])

    def _preferred(self, stages: int, cost: float) -> Iterator[tuple[int, int, int]]:
        """The stages within the cost that send the fewest bytes; ties prefer the smallest cuts."""
        limit = cost * (1 + 2 * ROUNDING)
        at_cut = np.where(self._cuts_s(stages) <= limit, 2 * self.space.boundary_bytes, np.inf)
        # the bytes sent by j and first state, and the same with the cut before that state
        sent = np.full((stages + 1, len(self.space)), np.inf)
        sent[0, -1] = 0.0
        after = sent + at_cut
        rows = {}
        for here, window, stage in self._rows(stages, float(self.space.compute_s[-1]) if self.of_bytes else limit):
            rows[here] = window, stage <= limit
            sent[1:, here] = np.where(stage <= limit, after[:-1, window], np.inf).min(axis=1, initial=np.inf)
            after[:, here] = sent[:, here] + at_cut[:, here]
        here = 0
        for j in reversed(range(stages)):
            window, within = rows[here]
            moved = np.where(within[j % len(within)], after[j, window], np.inf)
            stop = window.start + int((moved <= sent[j + 1, here] * (1 + ROUNDING)).argmax())
            yield here, stop, 1
            here = stop
