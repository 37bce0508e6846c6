"""Fewest stages: in how few a pipeline can keep a limit on every stage's compute, and the device's memory.

A stage holds the more microbatches in flight, the more stages follow it. So stages are counted from the last one, and
each begins as early as it may: where a stage keeps its limits, any part of it does. What the last k stages hold then
does not depend on the depth. One count rules out all smaller depths at once.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from pipeplan.costs.memory import Copies, paper_copies, training_copies
from pipeplan.errors import LARGEST_AMOUNT
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.two_bw.chain import ProfileChain
from pipeplan.planners.two_bw.split import ROUNDING
from pipeplan.programs.schedule import Schedule

_Limit = tuple[int, int, float, float]
"""Copies of weights and of activations that a stage holds at least, and how many bytes of them the device has room for:
if it is the first stage, and if another one sends it its inputs.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class FewestStages:
    """The counts for a schedule and a microbatch size; `microbatches` is the most that are ever in flight."""

    problem: PlanningProblem
    chain: ProfileChain
    laws: Schedule
    modes: tuple[bool, ...]
    microbatches: int
    master_weights: bool
    _memory: list[list[_Limit]] = field(default_factory=list)

    def within(self, limit_s: float, most: int) -> float:
        """How few stages compute no longer than the limit each, transfers left out; infinite where `most` do not."""
        weights, activations = self._bytes
        compute = [self.chain.listed_s(recompute=mode) for mode in self.modes]
        most_s = limit_s * (1 + 2 * ROUNDING)
        left_s, stop = self.chain.least_s, self.chain.blocks
        for place in range(1, most + 1):
            if left_s[stop] > (most + 1 - place) * most_s:  # too much for all stages that are left
                break
            start = stop
            if len(self._memory) < place:
                self._memory.append([self._limit(mode, place) for mode in self.modes])
            for sums_s, (versions, kept, first_room, room) in zip(compute, self._memory[place - 1], strict=True):
                begin = bisect_left(sums_s, sums_s[stop] - most_s)
                end = versions * weights[stop] + kept * activations[stop]
                if begin == 0 and end <= first_room:
                    return place
                if end - (versions * weights[begin] + kept * activations[begin]) > room:
                    held = [versions * weights[i] + kept * activations[i] for i in range(begin, stop + 1)]
                    begin += bisect_left(held, end - room)
                start = min(start, max(begin, 1))
            if start == stop:
                break
            stop = start
        return inf

    def _limit(self, recompute: bool, place: int) -> _Limit:
        held, (first_input, least_input, least_output) = self._copies(recompute, place), self._messages
        device_bytes = self.problem.cluster.device.usable_bytes * (1 + 2 * ROUNDING)
        room = device_bytes - (held.output_buffers * least_output if place > 1 else 0.0)
        inner = room - (held.inputs + held.input_buffers) * least_input
        return held.weights, held.activations, room - held.inputs * first_input, inner

    def _copies(self, recompute: bool, place: int) -> Copies:
        """What the stage at this place, the last one's being 1, holds at least."""
        options = self.problem.options
        if options.memory == "paper":
            return paper_copies(self.laws, recompute=recompute, depth=place, microbatches=self.microbatches)
        return training_copies(
            self.laws,
            options.optimizer,
            recompute=recompute,
            held=self._in_flight(place),
            dtype=self.problem.profile.dtype,
            master_weights=self.master_weights,
            held_before=self._in_flight(place + 1),
            sends_on=place > 1,
        )

    def _in_flight(self, place: int) -> int:
        if self.laws.keeps_batch:
            return self.microbatches
        return min(place, self.microbatches) if self.laws.fills else 1

    @cached_property
    def _bytes(self) -> tuple[list[float], list[float]]:
        """The weights and activations of the blocks [0, i)."""
        return self.chain.weight_bytes.tolist(), self.chain.activation_bytes.tolist()

    @cached_property
    def _messages(self) -> tuple[float, float, float]:
        """The first stage's input, and the smallest input and output between stages."""
        first, *inner = self.chain.input_bytes[:-1].tolist()
        outputs = self.chain.output_bytes[1:-1].tolist()
        return first, min(inner, default=LARGEST_AMOUNT), min(outputs, default=LARGEST_AMOUNT)
