"""Space: everything that auto may play, as shapes on placements, with what each may reach at best.

A configuration is a schedule, a shape (`two_bw.terms.PipelineShape`) and a placement, on any number of the devices. Its
stages are those of the closed form's best split, whose memory fits. Schedules whose ranks hold several stages are in
`chunks`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.documents.plan import Plan
from pipeplan.planners.auto.chunks import CHUNKED, ChunkedSpace
from pipeplan.planners.auto.wiring import Wiring, wiring_of
from pipeplan.planners.complete import complete
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.two_bw.candidate import Evaluator, decision
from pipeplan.planners.two_bw.chain import profiled
from pipeplan.planners.two_bw.placements import mixtures, orientations
from pipeplan.planners.two_bw.terms import PipelineShape
from pipeplan.schedules.registry import schedule_named

SEARCHED = ("data-parallel", "naive", "pipedream-2bw", "1f1b", "gpipe", *CHUNKED)
"""The schedules that are split into stages; what splits the backward is tried on the plans of the others."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A shape on a placement, with the rates of its plays: none is above `most`, and with equal stages it is `likely`.

    Both are samples a second.
    """

    shape: PipelineShape
    wiring: Wiring
    most: float
    likely: float


@dataclass(frozen=True, kw_only=True)
class PlayedSpace:
    """The configurations of a problem. `problem` has a chain."""

    problem: PlanningProblem
    schedules: tuple[str, ...] = SEARCHED
    _wirings: dict[tuple[int, int], tuple[Wiring, ...]] = field(default_factory=dict)

    @cached_property
    def chunked(self) -> ChunkedSpace:
        """The schedules whose ranks hold several stages."""
        names = [name for name in self.schedules if schedule_named(name).chunked]
        return ChunkedSpace(problem=self.problem, evaluator=self.evaluator, schedules=names, wired=self._wired)

    @cached_property
    def evaluator(self) -> Evaluator:
        """Splits shapes. Raises InvalidInputError where no microbatch size divides the batch."""
        return Evaluator(problem=self.problem, measured=profiled(self.problem))

    def configurations(self) -> list[Configuration]:
        """All whose ranks have one stage, the likely fastest first."""
        found = [
            self._configuration(shape, wiring)
            for shape in self._shapes()
            for wiring in self._wired(shape.width, shape.depth)
        ]
        return sorted(found, key=lambda each: (-each.likely, each.shape.devices, each.shape.depth))

    def plan(self, configuration: Configuration) -> Plan | None:
        """The configuration's plan, not played; None where no split fits."""
        shape, evaluator = configuration.shape, self.evaluator
        found = evaluator.fastest(shape, on=(configuration.wiring.links,))
        if found is None:
            return None
        made = decision(
            "pipedream-2bw", "pipedream-2bw-a.1", found, evaluator.stops(found), considered=1, alternatives=()
        )
        return complete(self.problem, made)

    def _shapes(self) -> Iterator[PipelineShape]:
        options, batch_size = self.problem.options, self.problem.batch_size
        devices, blocks = self.problem.cluster.devices, self.evaluator.measured.blocks
        for name in self.schedules:
            laws = schedule_named(name)
            if laws.chunked or options.chunks is not None:
                continue
            recompute = options.recompute
            if recompute is None and not laws.pipelined:
                recompute = False
            shallowest = 1 if laws.single_stage or not laws.flushes else 2
            deepest = 1 if laws.single_stage else min(devices, blocks)
            for depth in range(shallowest, deepest + 1):
                if options.stages not in (None, depth):
                    continue
                for width in range(1, devices // depth + 1):
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
            self._wirings[key] = tuple(wiring_of(cluster, links, width, depth) for links in every)
        return self._wirings[key]

    def _configuration(self, shape: PipelineShape, wiring: Wiring) -> Configuration:
        """Bounds by the whole model, and what equal stages would take."""
        chain, laws = self.evaluator.chain(shape.microbatch_size), shape.laws
        m, depth = shape.microbatches, shape.depth
        total_s = chain.least_s[-1] if shape.recompute is None else chain.listed_s(recompute=shape.recompute)[-1]
        block_s = float(np.diff(chain.least_s).max())
        boundaries: FloatArray = chain.output_bytes[1:-1]
        least_bytes, mean_bytes = (float(boundaries.min()), float(boundaries.mean())) if len(boundaries) else (0.0, 0.0)
        weights = float(chain.weight_bytes[-1])
        held = laws.in_flight(depth=depth, stage=0, microbatches=m)

        # A stage may recompute while it waits: that is on no microbatch's way there and back.
        way_s = min(chain.listed_s(recompute=False)[-1], total_s)
        moved_s = wiring.edge_latency_s + least_bytes * wiring.edge_s_per_byte
        least_s = m * max(total_s / depth, block_s, (way_s + moved_s) / held)
        ring = wiring.exchange.slowest
        if shape.width > 1 and ring is not None:
            least_s = max(least_s, weights * wiring.ring_s_per_byte)
        if laws.pipelined and laws.flushes:
            # Stages that each take 1 - 1/m of the one before end together: no others are as fast (`bound`, 3).
            least_s = max(least_s, way_s / (1.0 - (1.0 - 1.0 / m) ** depth))

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
        return Configuration(
            shape=shape,
            wiring=wiring,
            most=samples / (least_s * (1 - _ROUNDING)) if least_s > 0 else inf,
            likely=samples / batch_s if batch_s > 0 else inf,
        )
