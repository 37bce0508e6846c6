"""Message recurrence: PipeDream's recurrence (2018, section 3.2) with memory, messages included, on one level.

A stage's messages in transit depend on the replicas of the stages before and after it (`fitting.Neighbours`). So the
recurrence of `memory_recurrence` has both as parameters:

    V(a, p, r | q) = min over b, t of max(T(a..b, r), 2 a_b / B, V(b, p - r, t | r))        V(end, 0) = 0

is the time of the best pipeline from state a to the end on p devices, r of them its first stage's, after a stage of q
replicas (0: none). T is infinite where the stage does not fit between stages of q and t. All t are solved together, and
all q for the stages that fit with any. O(n^2 M^3), for few devices.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.planners.pipedream.memory_recurrence import CALL_ENTRIES, Recurrence, downstream_each
from pipeplan.planners.pipedream.probe import Stages
from pipeplan.planners.pipedream.space import ROUNDING
from pipeplan.programs.in_transit import InTransit

Combine = Callable[[FloatArray, FloatArray], FloatArray]
"""A stage's value and the value of what follows -> the value of both: the maximum of seconds, the sum of ranks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageRecurrence:
    """The pipelines of a space of one level."""

    tables: Recurrence

    def work(self) -> float:
        """An estimate of the entries that are compared."""
        return max(len(self.tables.space) ** 2, CALL_ENTRIES) * self._units**3 / 6.0

    def optimum(self, *, fewer: bool) -> tuple[float, Stages] | None:
        """The least bottleneck in seconds and its stages, on all devices, or on `fewer`. None if none fit.

        Ties go as in `ties`: to fewer devices, fewer stages, fewer bytes sent, and smaller cuts.
        """
        boundaries_s = self.tables.boundaries_s(0)
        every = range(1, self._units + 1) if fewer else (self._units,)
        values = self._values(self._stage_s, boundaries_s, np.maximum)
        whole = {total: float(values[total][:, 0, 0].min()) for total in every}
        cost_s = min(whole.values())
        if not np.isfinite(cost_s):
            return None
        limit_s = cost_s * (1 + 2 * ROUNDING)
        total = min(total for total in every if whole[total] <= limit_s)

        space = self.tables.space
        between_bytes = space.exchange * (space.weight_bytes - space.weight_bytes[:, None])
        cuts_bytes = 2.0 * space.boundary_bytes
        one_stage = 2.0 * float(cuts_bytes.sum()) + float(between_bytes[0, -1]) + 1.0  # exceeds what all stages send

        def rank(first: int, later: int) -> FloatArray:
            sent_bytes = one_stage + (first - 1) / first * between_bytes
            return np.where(self._stage_s(first, later) <= limit_s, sent_bytes, np.inf)

        cuts = np.where(boundaries_s <= limit_s, cuts_bytes, np.inf)
        ranks = self._values(rank, cuts, np.add)
        return cost_s, tuple(self._read(rank, cuts, ranks, total))

    @property
    def _units(self) -> int:
        return self.tables.space.levels[0].units

    def _values(self, stages: Callable[[int, int], FloatArray], cuts: FloatArray, combine: Combine) -> list[FloatArray]:
        """V by p, each of the shape (r, q, states), from the values of `stages` by r and p - r, and of `cuts`."""
        values = [self._at_end[None, None]]
        for total in range(1, self._units + 1):
            before = np.arange(self._units - total + 1)
            rows = []
            for first in range(1, total + 1):
                later = total - first
                after = combine(values[later][:, first], cuts) if later else values[0][0]
                rows.append(self._stage(stages(first, later), first, later, after, combine)[before])
            values.append(np.stack(rows))
        return values

    def _stage(self, stage: FloatArray, first: int, later: int, after: FloatArray, combine: Combine) -> FloatArray:
        """V by q and state, of a first stage of the value `stage`; `after` is the value by t and state that follows.

        The messages of a stage are a number of its inputs, which depends on q, and of its outputs, which depends on t.
        So the least value after a stage that may have e outputs is a running minimum over the numbers of outputs.
        """
        memory, (spare_bytes, inputs, outputs) = self.tables.memory, self._messages(first, later)
        received_bytes, sent_bytes = memory.boundary_bytes[:, None], memory.boundary_bytes
        by_outputs = np.argsort(outputs, kind="stable")
        outputs, least = outputs[by_outputs], np.minimum.accumulate(after[by_outputs], axis=0)

        # stages that fit with the most messages, for all q at once
        some, messages_bytes = np.isfinite(stage), inputs.max() * received_bytes + outputs[-1] * sent_bytes
        fits = some & (messages_bytes <= spare_bytes)
        best = combine(np.where(fits, stage, np.inf), least[-1]).min(axis=1)
        values = np.tile(best, (len(inputs), 1))

        # stages that fit with some messages: the most outputs that each may have, by q
        a, b = np.nonzero(some & ~fits)
        if len(a) == 0:
            return values
        least = np.concatenate((np.full_like(least[:1], np.inf), least))
        starts, place = np.unique(a, return_index=True)
        for count in np.unique(inputs):
            left_bytes = spare_bytes[a, b] - count * memory.boundary_bytes[a]
            with np.errstate(divide="ignore", invalid="ignore"):
                allowed = np.where(sent_bytes[b] > 0, left_bytes // sent_bytes[b], np.where(left_bytes < 0, -1, np.inf))
            value = combine(stage[a, b], least[np.searchsorted(outputs, allowed, side="right"), b])
            values[np.ix_(inputs == count, starts)] = np.minimum(best[starts], np.minimum.reduceat(value, place))
        return values

    def _messages(self, first: int, later: int) -> tuple[FloatArray, IntArray, IntArray]:
        """The bytes that stages leave for messages; the numbers of inputs by q, and of outputs by t."""
        memory, every = self.tables.memory, np.arange(len(self.tables.space))
        held_bytes = memory.held_bytes(every, every, 1.0 + downstream_each(later, first))
        before = [memory.messages((q, first, min(later, 1), later)) for q in range(self._units - first - later + 1)]
        after = [memory.messages((0, first, t, later)) for t in (range(1, later + 1) if later else (0,))]
        kept = InTransit(kept_outputs=after[0].kept_outputs)
        spare_bytes = memory.law.limit_bytes - held_bytes - memory.message_bytes(every, every, kept)
        return spare_bytes, np.array([each.inputs for each in before]), np.array([each.outputs for each in after])

    def _stage_s(self, first: int, later: int) -> FloatArray:
        return self.tables.stage_s(0, first, later, 0)

    @property
    def _at_end(self) -> FloatArray:
        """V of no devices: 0 at the end."""
        return np.where(np.arange(len(self.tables.space)) == self.tables.space.last, 0.0, np.inf)

    def _read(
        self, stages: Callable[[int, int], FloatArray], cuts: FloatArray, ranks: list[FloatArray], total: int
    ) -> Iterator[tuple[int, int, int]]:
        """The stages of the least rank, from the front."""
        last, here, q = self.tables.space.last, 0, 0
        first = 1 + int(np.argmax(ranks[total][:, 0, 0] <= ranks[total][:, 0, 0].min() * (1 + ROUNDING)))
        while here < last:
            later = total - first
            spare_bytes, inputs, outputs = self._messages(first, later)
            received_bytes, sent_bytes = (
                each * self.tables.memory.boundary_bytes for each in (inputs[q], outputs[:, None])
            )
            fits = received_bytes[here] + sent_bytes <= spare_bytes[here]
            after = ranks[later][:, first] + cuts if later else ranks[0][0]
            through = np.where(fits, stages(first, later)[here] + after, np.inf)
            # the smallest cut, then the fewest devices after it
            stop, t = np.argwhere((through <= through.min() * (1 + ROUNDING)).T)[0].tolist()
            yield here, stop, first
            here, total, q, first = stop, later, first, t + 1
