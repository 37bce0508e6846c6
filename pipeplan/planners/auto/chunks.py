"""Chunks: the plans that auto may play with several stages a rank, in a loop or in a V.

A family is a schedule with its ranks, replicas and microbatches, over all numbers of chunks that can run and all
placements. It has an upper bound on the rate of its plays, for any stages. If a family could still win, its members are
made, each with a bound of its own. Their stages are nearly even (`interleaved.even`). A search for the best stages
would prove more, but takes a hundred times as long, and the play decides in any case.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from math import comb, inf

import numpy as np

from pipeplan.costs.memory import ROUNDS
from pipeplan.documents.plan import Alternative, ClosedForm, Plan
from pipeplan.errors import require
from pipeplan.planners.auto.chunk_bounds import ChunkBounds, most_anywhere
from pipeplan.planners.auto.chunk_splits import splits_within
from pipeplan.planners.auto.model import SearchedModel
from pipeplan.planners.complete import Decision, complete
from pipeplan.planners.interleaved.even import even_by_time, squeezed
from pipeplan.planners.interleaved.shape import ChunkedShape, shapes_of
from pipeplan.planners.interleaved.terms import ChunkedTerms
from pipeplan.planners.problem import CutGraph, PlanningProblem, refuse_unused
from pipeplan.planners.reasons import unpriced
from pipeplan.planners.spaces import EverySplit, ListedSplits, Splits
from pipeplan.schedules.registry import schedule_named

CHUNKED = ("1f1b-interleaved", "zb-v", "v-half", "dual-pipe-v")

_CUTS = ("forced_cuts", "forbidden_cuts")
_USED = ("microbatch_size", "schedule", "stages", "chunks", "recompute", "recompute_unit", "recompute_factor", *_CUTS)

MOST_COUNTED = 500_000
"""Upper bound on the instructions read to count what ranks keep: a second. Ten times as many if the user names the
schedule.
"""

MOST_SQUEEZED, SQUEEZED_BLOCKS = 12, 5000
"""How often the search tries to make stages fit that do not, or the blocks of all of these together if they are more: a
tenth of a second.
"""

LISTED = 100_000
"""Up to this number of splits, those that may be faster are listed, so a configuration's bound covers all of them."""

BESIDE = 0.25
"""The share of these instructions for families that are not `counted_on`."""

_ROUNDING = 1e-9


def asks_for_chunks(problem: PlanningProblem) -> bool:
    """Whether the options ask for ranks of several stages, which no other planner proposes.

    Raises InvalidInputError for options that go with none of them.
    """
    options, types = problem.options, [device.name for device in problem.cluster.types]
    schedule = None if options.schedule is None else schedule_named(options.schedule)
    if options.chunks is None and (schedule is None or not schedule.chunked):
        return False
    rule = f"must be one of {', '.join(CHUNKED)} where chunks are asked for"
    require(schedule is None or schedule.name in CHUNKED, "schedule", rule, options.schedule)
    refuse_unused("auto", options, _USED)
    rule = "must be of one type where ranks hold several stages"
    require(len(types) == 1, "cluster.groups", rule, types)
    require(options.memory == "training", "memory", "must be training where ranks hold several stages", options.memory)
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedFamily:
    """Shapes that differ only in their chunks, on all placements. `most` bounds the rate of their plays, samples/s."""

    shapes: tuple[ChunkedShape, ...]
    most: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkedConfiguration:
    """A member of a family, with stages that fit, on a placement. `most` bounds its plays' rate: for any stages if its
    splits can be listed (`LISTED`), else for these. `most_of_any_split` does for any.
    """

    space: "ChunkedSpace"
    terms: ChunkedTerms
    bounds: ChunkBounds
    stops: tuple[int, ...]
    most: float
    most_of_any_split: float

    @property
    def schedule(self) -> str:
        """The name of its schedule."""
        return self.terms.shape.schedule

    def split(self) -> tuple[int, ...]:
        """Where its nearly even stages end."""
        return self.stops

    def most_of(self, stops: tuple[int, ...]) -> float:
        """Upper bound on samples a second with these stages."""
        return self.bounds.most(stops)

    def most_of_any(self) -> float:
        """Upper bound on samples a second with any stages."""
        return min(self.most_of_any_split, self.bounds.most_by_transfers())

    def splits_above(self, rate: float, split: tuple[int, ...]) -> Splits:
        """The splits that may play faster."""
        least = rate * (1 - _ROUNDING) * self.terms.shape.microbatches
        found = splits_within(self.space.model, self.terms, self.terms.shape.batch_size / least if least > 0 else inf)
        if found is None:
            return EverySplit(split, self.bounds.most, rate)
        rates = self.bounds.most_of_each(found)
        order = np.argsort(-rates, kind="stable")
        order = order[rates[order] > rate]
        return ListedSplits(tuple(zip(rates[order].tolist(), map(tuple, found[order].tolist()), strict=True)))

    def plan(self, stops: tuple[int, ...]) -> Plan | None:
        """Its plan with these stages, not played; None if they do not fit."""
        return self.space.plan(self.terms, stops)

    def alternative(self, reason: str) -> Alternative:
        """Its entry among a plan's alternatives, without a price."""
        return unpriced(self.terms.shape, reason, recompute=bool(self.terms.shape.recompute))


