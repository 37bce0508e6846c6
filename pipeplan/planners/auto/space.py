"""Space: everything that auto may play, as shapes on placements, with what each may reach at best.

A configuration is a schedule, a shape (`two_bw.terms.PipelineShape`) and a placement, on any number of the devices. Its
stages are those of the closed form's best split, whose memory fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.costs.collectives import AllReduce, all_reduce_among
from pipeplan.costs.transfer import Bandwidths
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import Alternative, Plan
from pipeplan.planners.auto.ranking import has_split_backward
from pipeplan.planners.complete import complete
from pipeplan.planners.on_chain import Chained
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.two_bw.candidate import Candidate, Evaluator, candidate, decision
from pipeplan.planners.two_bw.chain import profiled
from pipeplan.planners.two_bw.placements import Links, mixtures, orientations, ranks_of
from pipeplan.planners.two_bw.terms import PipelineShape
from pipeplan.schedules.registry import schedule_named

SEARCHED = ("data-parallel", "naive", "pipedream-2bw", "1f1b", "gpipe")
"""The schedules that the closed forms split into stages; what splits the backward is tried on their plans."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedShape:
    """A shape on a placement, with the rates of its plays: none is above `most`, and with equal stages it is `likely`.

    Both are samples a second.
    """

    space: "PlayedSpace"
    shape: PipelineShape
    wiring: "Wiring"
    most: float
    likely: float

    def split(self) -> tuple[int, ...] | None:
        """Where the stages of the closed form's best split end; None where none fits."""
        found = self.space.fastest(self)
        return None if found is None else self.space.evaluator.stops(found)

    def plan(self, stops: tuple[int, ...]) -> Plan | None:
        """Its plan with these stages, not played, of the model as it was given; None where they do not fit."""
        return self.space.plan(self, stops)

    def alternative(self, reason: str) -> Alternative:
        """What a plan says of it, without a price."""
        shape = self.shape
        return Alternative(
            schedule=shape.schedule,
            depth=shape.depth,
            width=shape.width,
            microbatch_size=shape.microbatch_size,
            microbatches=shape.microbatches,
            recompute=bool(shape.recompute),
            throughput_samples_per_s=None,
            memory_bytes=None,
            reason=reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """A placement, and what crosses the network on it.

    `edge_s_per_byte` and `edge_latency_s` are sums over the boundaries, there and back. `exchange` is that of stage 0's
    replicas. `ring_stages`: how many stages' exchanges pass a port, on average over all units. `ring_s_per_byte`: what
    they take there at least, by bytes of the model, on the outermost level. `crossing`: how many transfers of a
    microbatch pass the busiest port one way, and `port_s_per_byte` what each takes there.
    """

    links: Links
    edge_s_per_byte: float
    edge_latency_s: float
    exchange: AllReduce
    ring_stages: float
    ring_s_per_byte: float
    crossing: int
    port_s_per_byte: float


@dataclass(frozen=True, kw_only=True)
class PlayedSpace:
    """The configurations of a problem with these schedules; with `straight` those of one pipeline of this depth."""

    chained: Chained
    schedules: tuple[str, ...] = SEARCHED
    straight: int | None = None
    planner: str = "pipedream-2bw"
    beyond: float = 0.0
    _wirings: dict[tuple[int, int], tuple[Wiring, ...]] = field(default_factory=dict)
    _leasts: dict[object, "_Least"] = field(default_factory=dict)

    @property
    def problem(self) -> PlanningProblem:
        """Of a chain."""
        return self.chained.problem

    @cached_property
    def evaluator(self) -> Evaluator:
        """Splits shapes. Raises InvalidInputError where no microbatch size divides the batch."""
        return Evaluator(problem=self.problem, measured=profiled(self.problem))

    def configurations(self) -> list[PlacedShape]:
        """All of them, the likely fastest first."""
        found = [
            self._configuration(shape, wiring)
            for shape in self._shapes()
            for wiring in self._wired(shape.width, shape.depth)
        ]
        return sorted(found, key=lambda each: (-each.likely, each.shape.devices, each.shape.depth))

    def fastest(self, configuration: PlacedShape) -> Candidate | None:
        """The closed form's best split; None where no split fits."""
        return self.evaluator.fastest(configuration.shape, on=(configuration.wiring.links,))

    def plan(self, configuration: PlacedShape, stops: tuple[int, ...]) -> Plan | None:
        """The configuration's plan with these stages, not played, of the model as it was given; None if too large."""
        shape, terms = configuration.shape, self.evaluator.terms(configuration.shape, configuration.wiring.links)
        stages_s = [float(terms.time_s(*place)[0, 0]) for place in terms.slices(stops)]
        if max(stages_s) == inf:
            return None
        found = candidate(shape, terms, None, max(stages_s) if shape.laws.pipelined else sum(stages_s))
        made = decision("pipedream-2bw", "pipedream-2bw-a.1", found, stops, considered=1, alternatives=())
        return self.chained.back(complete(self.problem, made))

    def _shapes(self) -> Iterator[PipelineShape]:
        options, batch_size = self.problem.options, self.problem.batch_size
        devices, blocks = self.problem.cluster.devices, self.evaluator.measured.blocks
        for name in self.schedules:
            laws = schedule_named(name)
            recompute = options.recompute
            if recompute is None and not laws.pipelined:
                recompute = False
            asked = options.schedule is not None
            shallowest = 1 if laws.single_stage or not laws.flushes or asked else 2
            deepest = 1 if laws.single_stage else min(devices, blocks)
            for depth in range(shallowest, deepest + 1):
                if options.stages not in (None, depth) or self.straight not in (None, depth):
                    continue
                for width in range(1, 1 + (1 if self.straight else devices // depth)):
                    for size in self.evaluator.measured.sizes:
                        microbatches, rest = divmod(batch_size, width * size)
                        if rest or (laws.microbatch_a_stage and microbatches < depth):
                            continue
                        yield PipelineShape(
                            schedule=name,
                            width=width,
                            depth=depth,
                            microbatch_size=size,
                            microbatches=microbatches,
                            recompute=recompute,
                        )

    def _wired(self, width: int, depth: int) -> tuple[Wiring, ...]:
        key = width, depth
        if key not in self._wirings:
            cluster = self.problem.cluster
            every = (*orientations(cluster, width, depth), *mixtures(cluster, width, depth))
            self._wirings[key] = tuple(_wiring(cluster, links, width, depth) for links in every)
        return self._wirings[key]

    def _configuration(self, shape: PipelineShape, wiring: Wiring) -> PlacedShape:
        """Bounds by the whole model, and what equal stages would take."""
        chain, laws = self.evaluator.chain(shape.microbatch_size), shape.laws
        m, depth = shape.microbatches, shape.depth
        total_s = chain.least_s[-1] if shape.recompute is None else chain.listed_s(recompute=shape.recompute)[-1]
        key = shape.schedule, shape.microbatch_size, shape.recompute
        if key not in self._leasts:
            self._leasts[key] = self._least(shape)
        least = self._leasts[key]
        boundaries: FloatArray = chain.output_bytes[1:-1]
        least_bytes, mean_bytes = (float(boundaries.min()), float(boundaries.mean())) if len(boundaries) else (0.0, 0.0)
        weights = float(chain.weight_bytes[-1])
        held = laws.in_flight(depth=depth, stage=0, microbatches=m)

        moved_s = wiring.edge_latency_s + least_bytes * wiring.edge_s_per_byte
        least_s = m * max(least.compute_s / depth, least.block_s, (least.way_s + moved_s) / held)
        ring = wiring.exchange.slowest
        if shape.width > 1 and ring is not None:
            least_s = max(least_s, weights * self.problem.profile.overheads.exchange_factor * wiring.ring_s_per_byte)
        if laws.pipelined and laws.flushes:
            # Stages that each take 1 - 1/m of the one before end together: no others are as fast (`bound`, 3).
            least_s = max(least_s, least.way_s / (1.0 - (1.0 - 1.0 / m) ** depth))

        block_s = float(np.diff(chain.least_s).max())
        step_s = max(total_s / depth, block_s)
        there_and_back_s = total_s + wiring.edge_latency_s + mean_bytes * wiring.edge_s_per_byte
        batch_s = m * max(step_s, there_and_back_s / held, wiring.crossing * mean_bytes * wiring.port_s_per_byte)
        exchange_s = 0.0
        if shape.width > 1 and ring is not None:
            ring_s = weights / depth * ring.ring_s_per_byte
            exchange_s = wiring.exchange.seconds(weights / depth) + max(wiring.ring_stages - 1, 0.0) * ring_s
        if not laws.flushes:
            batch_s = max(batch_s, exchange_s)
        else:
            drain_s = there_and_back_s * (depth - 1) / depth if laws.pipelined else 0.0
            batch_s += drain_s + max(exchange_s - (drain_s + step_s) / 2, 0.0)
        samples = shape.batch_size
        return PlacedShape(
            space=self,
            shape=shape,
            wiring=wiring,
            most=samples / (least_s * (1 - _ROUNDING)) if least_s > 0 else inf,
            likely=samples / batch_s if batch_s > 0 else inf,
        )

    def _least(self, shape: PipelineShape) -> "_Least":
        """What any stages of the shape compute at least, whichever recompute, with a whole or a split backward."""
        problem, laws, overheads = self.problem, shape.laws, self.problem.profile.overheads
        factor, blocks = problem.options.recompute_factor, problem.profile.at(shape.microbatch_size)
        forward_s = np.asarray([block.forward_s for block in blocks])
        whole_s = np.asarray([block.backward_s for block in blocks])
        backwards_s = [(whole_s, np.zeros_like(whole_s))]
        if laws.takes_two_bp and problem.options.split_backward is not False and has_split_backward(problem):
            first = [b.backward_s if b.backward_input_s is None else b.backward_input_s for b in blocks]
            backwards_s.append((np.asarray(first), np.asarray([b.backward_weight_s or 0.0 for b in blocks])))
        ways_s, computes_s = [], []
        for recompute in (True, False) if shape.recompute is None else (shape.recompute,):
            share = overheads.forward_without_graph if recompute and factor is None else 1.0
            after = min(overheads.backward_after_forward, 1.0) if recompute or laws.alternates else 1.0
            again_s = np.zeros_like(whole_s)
            if recompute:
                added = max((factor or 1.0) - 1.0, 0.0) * (forward_s + whole_s)
                again_s = overheads.recompute * forward_s if factor is None else added
            for first_s, rest_s in backwards_s:
                # A stage may recompute while it waits: that is on no microbatch's way there and back.
                ways_s.append(share * forward_s + after * first_s)
                computes_s.append(ways_s[-1] + rest_s + again_s)
        compute_s = np.minimum.reduce(computes_s)
        return _Least(
            compute_s=float(compute_s.sum()),
            block_s=float(compute_s.max()),
            way_s=float(np.minimum.reduce(ways_s).sum()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Least:
    """Seconds of a microbatch that no stages go below: of the whole model, of its longest block, and of the whole model
    on the microbatch's way there and back.
    """

    compute_s: float
    block_s: float
    way_s: float


def _wiring(cluster: Cluster, links: Links, width: int, depth: int) -> Wiring:
    ranks = ranks_of(links.place((width,) * depth), width, depth)
    exchange = all_reduce_among(cluster, ranks[0].tolist())
    bandwidths = Bandwidths(cluster)
    low, high = np.minimum(ranks[:-1], ranks[1:]), np.maximum(ranks[:-1], ranks[1:])
    latencies = np.maximum.accumulate([level.latency_s for level in cluster.levels])
    edge_latency_s = float(latencies[bandwidths.levels(low, high).max(axis=1)].sum()) if depth > 1 else 0.0

    ring_stages = ring_s_per_byte = 0.0
    if exchange.slowest is not None:
        port = exchange.slowest.port
        units = [len(np.unique(stage)) for stage in ranks // port.devices]
        every = len(np.unique(ranks // port.devices))
        ring_stages = sum(count for count in units if count > 1) / every
        outermost = prod(level.size for level in cluster.levels[:-1])
        if port.devices == outermost:
            # A ring of n units loads each port with 2 (n - 1) / n of its bytes: all ports together, 2 (n - 1).
            ring_s_per_byte = 2 * (min(units) - 1) / every / cluster.levels[-1].bandwidth_bytes_per_s
    slowest = min(range(len(cluster.levels)), key=lambda level: cluster.levels[level].bandwidth_bytes_per_s)
    unit = prod(level.size for level in cluster.levels[:slowest])
    sends = ranks[:-1] // unit
    leaving = np.bincount(sends[sends != ranks[1:] // unit], minlength=1)
    return Wiring(
        links=links,
        edge_s_per_byte=float((2.0 / links.edges).sum()),
        edge_latency_s=2.0 * edge_latency_s,
        exchange=exchange,
        ring_stages=ring_stages,
        ring_s_per_byte=ring_s_per_byte,
        crossing=int(leaving.max()),
        port_s_per_byte=1.0 / cluster.levels[slowest].bandwidth_bytes_per_s,
    )
