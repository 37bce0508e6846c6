"""Near: the stages and replicas that are one move away from those of a PipeDream plan, for a search by play.

A move transfers a block or a device, or changes the number of stages:

    cut       a stage gives its first or last block to its neighbour
    block     a stage gives a block to a distant stage: all stages between the two pass one on
    replica   a stage gives a device to another one
    merge     two neighbours become one stage on the devices of both
    split     a stage on several devices becomes two

After a move, stages take their devices in a row, as on one level, or keep the devices that they have. With one device a
stage, only cuts and blocks move; where devices may stay idle, stages also merge onto one device, or split onto an idle
one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import lcm
from operator import mul

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.transfer import boundary_crossings, ranks_by_stage
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.plan import Plan
from pipeplan.planners.bound import within_s
from pipeplan.planners.complete import complete
from pipeplan.planners.messages import excess_bytes
from pipeplan.planners.pipedream.budget import BUDGET
from pipeplan.planners.pipedream.parts import LevelShare, Partition, PartitionSearch, Proof
from pipeplan.planners.pipedream.planner import CutModel, decided
from pipeplan.planners.pipedream.states import along
from pipeplan.planners.pipedream.terms import FACTORS, gradient_copies, search, synchronisation
from pipeplan.planners.problem import PlanningProblem

Devices = tuple[tuple[int, ...], ...]
"""By stage, the devices of its replicas."""


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The stages' stops, as places of an order of the blocks, and their devices."""

    stops: tuple[int, ...]
    devices: Devices

    @property
    def replicas(self) -> tuple[int, ...]:
        """Their number, by stage."""
        return tuple(map(len, self.devices))


