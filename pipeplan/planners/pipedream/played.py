"""Played: the partitions that PipeDream's planner plays, with an upper bound on the rates of all partitions.

PipeDream's recurrence gives every pair of devices a link of its own. On a real network, the devices of a server share
its port, and another stage may then be the slowest. So the recurrence is solved for more than one network, and the
plays decide:

1. the cluster's, which gives the closed form's optimum;
2. the same with each level's bandwidth divided among the devices of a unit;
3. in addition, data parallelism and the straight pipeline;
4. for `auto`, all of these on some of the devices, unless the pipeline must be straight;
5. for a graph, the first two again, with only those cuts that one tensor crosses.

The best partition on an infinitely fast network has the least bottleneck in compute, which bounds all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod

from pipeplan.documents.plan import Alternative, Plan
from pipeplan.errors import InvalidInputError
from pipeplan.planners.complete import complete
from pipeplan.planners.pipedream.budget import BUDGET
from pipeplan.planners.pipedream.near import Near
from pipeplan.planners.pipedream.partition import least_s, partition
from pipeplan.planners.pipedream.parts import Partition, PartitionSearch, data_parallel, fits, priced
from pipeplan.planners.pipedream.planner import NAME, CutModel, cut_model, decided
from pipeplan.planners.pipedream.space import LevelLinks
from pipeplan.planners.pipedream.terms import network, search, synchronised
from pipeplan.planners.problem import CutGraph, PlanningProblem
from pipeplan.planners.spaces import EverySplit, Splits

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPartition:
    """One of the partitions, computed when it is needed."""

    model: CutModel
    wanted: PartitionSearch
    most: float
    find: Callable[[], Partition | None]

    @property
    def schedule(self) -> str:
        """The name of its schedule."""
        return NAME

    def split(self) -> tuple[int, ...]:
        """Empty: the stages of a level lie inside those of the level around it, and none of their cuts is moved."""
        return ()

    def most_of(self, stops: tuple[int, ...]) -> float:
        """Upper bound on the rate of all partitions: evenly spread compute."""
        return self.most

    def most_of_any(self) -> float:
        """The same."""
        return self.most

    def splits_above(self, rate: float, split: tuple[int, ...]) -> Splits:
        """No others: no cut is moved."""
        return EverySplit((1,), lambda stops: 0.0, rate)

    def plan(self, stops: tuple[int, ...]) -> Plan | None:
        """Its plan, not played; None where nothing fits."""
        found = self.find()
        if found is None or not fits(self.wanted, found):
            return None
        return complete(self.model.problem, decided(self.model, self.wanted, priced(self.wanted, found.parts)))

    def alternative(self, reason: str) -> Alternative:
        """Its entry among a plan's alternatives, without a price; it has no stages yet."""
        return Alternative(
            schedule=NAME,
            depth=0,
            width=None,
            microbatch_size=self.model.microbatch_size,
            microbatches=1,
            recompute=False,
            throughput_samples_per_s=None,
            memory_bytes=None,
            reason=reason,
        )


