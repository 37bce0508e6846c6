"""Candidate: a shape with its best split into stages, by time, or by memory where none fits."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from pipeplan.costs.memory import copies, exchanged_sets, keeps_master_weights
from pipeplan.costs.tied import copies_apart
from pipeplan.documents.certificate import Certificate
from pipeplan.documents.plan import RECOMPUTE_UNITS, Alternative, ClosedForm, Stage
from pipeplan.errors import InvalidInputError
from pipeplan.planners.chain import ProfileChain
from pipeplan.planners.complete import Decision
from pipeplan.planners.measured import MeasuredBlocks
from pipeplan.planners.problem import PlanningProblem, recompute_units
from pipeplan.planners.reasons import as_fast, at_most, shortfall, slower, unpriced
from pipeplan.planners.two_bw.chosen import chosen
from pipeplan.planners.two_bw.fewest import FewestStages
from pipeplan.planners.two_bw.placements import Links, orientations
from pipeplan.planners.two_bw.split import ROUNDING, Found, even_min_sum, least_sum
from pipeplan.planners.two_bw.terms import MemoryCounts, PipelineShape, PipelineTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A shape that fits: its orientation and its time. `Evaluator.stops` says where its stages end.

    `found` is the result of the search for a pipeline's split; None without pipelining, where stages work one after
    the other.
    """

    shape: PipelineShape
    terms: PipelineTerms
    found: Found | None
    time_per_microbatch_s: float
    throughput_samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A shape that does not fit: the worst stage of the split that exceeds the device the least."""

    shape: PipelineShape
    stage: int
    memory_bytes: int
    missing_bytes: int


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Finds the best split of shapes; common results are computed once.

    `measured` holds the microbatch sizes that shapes may have.
    """

    problem: PlanningProblem
    measured: MeasuredBlocks
    _chains: dict[tuple[int, tuple[int, ...], tuple[int, ...]], ProfileChain] = field(default_factory=dict)
    _links: dict[tuple[int, int], tuple[Links, ...]] = field(default_factory=dict)
    _counts: dict[tuple[str, int, bool, int, int], tuple[MemoryCounts, ...]] = field(default_factory=dict)
    _fewest: dict[tuple[str, bool | None, int, int], FewestStages] = field(default_factory=dict)
    _least_depths: dict[tuple[str, bool | None, int, int], tuple[float, float]] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """The capacity of a stage's device."""
        return self.problem.cluster.device.usable_bytes

    def chain(self, microbatch_size: int, depth: int = 1) -> ProfileChain:
        """The profile at this size, with the copies of shared weights that any `depth` stages have."""
        profile = self.problem.profile
        copies_bytes, frozen_copies_bytes = (
            copies_apart(every, self.measured.blocks, depth) if every else ()
            for every in (profile.tied, profile.tied_frozen)
        )
        key = microbatch_size, copies_bytes, frozen_copies_bytes
        if key not in self._chains:
            self._chains[key] = ProfileChain(
                row=self.measured.sizes.index(microbatch_size),
                source=self.measured,
                recompute_factor=self.problem.options.recompute_factor,
                copies_bytes=copies_bytes,
                frozen_copies_bytes=frozen_copies_bytes,
            )
        return self._chains[key]

    def links(self, shape: PipelineShape) -> tuple[Links, ...]:
        """The orientations that differ."""
        key = (shape.width, shape.depth)
        if key not in self._links:
            self._links[key] = orientations(self.problem.cluster, shape.width, shape.depth)
        return self._links[key]

    def counts(self, shape: PipelineShape, recompute: bool) -> tuple[MemoryCounts, ...]:
        """The copies held on the stages of a shape, with recomputation by every unit that it may have.

        It depends on the batch only under a flush, on the width under ASP.
        """
        microbatches = shape.microbatches if shape.laws.flushes or not shape.laws.fills else 1
        key = (shape.schedule, shape.depth, recompute, microbatches, exchanged_sets(shape.laws, shape.width))
        if key not in self._counts:
            units, options = recompute_units(self.problem, shape.laws), self.problem.options
            asked = {"depth": shape.depth, "microbatches": shape.microbatches, "replicas": shape.width}
            self._counts[key] = tuple(
                MemoryCounts(
                    tuple(
                        copies(
                            options.memory,
                            shape.laws,
                            options.optimizer_or_default,
                            recompute=recompute,
                            stage=stage,
                            dtype=self.problem.profile.dtype,
                            autocast=self.problem.profile.autocast,
                            master_weights=self.master_weights,
                            unit=unit,
                            **asked,
                        )
                        for stage in range(shape.depth)
                    ),
                    unit,
                )
                for unit in (units if recompute else units[:1])
            )
        return self._counts[key]

    @cached_property
    def master_weights(self) -> bool:
        """Whether the optimizer works on float32 copies."""
        return keeps_master_weights(self.problem.profile.dtype, self.problem.options.master_weights)

    def terms(self, shape: PipelineShape, links: Links) -> PipelineTerms:
        """The closed form of a shape on these links."""
        return PipelineTerms(
            shape=shape,
            links=links,
            chain=self.chain(shape.microbatch_size, shape.depth),
            counts={mode: self.counts(shape, mode) for mode in shape.modes},
            device_bytes=self.device_bytes,
        )

    def fastest(
        self,
        shape: PipelineShape,
        *,
        least_time_s: float = 0.0,
        ceiling_s: float = inf,
        on: tuple[Links, ...] | None = None,
    ) -> Candidate | None:
        """The shape on the better orientation (the first if they are equal), or on the best of these links.

        None if no split fits, or none of them takes at most `ceiling_s` a microbatch. `least_time_s` is a known bound:
        no split takes less.
        """
        best: Candidate | None = None
        starts = self._some_terms(shape).fitting_starts() if not shape.laws.pipelined else None
        for links in self.links(shape) if on is None else on:
            terms = self.terms(shape, links)
            found, step_s = None, inf
            if starts is not None:
                step_s = least_sum(terms.within(starts, 0.0), starts)
            elif shape.laws.pipelined:
                sums_s = terms.chain.listed_s(recompute=True) if shape.recompute else terms.chain.least_s
                about_s = max(least_time_s / shape.slots, sums_s[-1] / shape.depth) * (1 - ROUNDING)
                found = terms.fastest(terms.every_start, about_s).least_max(ceiling_s / shape.slots)
                step_s = found.worst if found else inf
            time_s = step_s * shape.slots
            if time_s < inf and time_s <= ceiling_s and (best is None or time_s < best.time_per_microbatch_s):
                best = candidate(shape, terms, found, step_s)
                ceiling_s = time_s
        return best

    def possible(self, shape: PipelineShape, step_s: float) -> bool:
        """Whether some stages may take at most `step_s` within the memory, at the shape's depth and any width."""
        laws = shape.laws
        if not laws.pipelined:
            return self._some_terms(shape).possible(step_s)
        key = (shape.schedule, shape.recompute, shape.width, shape.microbatch_size)
        asked_s, least_depth = self._least_depths.get(key, (inf, 0.0))
        if step_s > asked_s or (step_s < asked_s and shape.depth >= least_depth):
            # The count of fewest stages is the same for every width; the batch matters only under a flush.
            most = shape.microbatches if laws.flushes or not laws.fills else self.measured.blocks
            counted = (shape.schedule, shape.recompute, shape.microbatch_size, most)
            if counted not in self._fewest:
                self._fewest[counted] = FewestStages(
                    problem=self.problem,
                    chain=self.chain(shape.microbatch_size),
                    laws=laws,
                    modes=shape.modes,
                    microbatches=most,
                    master_weights=self.master_weights,
                )
            least_depth = self._fewest[counted].within(step_s, self.problem.cluster.devices // shape.width)
            self._least_depths[key] = step_s, least_depth
        return shape.depth >= least_depth and self._some_terms(shape).possible(step_s)

    def stops(self, best: Candidate) -> tuple[int, ...]:
        """Where the stages of its best split end.

        Without pipelining many splits are equally fast: ties prefer the smallest fullest stage, then the most even.
        """
        terms = best.terms
        if best.found is not None:
            return terms.fastest(terms.every_start, 0.0).stops(best.found)
        starts = terms.fitting_starts()
        if starts is None:
            raise InvalidInputError("stages", "must be so many that a split exists", best.shape.depth)
        return even_min_sum(terms.within(starts, 0.0), starts, held=terms.memory_bytes, squares=terms.squares)

    def nearest(self, shape: PipelineShape, ceiling_bytes: float = inf) -> Miss | None:
        """The minimum over all splits of the excess over the device; None if that is above the ceiling."""
        terms = self._some_terms(shape)
        search = terms.smallest()
        found = search.least_max(ceiling_bytes)
        if found is None:
            return None
        held_bytes = [each.held_bytes for each in chosen(terms, search.any_stops(found))]
        stage = held_bytes.index(max(held_bytes))
        return Miss(
            shape=shape,
            stage=stage,
            memory_bytes=held_bytes[stage],
            missing_bytes=held_bytes[stage] - self.device_bytes,
        )

    def _some_terms(self, shape: PipelineShape) -> PipelineTerms:
        """The terms for values that do not depend on the orientation."""
        return self.terms(shape, self.links(shape)[0])


def candidate(shape: PipelineShape, terms: PipelineTerms, found: Found | None, step_s: float) -> Candidate:
    """The shape with this time of its slowest stage, or of all stages without pipelining."""
    time_s = step_s * shape.slots
    return Candidate(
        shape=shape,
        terms=terms,
        found=found,
        time_per_microbatch_s=time_s,
        throughput_samples_per_s=shape.throughput_samples_per_s(time_s),
    )


def stages(terms: PipelineTerms, stops: tuple[int, ...]) -> Iterator[Stage]:
    """The stages of a split, each in the mode that is best for it."""
    for stage, each in enumerate(chosen(terms, stops)):
        memory = terms.chain.stage_memory(each.counts.copies[stage], each.start, each.stop)
        yield Stage(
            start=each.start,
            stop=each.stop,
            replicas=terms.shape.width,
            recompute=each.recompute,
            recompute_unit=each.counts.unit if each.recompute else RECOMPUTE_UNITS[0],
            time_s=each.time_s,
            memory_bytes=memory.total,
            memory=memory,
        )


def decision(
    planner: str,
    cost_model: str,
    best: Candidate,
    stops: tuple[int, ...],
    *,
    considered: int,
    alternatives: Iterable[Alternative],
    certificate: Certificate | None = None,
) -> Decision:
    """The planner's decision for the candidate that it chose."""
    shape = best.shape
    return Decision(
        planner=planner,
        cost_model=cost_model,
        stages=tuple(stages(best.terms, stops)),
        placement=best.terms.links.place((shape.width,) * shape.depth),
        schedule=shape.schedule,
        microbatch_size=shape.microbatch_size,
        microbatches=shape.microbatches,
        batch_size=shape.batch_size,
        closed_form=ClosedForm(
            time_per_microbatch_s=best.time_per_microbatch_s,
            throughput_samples_per_s=best.throughput_samples_per_s,
            bubble_fraction=shape.bubble_fraction,
        ),
        optimal_in_flight=shape.laws.in_flight(depth=shape.depth, stage=0, microbatches=shape.microbatches),
        configurations_considered=considered,
        alternatives=tuple(alternatives),
        certificate=certificate,
        copies_bytes=best.terms.chain.copies_of(stops),
    )


def lost(found: Candidate, stops: tuple[int, ...], best: Candidate) -> Alternative:
    """The entry of a shape that fits, but is slower than the best, or as fast and not preferred."""
    rate = found.throughput_samples_per_s
    split = chosen(found.terms, stops)
    return unpriced(
        found.shape,
        slower(rate) if rate < best.throughput_samples_per_s else as_fast(rate),
        recompute=any(stage.recompute for stage in split),
        closed_form_samples_per_s=rate,
        memory_bytes=max(stage.held_bytes for stage in split),
    )


def bounded(shape: PipelineShape, throughput_samples_per_s: float) -> Alternative:
    """The entry of a shape whose bound is not above the best."""
    return unpriced(shape, at_most(throughput_samples_per_s), recompute=bool(shape.recompute))


def too_large(miss: Miss) -> Alternative:
    """The entry of a shape that does not fit."""
    recompute = miss.shape.recompute is not False
    return unpriced(
        miss.shape, shortfall(miss.stage, miss.missing_bytes), recompute=recompute, memory_bytes=miss.memory_bytes
    )


def ruled_out(shape: PipelineShape, reason: str) -> Alternative:
    """The entry of a shape that cannot run."""
    return unpriced(shape, reason, recompute=bool(shape.recompute))