@dataclass(frozen=True, kw_only=True, eq=False)
class Near:
    """The plans near a plan of a problem. The model is cut along the plan's order of the blocks."""

    model: CutModel
    wanted: PartitionSearch

    @classmethod
    def of(cls, problem: PlanningProblem, plan: Plan) -> "Near":
        """Those near this plan, whose minibatches are of its size."""
        order = tuple(range(len(problem.profile.blocks))) if plan.order is None else plan.order
        options = problem.options
        cuts = along(
            problem.profile, plan.microbatch_size, order, cuts=options.cuts, gradients=gradient_copies(problem)
        )
        model = CutModel(problem=problem, microbatch_size=plan.microbatch_size, cuts=cuts)
        return cls(model=model, wanted=search(problem, cuts.states))

    def layout(self, plan: Plan) -> StageLayout | None:
        """The plan's own; None if its stages do not end where the model is cut."""
        places = {int(before): state for state, before in enumerate(self.model.cuts.blocks_before)}
        if any(stage.stop not in places for stage in plan.stages):
            return None
        return StageLayout(tuple(places[stage.stop] for stage in plan.stages), ranks_by_stage(plan.placement))

    def plans(self, plan: Plan) -> Iterator[Plan]:
        """Those that fit, the likely fastest first."""
        own = self.layout(plan)
        if own is None:
            return
        every = dict.fromkeys(self.moved(own))
        every.pop(own, None)
        for _, _, layout in sorted((self.likely_s(each), index, each) for index, each in enumerate(every)):
            made = self.plan(layout)
            if max(excess_bytes(self.model.problem, made.stages)) <= 0:
                yield made

    def likely_s(self, layout: StageLayout) -> float:
        """An estimate of a minibatch's time: the slowest of the stages and of their turns (`planners.bound`, 11)."""
        hops_s = [
            2 * (float(self.model.states.boundary_bytes[stop]) / link.bandwidth_bytes_per_s + link.latency_s)
            for stop, link in zip(layout.stops, _links(self.model.problem.cluster, layout.devices), strict=False)
        ]
        replicas = np.asarray(layout.replicas)
        compute_s = np.diff(self.model.states.compute_s[[0, *layout.stops]])
        in_flight = -(-np.cumsum(replicas[::-1])[::-1] // replicas)
        s, t = np.triu_indices(len(replicas))
        turns = (in_flight * replicas)[s] - ((in_flight - 1) * replicas)[t]
        reached_s = np.concatenate(([0.0], np.cumsum(hops_s)))
        round_trip_s = within_s(compute_s)[s, t] + reached_s[t] - reached_s[s]
        turning_s = (round_trip_s[turns > 0] / turns[turns > 0]).max(initial=0.0)
        return max(float(turning_s), *self._alone_s(layout))

    def _alone_s(self, layout: StageLayout) -> list[float]:
        """By stage, a minibatch's time."""
        places = np.asarray((0, *layout.stops))
        stages = zip(places[:-1], places[1:], layout.devices, strict=True)
        return [float(self._stage_s(start, stop, devices)) for start, stop, devices in stages]

    def _stage_s(self, start: IntArray | int, stop: IntArray | int, devices: Sequence[int]) -> FloatArray:
        """A minibatch's time: the longer of a stage's compute and its exchange, divided by its replicas."""
        states, count = self.model.states, len(devices)
        factor = FACTORS[synchronisation(self.model.problem)] * (count - 1) / count
        bandwidth = self.model.problem.cluster.link(devices).bandwidth_bytes_per_s
        exchange_s = factor * (states.weight_bytes[stop] - states.weight_bytes[start]) / bandwidth
        return np.asarray(np.maximum(states.compute_s[stop] - states.compute_s[start], exchange_s) / count)

    def plan(self, layout: StageLayout) -> Plan:
        """The plan, with its closed form: stages and boundaries on the slowest link that each crosses."""
        alone_s, cluster = self._alone_s(layout), self.model.problem.cluster
        sent_s = [
            2 * float(self.model.states.boundary_bytes[stop]) / link.bandwidth_bytes_per_s / _copies(cluster, *pair)
            for stop, link, pair in zip(
                layout.stops, _links(cluster, layout.devices), pairwise(layout.devices), strict=False
            )
        ]
        shares = zip(pairwise((0, *layout.stops)), layout.replicas, alone_s, strict=True)
        placed = {device: (stage, k) for stage, own in enumerate(layout.devices) for k, device in enumerate(own)}
        found = Partition(
            shares=tuple(LevelShare(start=a, stop=b, replicas=count, time_s=own_s) for (a, b), count, own_s in shares),
            cost_s=max(*alone_s, *sent_s, 0.0),
            placement=tuple(placed[device] for device in sorted(placed)),
            proof=Proof(method="none", bound_s=0.0),
            parts=(),
        )
        return complete(self.model.problem, decided(self.model, self.wanted, found))

    def moved(self, own: StageLayout) -> Iterator[StageLayout]:
        """All moves."""
        alone_s = self._alone_s(own)
        slowest = sorted(range(len(alone_s)), key=lambda stage: -alone_s[stage])[: BUDGET.slowest_stages]
        yield from cut_moves(own, slowest)
        straight, fewer = self.wanted.straight, self.wanted.fewer
        if not straight:
            yield from replica_moves(own, slowest)
        if straight <= fewer:
            yield from merge_moves(own, straight=straight)
            yield from self.split_moves(own)

    def split_moves(self, own: StageLayout) -> Iterator[StageLayout]:
        """Each stage as two, cut where the slower of the two is fastest; or two on one device each, if one is idle."""
        idle = self.wanted.straight and sum(own.replicas) < self.model.problem.cluster.devices
        for stage, ((start, stop), held) in enumerate(zip(pairwise((0, *own.stops)), own.devices, strict=True)):
            cuts = np.arange(start + 1, stop)
            for first in (1,) if idle else range(1, len(held)):
                kept = (held, held) if idle else (held[:first], held[first:])
                slower_s = np.maximum(self._stage_s(start, cuts, kept[0]), self._stage_s(cuts, stop, kept[1]))
                for cut in cuts[np.argsort(slower_s, kind="stable")[: BUDGET.split_cuts]].tolist():
                    after = (*own.stops[:stage], cut, *own.stops[stage:])
                    counts = (*own.replicas[:stage], *map(len, kept), *own.replicas[stage + 1 :])
                    yield StageLayout(after, in_a_row(counts))
                    if not idle:
                        yield StageLayout(after, (*own.devices[:stage], *kept, *own.devices[stage + 1 :]))


def cut_moves(own: StageLayout, slowest: Sequence[int]) -> Iterator[StageLayout]:
    """A block from a stage to its neighbour, or from a slow stage to any other: all cuts between the two move."""
    depth = len(own.stops)
    pairs = [(stage, other) for stage in range(depth) for other in (stage - 1, stage + 1)]
    pairs += [(stage, other) for stage in slowest for other in range(depth) if abs(stage - other) > 1]
    for giver, taker in pairs:
        if 0 <= taker < depth:
            low, high, by = (giver, taker, -1) if giver < taker else (taker, giver, 1)
            stops = (*own.stops[:low], *(stop + by for stop in own.stops[low:high]), *own.stops[high:])
            if all(before < after for before, after in pairwise((0, *stops))):
                yield replace(own, stops=stops)


def replica_moves(own: StageLayout, slowest: Sequence[int]) -> Iterator[StageLayout]:
    """A device from a stage to another one that is slow, or to its neighbour."""
    depth = len(own.stops)
    for giver in range(depth):
        takers = dict.fromkeys((giver - 1, giver + 1, *slowest))
        for taker in (each for each in takers if 0 <= each < depth and each != giver and own.replicas[giver] > 1):
            counts = list(own.replicas)
            counts[giver] -= 1
            counts[taker] += 1
            yield StageLayout(own.stops, in_a_row(counts))
            devices = list(own.devices)
            # the device nearest to those of the other stage
            handed = min(own.devices[giver], key=lambda each: min(abs(each - other) for other in own.devices[taker]))
            devices[giver] = tuple(each for each in own.devices[giver] if each != handed)
            devices[taker] = (*own.devices[taker], handed)
            yield StageLayout(own.stops, tuple(devices))


def merge_moves(own: StageLayout, *, straight: bool) -> Iterator[StageLayout]:
    """Two neighbours as one stage: on the devices of both or, with `straight`, on one."""
    for stage in range(len(own.stops) - 1):
        stops = own.stops[:stage] + own.stops[stage + 1 :]
        both = () if straight else own.devices[stage] + own.devices[stage + 1]
        count = 1 if straight else len(both)
        yield StageLayout(stops, in_a_row((*own.replicas[:stage], count, *own.replicas[stage + 2 :])))
        if not straight:
            yield StageLayout(stops, (*own.devices[:stage], both, *own.devices[stage + 2 :]))


def in_a_row(counts: Sequence[int]) -> Devices:
    """`counts[s]` consecutive devices for each stage s."""
    ends = accumulate(counts)
    return tuple(tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True))


def _links(cluster: Cluster, devices: Devices) -> Iterator[Level]:
    """By boundary, the slowest link that it crosses."""
    return (link for link, _ in boundary_crossings(cluster, pairwise(devices)))


def _copies(cluster: Cluster, own: Sequence[int], following: Sequence[int]) -> int:
    """The number of network units in which the replicas of two stages send to each other and to no others."""
    rounds = range(lcm(len(own), len(following)))
    pairs = [(own[k % len(own)], following[k % len(following)]) for k in rounds]
    for unit in accumulate((level.size for level in cluster.levels), mul):
        if all(sender // unit == receiver // unit for sender, receiver in pairs):
            return len({sender // unit for sender, _ in pairs})
    return 1