@dataclass(slots=True, kw_only=True)
class ChunkedSpace:
    """The families of a model.

    `beyond` is the highest rate of the families for whose stages the search had no time, or found none that fit. It is
    known when all configurations have been taken. It is 0 if the families are not `counted_on`: these are tried only
    within a part of that time, and no certificate covers them.
    """

    model: SearchedModel
    schedules: Sequence[str]
    planner: str = "auto"
    counted_on: bool = True
    counted: int = 0
    squeezed: int = 0
    beyond: float = 0.0
    _stops: dict[tuple[int, int, bool, int], tuple[int, ...] | None] = field(default_factory=dict)

    @property
    def problem(self) -> PlanningProblem:
        """The problem, with a chain."""
        return self.model.problem

    @property
    def graph(self) -> CutGraph | None:
        """The graph that the chain represents, if there is one."""
        return self.problem.graph

    @property
    def considered(self) -> int:
        """The number of shapes."""
        return sum(len(family.shapes) for family in self.families()) if self.counted_on else 0

    def configurations(self) -> Iterator[ChunkedConfiguration]:
        """Those whose stages fit, the highest bound first. Families' members are made as they are needed."""
        waiting: list[tuple[float, int, ChunkedConfiguration]] = []
        numbers = count()
        for family in sorted(self.families(), key=lambda each: -each.most):
            while waiting and -waiting[0][0] > family.most:
                yield heappop(waiting)[-1]
            for member in self.members(family):
                heappush(waiting, (-member.most, next(numbers), member))
        while waiting:
            yield heappop(waiting)[-1]

    def families(self) -> Iterator[ChunkedFamily]:
        """All families; none that split the backward if the options forbid it."""
        problem, options = self.problem, self.problem.options
        if options.memory != "training":
            return
        measured = self.model.evaluator.measured
        batches = [(size, problem.batch_size // size) for size in measured.sizes]
        batches = [(size, samples) for size, samples in batches if problem.batch_size == size * samples]
        for name in self.schedules:
            if schedule_named(name).splits_backward and options.schedule is None and options.split_backward is False:
                continue
            alike: dict[tuple[int, int, int], list[ChunkedShape]] = {}
            devices, blocks = problem.cluster.devices, measured.blocks
            for shape in shapes_of(name, options, devices=devices, blocks=blocks, batches=batches):
                # One rank with one stage is data parallelism; with several it may hold less, where it recomputes. One
                # stage a rank holds more than 1F1B, and hides more.
                asked = options.chunks is not None or options.schedule is not None
                if asked or shape.ranks > 1 or (shape.chunks > 1 and options.recompute is not False):
                    alike.setdefault((shape.ranks, shape.width, shape.microbatch_size), []).append(shape)
            for shapes in alike.values():
                yield ChunkedFamily(shapes=tuple(shapes), most=most_anywhere(self.model, shapes[0]))

    def members(self, family: ChunkedFamily) -> Iterator[ChunkedConfiguration]:
        """Members whose stages fit, on every placement."""
        options = self.problem.options
        for shape in family.shapes:
            wirings = self.model.wirings(shape.width, shape.ranks)
            chain = self.model.evaluator.chain(shape.microbatch_size, shape.depth)
            terms = ChunkedTerms(problem=self.problem, shape=shape, links=wirings[0].links, chain=chain)
            if not terms.weights_fit():
                continue
            bounds = [ChunkBounds(model=self.model, shape=shape, wiring=wiring) for wiring in wirings]
            of_any = [min(each.most_by_exchanges(), family.most) for each in bounds]
            enough = (1.0 if options.schedule is None else 10.0) * (1.0 if self.counted_on else BESIDE)
            self.counted += 4 * ROUNDS * shape.ranks**2 * shape.chunks
            if self.counted > MOST_COUNTED * enough:
                self._leave(max(of_any))
                continue
            stops = self._stages(terms, max(of_any))
            if stops is None:
                continue
            for own, most in zip(bounds, of_any, strict=True):
                yield ChunkedConfiguration(
                    space=self,
                    terms=replace(terms, links=own.wiring.links),
                    bounds=own,
                    stops=stops,
                    most=most if comb(stops[-1] - 1, shape.depth - 1) <= LISTED else min(own.most(stops), most),
                    most_of_any_split=most,
                )

    def plan(self, terms: ChunkedTerms, stops: tuple[int, ...]) -> Plan | None:
        """The plan with these stages, not played; None if a rank's stages do not fit, or a cut is not allowed."""
        shape, starts = terms.shape, (0, *stops[:-1])
        if not all(terms.may_be_stage[start, stop] for start, stop in zip(starts, stops, strict=True)):
            return None
        stages, ranks = terms.stages(stops), range(shape.ranks)  # stage r is the first one of rank r
        if max(sum(stages[s].memory_bytes for s in shape.stages_of(rank)) for rank in ranks) > terms.device_bytes:
            return None
        step_s = max(terms.rank_s(rank, stops, recompute=stages[rank].recompute) for rank in ranks)
        sample_s = shape.sample_s(step_s)
        return complete(
            self.problem,
            Decision(
                planner=self.planner,
                cost_model=f"nearly even/{shape.schedule}",
                stages=stages,
                placement=terms.links.place((shape.width,) * shape.ranks),
                schedule=shape.schedule,
                chunks=shape.chunks,
                microbatch_size=shape.microbatch_size,
                microbatches=shape.microbatches,
                batch_size=shape.batch_size,
                closed_form=ClosedForm(
                    time_per_microbatch_s=step_s * (1 + shape.idle_steps / shape.microbatches),
                    throughput_samples_per_s=1 / sample_s,
                    bubble_fraction=shape.bubble_fraction,
                ),
                optimal_in_flight=terms.most_in_flight(0),
                configurations_considered=1,
                copies_bytes=terms.chain.copies_of(stops),
            ),
        )

    def _stages(self, terms: ChunkedTerms, most: float) -> tuple[int, ...] | None:
        """Even stages if they fit; else others that fit, if there is time to find them; None if there are none."""
        shape = terms.shape
        key = shape.ranks, shape.chunks, shape.laws.v_shaped, shape.microbatch_size
        if key not in self._stops:
            self._stops[key] = even_by_time(terms)
        stops = self._stops[key]
        if stops is None or not terms.may_fit():
            return None
        found = squeezed(terms, stops, sweeps=0)
        if found is not None:
            return found
        if self.squeezed >= max(MOST_SQUEEZED, SQUEEZED_BLOCKS // stops[-1]):
            self._leave(most)
            return None
        self.squeezed += 1
        return squeezed(terms, stops)

    def _leave(self, most: float) -> None:
        """Notes that a candidate with this upper bound on its rate is left out."""
        if self.counted_on:
            self.beyond = max(self.beyond, most)