@dataclass(frozen=True, kw_only=True)
class PlayedPartitions:
    """The partitions of a problem that the planner has answered; as the `whole` space, with a bound on all others."""

    problem: PlanningProblem
    planner: str = NAME
    whole: bool = True
    graph: CutGraph | None = None

    @cached_property
    def _model(self) -> CutModel:
        return cut_model(self.problem)

    @cached_property
    def beyond(self) -> float:
        """Upper bound on all partitions' samples a second; 0 if these are not the `whole` space.

        By compute alone, on one level; for a graph with more cuts than were listed, spread evenly.
        """
        if not self.whole:
            return 0.0
        model, wanted = self._model, search(self.problem, self._model.states)
        if not model.cuts.complete:
            return _most(model, float(wanted.space.compute_s[-1]) / wanted.devices)
        free = (LevelLinks(units=wanted.devices, bandwidth_bytes_per_s=inf),)
        return _most(model, least_s(replace(wanted, space=replace(wanted.space, levels=free))))

    @property
    def considered(self) -> int:
        """The partitions of this space."""
        return len(self._partitions)

    def configurations(self) -> Iterator[PlayedPartition]:
        """The closed form's own answer is not among them: its planner has given it."""
        return iter(self._partitions)

    def moved(self, plan: Plan) -> Iterator[Plan]:
        """The plans that are one move away from a plan of this space, the likely fastest first; none for others."""
        if (
            plan.schedule == (self.problem.options.schedule or NAME)
            and plan.microbatch_size == self._model.microbatch_size
        ):
            if plan.order not in self._near:
                self._near[plan.order] = Near.of(self.problem, plan)
            yield from self._near[plan.order].plans(plan)

    @cached_property
    def _near(self) -> dict[tuple[int, ...] | None, Near]:
        """The moves, by the order of a graph's blocks in which a plan has them."""
        return {}

    @cached_property
    def _partitions(self) -> list[PlayedPartition]:
        model, options = self._model, self.problem.options
        found = list(_found(model, network(self.problem)))
        if not self.whole and not options.straight:
            for levels in _of_few_devices(self.problem):
                found += _found(model, levels, own=True)
        if self.problem.profile.edges is not None and options.cuts != "single-tensor":
            single = _of_single_tensors(self.problem)
            found += () if single is None else _found(single, network(self.problem), own=True, beside=False)
        return sorted(found, key=lambda each: -each.most)


def _found(
    model: CutModel, levels: Sequence[LevelLinks], *, own: bool = False, beside: bool = True
) -> Iterator[PlayedPartition]:
    """The partitions of a model on levels of divided bandwidth (2); `own` adds 1 on these levels, `beside` adds 3."""
    problem, wanted = model.problem, search(model.problem, model.states, levels=levels)
    even_s = float(wanted.space.compute_s[-1]) / wanted.devices
    finders: list[Callable[[], Partition | None]] = [lambda: partition(wanted)] if own else []
    divided, devices = [], 1  # each device's bandwidth if all devices of its unit send at once
    for level in levels:
        divided.append(replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / devices))
        devices *= level.units
    if divided != [*levels]:
        finders.append(lambda: partition(search(problem, model.states, levels=divided)))
    if beside and not synchronised(problem) and not wanted.straight:
        finders.append(lambda: data_parallel(wanted))
        if wanted.devices < len(model.states):
            finders.append(lambda: partition(search(problem, model.states, straight=True, levels=levels)))
    for find in finders:
        yield PlayedPartition(model=model, wanted=wanted, most=_most(model, even_s), find=find)


def _most(model: CutModel, slowest_s: float) -> float:
    """Upper bound on samples a second if the slowest stage's profiled compute is at least `slowest_s`. A backward right
    after its forward may be shorter.
    """
    slowest_s *= min(model.problem.profile.overheads.backward_after_forward, 1.0)
    return model.microbatch_size / slowest_s * (1 + _ROUNDING) if slowest_s > 0 else inf


def _of_single_tensors(problem: PlanningProblem) -> CutModel | None:
    """A graph with only the cuts that one tensor crosses; None if they are too few for a straight pipeline."""
    try:
        return cut_model(replace(problem, options=replace(problem.options, cuts="single-tensor")))
    except InvalidInputError:  # anything else would have been refused before
        return None


def _of_few_devices(problem: PlanningProblem) -> Iterator[list[LevelLinks]]:
    """Small numbers of devices of the first unit, or of whole units; the others stay idle."""
    first, *around = network(problem)
    fewer = [[replace(first, units=units)] for units in range(1, first.units + (1 if around else 0))]
    if around:
        fewer += [[first, replace(around[0], units=units)] for units in range(2, around[0].units + len(around) - 1)]
    yield from (levels for levels in fewer if prod(level.units for level in levels) <= BUDGET.few_devices)
