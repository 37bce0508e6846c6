"""Played: the partitions that PipeDream's planner plays, with a rate that no partition exceeds.

PipeDream's recurrence gives every pair of devices a link of its own. On a real network the devices of a server share
its port, and what takes longest then is another stage. So the recurrence is asked for more than one network, and the
plays decide:

1. the cluster's, which gives the closed form's optimum;
2. the same with each level's bandwidth divided among the devices of a unit;
3. beside these data parallelism, and the straight pipeline;
4. and for a graph the first two where it is cut only where one tensor crosses.

Whatever the network, the slowest stage computes no less than in the best partition on a network that takes no time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf, prod

from pipeplan.documents.plan import Alternative, Plan
from pipeplan.planners.complete import complete
from pipeplan.planners.pipedream.partition import Partition, PartitionSearch, data_parallel, fits, partition, priced
from pipeplan.planners.pipedream.planner import NAME, CutModel, cut_model, decided
from pipeplan.planners.pipedream.space import LevelLinks
from pipeplan.planners.pipedream.terms import network, search, synchronised
from pipeplan.planners.problem import CutGraph, PlanningProblem

FEW = 8
"""The most devices that count as a small number."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPartition:
    """One of the partitions, computed when it is needed."""

    model: CutModel
    wanted: PartitionSearch
    most: float
    find: Callable[[], Partition | None]

    def split(self) -> tuple[int, ...]:
        """Empty: the stages of a level lie inside those of the level around it, and none of their cuts is moved."""
        return ()

    def most_of(self, stops: tuple[int, ...]) -> float:
        """By compute, spread evenly."""
        return self.most

    def plan(self, stops: tuple[int, ...]) -> Plan | None:
        """Its plan, not played; None where nothing fits."""
        found = self.find()
        if found is None or not fits(self.wanted, found):
            return None
        return complete(self.model.problem, decided(self.model, self.wanted, priced(self.wanted, found.parts)))

    def alternative(self, reason: str) -> Alternative:
        """What a plan says of it, without a price; it has no stages yet."""
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
    """Those of a problem that the planner has answered; where they are the `whole` space, with what is beyond them."""

    problem: PlanningProblem
    planner: str = NAME
    whole: bool = True
    graph: CutGraph | None = None

    @cached_property
    def _model(self) -> CutModel:
        return cut_model(self.problem)

    @cached_property
    def beyond(self) -> float:
        """Samples a second that no partition exceeds; 0 where the others are not of the space.

        By compute alone, on one level; for a graph with more cuts than were listed, spread evenly.
        """
        if not self.whole:
            return 0.0
        model, wanted = self._model, search(self.problem, self._model.states)
        if model.cuts.complete:
            free = (LevelLinks(units=wanted.devices, bandwidth_bytes_per_s=inf),)
            found = partition(replace(wanted, space=replace(wanted.space, levels=free), memory=None))
            least_s = 0.0 if found is None else found.cost_s
        else:
            least_s = float(wanted.space.compute_s[-1]) / wanted.devices
        return model.microbatch_size / least_s * (1 + _ROUNDING) if least_s > 0 else inf

    @property
    def considered(self) -> int:
        """The partitions of this space."""
        return len(self._partitions)

    def configurations(self, needed: Callable[[], float] | None = None) -> Iterator[PlayedPartition]:
        """The closed form's own answer is not among them: its planner has given it."""
        return iter(self._partitions)

    @cached_property
    def _partitions(self) -> list[PlayedPartition]:
        found = list(_found(self._model))
        options = self.problem.options
        if not self.whole:
            found += _of_few_devices(self._model)
        if self.problem.profile.edges is not None and options.cuts != "single-tensor":
            single = replace(self.problem, options=replace(options, cuts="single-tensor"))
            found += _found(cut_model(single), own=True)
        return sorted(found, key=lambda each: -each.most)


def _found(model: CutModel, *, own: bool = False) -> Iterator[PlayedPartition]:
    """The partitions of a model, with `own` also that for the cluster's network."""
    problem, wanted = model.problem, search(model.problem, model.states)
    even_s = float(wanted.space.compute_s[-1]) / wanted.devices
    most = model.microbatch_size / even_s * (1 + _ROUNDING) if even_s > 0 else inf
    finders: list[Callable[[], Partition | None]] = [lambda: partition(wanted)] if own else []
    levels, devices = [], 1  # what each device has if all of its unit send at once
    for level in network(problem):
        levels.append(replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / devices))
        devices *= level.units
    if levels != network(problem):
        finders.append(lambda: partition(search(problem, model.states, levels=levels)))
    if not synchronised(problem) and not wanted.straight and not own:
        finders.append(lambda: data_parallel(wanted))
        if wanted.devices < len(model.states):
            finders.append(lambda: partition(search(problem, model.states, straight=True)))
    for find in finders:
        yield PlayedPartition(model=model, wanted=wanted, most=most, find=find)


def _of_few_devices(model: CutModel) -> Iterator[PlayedPartition]:
    """The best partition on each small number of devices of the first unit, or of whole units; and the straight one.

    The others stay idle.
    """
    first, *around = network(model.problem)
    fewer = [[replace(first, units=units)] for units in range(1, first.units + (1 if around else 0))]
    if around:
        fewer += [[first, replace(around[0], units=units)] for units in range(2, around[0].units + len(around) - 1)]
    for levels in fewer:
        devices = prod(level.units for level in levels)
        if devices > FEW:
            continue
        for straight in (False, True):
            wanted = search(model.problem, model.states, levels=levels, straight=straight)
            if straight and devices >= len(model.states):
                continue
            even_s = float(wanted.space.compute_s[-1]) / devices
            yield PlayedPartition(
                model=model,
                wanted=wanted,
                most=model.microbatch_size / even_s * (1 + _ROUNDING) if even_s > 0 else inf,
                find=partial(partition, wanted),
            )
