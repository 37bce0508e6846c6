"""Fitting: a stage's memory, and the search for stages that fit on one level.

A stage on r devices has ceil(devices from this stage on / r) minibatches in flight (PipeDream 2018, section 3.3), which
is 1 + ceil(devices downstream / r). Fewer devices downstream, or more on the stage itself, never increase its memory.
So the fewest devices from each state to the end are the best for memory as well. The closed form of `probe` serves here
too, from the end, where the devices downstream are known. Spare devices go to the first stage, which is downstream of
no other. The argument fails for a first stage of one device that may not have two; `memory_recurrence` covers it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.memory import Copies, minibatches_in_flight
from pipeplan.planners.pipedream.probe import Stages, Table, UnitsNeeded, path
from pipeplan.planners.pipedream.recurrence import LevelSearch, Optimum
from pipeplan.planners.pipedream.space import STEP, PartitionSpace
from pipeplan.planners.pipedream.states import States
from pipeplan.planners.stage_sum import StageSum, stage_sum
from pipeplan.programs.in_transit import InTransit

Neighbours: TypeAlias = tuple[int, int, int, int]
"""The devices of the stage before, of the stage itself, of the stage after (0 where there is none), and of all later
ones.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Bytes held = those of the `fixed` copies + held x those of `each`, where `held` is the number of minibatches in
    flight.

    Both accountings of `costs.memory` have this form, but for a stage's messages in transit: `buffers` counts them by
    its neighbours, in the accounting that includes them.
    """

    fixed: Copies
    each: Copies
    limit_bytes: float
    buffers: Callable[[Neighbours], InTransit] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """The law for the states of a space."""

    law: Law
    states: States

    def messages(self, neighbours: Neighbours) -> InTransit:
        """The messages in transit of a stage between these neighbours; none in an accounting without messages."""
        return InTransit() if self.law.buffers is None else self.law.buffers(neighbours)

    def message_bytes(self, rows: IntArray, columns: IntArray, messages: InTransit) -> FloatArray:
        """The bytes of messages in transit of the stages from each row to each column."""
        boundary_bytes = self.states.boundary_bytes
        return messages.bytes(boundary_bytes[rows, None], boundary_bytes[columns], self.kept_output_bytes[columns])

    @property
    def kept_output_bytes(self) -> FloatArray:
        """See `States.kept_output_bytes`."""
        kept_bytes = self.states.kept_output_bytes
        return np.zeros(len(self.states)) if kept_bytes is None else kept_bytes

    def held_bytes(self, rows: IntArray, columns: IntArray, held: FloatArray | float) -> FloatArray:
        """The bytes of a worker of the stages from each row to each column, with `held` minibatches in flight."""
        fixed, each = self.fixed_and_each(rows, columns)
        return np.asarray(fixed + held * each)

    def most_in_flight(self, rows: IntArray, columns: IntArray) -> FloatArray:
        """Upper bound on the minibatches in flight; infinite if they take no bytes, below 1 if none fits."""
        fixed, each = self.fixed_and_each(rows, columns)
        left = self.law.limit_bytes - fixed
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.floor(left / each)
        return np.where(each > 0, most, np.where(left >= 0, np.inf, -1.0))

    def fixed_and_each(self, rows: IntArray, columns: IntArray) -> tuple[FloatArray, FloatArray]:
        """The bytes that do not depend on the minibatches in flight, and those of each of them."""
        fixed, each = self._sums
        return fixed.at(rows[:, None], columns), each.at(rows[:, None], columns)

    @cached_property
    def _sums(self) -> tuple[StageSum, StageSum]:
        held_of = self.states.quantities
        trained = replace(held_of, untrained=np.zeros(len(self.states)))
        return stage_sum(held_of, self.law.fixed), stage_sum(trained, self.law.each)


class FittingSearch:
    """The fastest stages that fit, on one level."""

    def __init__(self, level: LevelSearch, memory: Memory) -> None:
        self.level = level
        self.memory = memory

    def search(self, stages: Stages, refuted_s: float) -> Optimum:
        """The optimum, or bounds on it, from stages that fit and a refuted bottleneck."""
        cost_s, low_s = self.level.measured(stages).cost_s, refuted_s
        while cost_s * (1 - STEP) > low_s:
            # the geometric mean, or the upper end when both are next to equal
            high_s = cost_s * (1 - STEP)
            middle_s = float(np.sqrt(max(low_s, high_s * 1e-18) * high_s))
            bottleneck_s = high_s if high_s <= low_s * (1 + 1e-9) else min(middle_s, high_s)
            found, table = self._probe(bottleneck_s)
            if found is not None:
                cost_s, stages = self.level.measured(found).cost_s, found
                continue
            low_s = bottleneck_s
            if table.least[0] > self.level.units:
                refuted_s = bottleneck_s
        return Optimum(cost_s=cost_s, stages=stages, refuted_s=min(refuted_s / (1 - STEP), cost_s))

    def _probe(self, bottleneck_s: float) -> tuple[Stages | None, Table]:
        """Stages within the bottleneck that fit, if the search finds some; and the fewest devices."""
        level = self.level
        states = level.states(level.space.within(0, level.space.last), bottleneck_s)
        needs = level.needs(bottleneck_s, 0, level.space.last)
        least = np.full(len(states), np.inf)
        least[-1] = 0.0
        after = np.full(len(states), len(states) - 1)
        for here in reversed(range(len(states) - 1)):
            need, _ = self.needs_of_row(needs, states, here, least)
            total = need + least[here + 1 :]
            nearest = int(total.argmin())
            least[here], after[here] = total[nearest], here + 1 + nearest
        table = Table(states=states, least=least, after=after)
        if least[0] > level.units:
            return None, table

        # on all units: the first stage takes the spare units, if it may have two or more
        need, two = self.needs_of_row(needs, states, 0, least)
        left = 0
        if not level.fewer and least[0] < level.units:
            need = two
            if (need + least[1:]).min() > level.units:
                return None, table
            left = level.units - int((need + least[1:]).min())
        total = need + least[1:]
        step = int(total.argmin())
        first = (int(states[0]), int(states[1 + step]), int(need[step]) + left)
        return (first, *path(table, 1 + step)), table

    def needs_of_row(
        self, needs: UnitsNeeded, states: IntArray, here: int, least: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """The least devices of a stage that fits, and of two and more, with the fewest devices downstream."""
        row, columns = states[here : here + 1], states[here + 1 :]
        need, two = (table[0] for table in needs.block(row, columns))
        most = self.memory.most_in_flight(row, columns)[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            fitting = _devices_of_first(most, least[here + 1 :])
        two = np.maximum(two, fitting)
        return np.where((need == 1) & (fitting <= 1), 1.0, two), two


def smallest(memory: Memory, space: PartitionSpace, devices: int) -> Stages:
    """The stages whose fullest device holds the fewest bytes, without messages.

    Each limit is tested by the fewest devices from every state to the end. The next limit is below the bytes of the
    stages found, until no stages are within it.
    """
    needed = DevicesNeeded(memory, space, devices)
    stages: Stages = ((0, space.last, devices),)
    most, low = _largest(memory, stages), 0.0
    while most - 1 > low:
        limit = most - 1 if most - low < 2 else (most + low) // 2
        if not low < limit < most:
            break  # from 2**53 bytes on a double does not represent every byte
        found = needed.stages(limit)
        largest = most if found is None else _largest(memory, found)
        if found is None or largest >= most:
            low = limit
        else:
            most, stages = largest, found
    return stages


def _largest(memory: Memory, stages: Stages) -> float:
    held = minibatches_in_flight([units for _, _, units in stages])
    return max(
        float(memory.held_bytes(np.array([start]), np.array([stop]), count)[0, 0])
        for (start, stop, _), count in zip(stages, held, strict=True)
    )


def fewest(most_in_flight: FloatArray, space: PartitionSpace) -> FloatArray:
    """The fewest devices from each state to the end; infinite if no number suffices.

    `most_in_flight`: each stage's capacity in minibatches; not a number if they take no bytes and all fit.
    """
    least = np.full(len(space), np.inf)
    least[-1] = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        for here in reversed(range(space.last)):
            after = slice(here + 1, None) if space.before is None else space.successors(here)
            later = least[after]
            least[here] = (_devices_of_first(most_in_flight[here, after], later) + later).min()
    return least


def _devices_of_first(most: FloatArray, later: FloatArray) -> FloatArray:
    """The devices of stages with a capacity of `most` minibatches, where later stages have `later` devices."""
    need = np.where(later == 0, 1.0, np.maximum(np.ceil(later / np.maximum(most - 1, 0)), 1.0))
    need[np.isnan(most)] = 1.0
    need[np.isnan(need) | (most < 1)] = np.inf
    return np.asarray(need)


class DevicesNeeded:
    """The fewest devices on which no stage holds more than a limit, for one limit after the other."""

    def __init__(self, memory: Memory, space: PartitionSpace, devices: int) -> None:
        self._space, self._devices = space, devices
        every = np.arange(len(space))
        self._fixed, self._each = memory.fixed_and_each(every, every)

    def stages(self, limit: float) -> Stages | None:
        """Stages that hold at most the limit, on all devices; None if they need more than there are."""
        with np.errstate(divide="ignore", invalid="ignore"):
            most_in_flight = np.floor((limit - self._fixed) / self._each)
            least = fewest(most_in_flight, self._space)
            if least[0] > self._devices:
                return None
            stages, here, left = [], 0, self._devices - int(least[0])
            while here < self._space.last:
                after = self._space.successors(here)
                need = _devices_of_first(most_in_flight[here, after], least[after])
                step = int(np.argmin(need + least[after]))
                stages.append((here, int(after[step]), int(need[step]) + (left if here == 0 else 0)))
                here = int(after[step])
        return tuple(stages)
