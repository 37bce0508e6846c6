"""Fewest stages: the fewest with which all stages stay within a limit on compute, and within the device's memory.

A stage holds more microbatches in flight if more stages follow it. So stages are counted from the last one, and each
begins as early as it may, because any part of a stage within its limits is within them too. The memory of the last k
stages then does not depend on the depth. One count rules out all smaller depths at once.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from pipeplan.arrays import FloatArray
from pipeplan.costs.memory import Copies, paper_copies, training_copies
from pipeplan.planners.chain import ProfileChain
from pipeplan.planners.problem import PlanningProblem, recompute_units
from pipeplan.planners.two_bw.split import ROUNDING
from pipeplan.programs.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageLimit:
    """Sums over the blocks [0, i): of their compute, and of lower bounds on their bytes in a stage. Also the capacity
    for these bytes: of the first stage, and of a stage that receives its inputs.
    """

    sums_s: FloatArray
    held: FloatArray
    first_room: float
    room: float


@dataclass(frozen=True, kw_only=True, eq=False)
class FewestStages:
    """The counts for a schedule and a microbatch size; `microbatches` is the upper bound on those in flight.

    A stage has several modes: without recomputation, and with it by each unit.
    """

    problem: PlanningProblem
    chain: ProfileChain
    laws: Schedule
    modes: tuple[bool, ...]
    microbatches: int
    master_weights: bool
    _limits: dict[int, list[StageLimit]] = field(default_factory=dict)

    def within(self, limit_s: float, most: int) -> float:
        """The fewest stages that each compute within the limit, without transfers; infinite if more than `most`."""
        most_s = limit_s * (1 + 2 * ROUNDING)
        left_s, stop = self.chain.least_s, self.chain.blocks
        for place in range(1, most + 1):
            if left_s[stop] > (most + 1 - place) * most_s:  # too much for all remaining stages
                break
            start = stop
            for limit in self.limits(place):
                sums_s, held = limit.sums_s, limit.held
                begin = int(sums_s.searchsorted(sums_s[stop] - most_s))
                if begin == 0 and held[stop] <= limit.first_room:
                    return place
                if held[stop] - held[begin] > limit.room:
                    begin = max(begin, int(held.searchsorted(held[stop] - limit.room)))
                start = min(start, max(begin, 1))
            if start == stop:
                break
            stop = start
        return inf

    def limits(self, place: int) -> list[StageLimit]:
        """By mode, the limit of the stage at this place; the last stage's place is 1."""
        if place not in self._limits:
            self._limits[place] = []
            room = self.problem.cluster.device.usable_bytes * (1 + 2 * ROUNDING)
            for recompute, unit in self.ways:
                copies = self._copies(recompute, unit, place)
                total, first = (self.chain.stage_sum(each) for each in (copies, replace(copies, input_buffers=0)))
                limit = StageLimit(
                    sums_s=self.chain.recomputed_s if recompute else self.chain.compute_s,
                    held=total.sums,
                    first_room=room - first.least_besides(is_first=True),
                    room=room - total.least_besides(is_first=False),
                )
                self._limits[place].append(limit)
        return self._limits[place]

    @cached_property
    def ways(self) -> list[tuple[bool, str]]:
        """Whether a stage recomputes, and by which unit."""
        units = recompute_units(self.problem, self.laws)
        return [(mode, unit) for mode in self.modes for unit in (units if mode else units[:1])]

    def _copies(self, recompute: bool, unit: str, place: int) -> Copies:
        """Lower bounds on the copies held by the stage at this place."""
        options = self.problem.options
        if options.memory == "paper":
            return paper_copies(self.laws, recompute=recompute, depth=place, microbatches=self.microbatches)
        return training_copies(
            self.laws,
            options.optimizer_or_default,
            recompute=recompute,
            held=self._in_flight(place),
            dtype=self.problem.profile.dtype,
            autocast=self.problem.profile.autocast,
            master_weights=self.master_weights,
            held_before=self._in_flight(place + 1),
            sends_on=place > 1,
            microbatches=self.microbatches,
            unit=unit,
        )

    def _in_flight(self, place: int) -> int:
        if self.laws.keeps_batch:
            return self.microbatches
        return min(place, self.microbatches) if self.laws.fills else 1
