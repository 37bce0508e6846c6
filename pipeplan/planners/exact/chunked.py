"""Chunked: the stages of ranks that hold several, in a loop or in a V, with a proof or a gap.

A place is a shape on a placement. Its step is the time of its slowest rank for a microbatch. The steps of the search,
as the comments number them; `search.Rounds` bounds, prunes and ends it:

1. Nearly even stages are a first plan, which the next steps can only improve.
2. One stage a rank is split at once, by the recurrence over given places (`paths`).
3. With two stages a rank, a recurrence decides whether any stages stay within a step (`interleaved.pairs`): a step just
   below the best plan's, then half-way between it and the bound.
4. With more stages a rank, CP-SAT looks for the least step (`chunk_model`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from pipeplan.documents.plan import Alternative, Answer, ClosedForm, Infeasible, Reason
from pipeplan.errors import require
from pipeplan.planners.chain import profiled
from pipeplan.planners.complete import Decision, complete
from pipeplan.planners.exact.answers import NAME, certificate_of
from pipeplan.planners.exact.budget import BUDGET
from pipeplan.planners.exact.chunk_model import least_step
from pipeplan.planners.exact.paths import best_path, in_a_row
from pipeplan.planners.exact.search import Opened, OutOfTimeError, Rounds
from pipeplan.planners.interleaved.even import even_by_time, nearly_even
from pipeplan.planners.interleaved.limits import Within
from pipeplan.planners.interleaved.pairs import Pairs
from pipeplan.planners.interleaved.shape import shapes_of
from pipeplan.planners.interleaved.terms import ChunkedTerms
from pipeplan.planners.problem import Observer, PlanningProblem
from pipeplan.planners.reasons import memory_reason, shortfall, slower, unpriced
from pipeplan.planners.two_bw.candidate import Evaluator
from pipeplan.planners.two_bw.placements import orientations

Stops = tuple[int, ...]


def chunked(problem: PlanningProblem, schedule: str, limit: float, observe: Observer) -> Answer:
    """The fastest plan of a schedule whose ranks hold several stages, or the nearest misses.

    Raises InvalidInputError if the time ended before a plan was found or it was proven that there is none.
    """
    search = ChunkedSearch(problem=problem, schedule=schedule, limit=limit, observe=observe)
    search.rounds.run(search.settle)
    if search.best is None:
        rule = "must be longer: in this time no plan was found, and no proof that none fits"
        require(search.rounds.decided, "time_limit_s", rule, limit)
        return infeasible(search)
    terms, stops = search.best
    shape, best_s = terms.shape, search.rounds.best_s
    step_s = shape.step_s(best_s)
    searched = f"{len(search.rounds.opened)} combinations of ranks, chunks, width, microbatch size and placement"
    slowest = f": the slowest of {shape.ranks} ranks takes {step_s:.6g} s a microbatch"
    solved = any(each.configuration.shape.chunks > 2 for each in search.rounds.opened)
    method = "cp-sat" if solved else "recurrence over ranks"
    return complete(
        problem,
        Decision(
            planner=NAME,
            cost_model=f"{NAME}/{shape.schedule}",
            stages=terms.stages(stops),
            placement=terms.links.place((shape.width,) * shape.ranks),
            schedule=shape.schedule,
            chunks=shape.chunks,
            microbatch_size=shape.microbatch_size,
            microbatches=shape.microbatches,
            batch_size=problem.batch_size,
            closed_form=ClosedForm(
                time_per_microbatch_s=step_s * (1 + shape.idle_steps / shape.microbatches),
                throughput_samples_per_s=1 / best_s,
                bubble_fraction=shape.bubble_fraction,
            ),
            optimal_in_flight=terms.most_in_flight(0),
            configurations_considered=len(search.rounds.opened),
            alternatives=tuple(alternatives(terms, stops)),
            certificate=certificate_of(search.rounds, method, searched, slowest),
        ),
    )


@dataclass(slots=True, kw_only=True)
class ChunkedSearch:
    """The search through one problem's places, within a limit of deterministic seconds."""

    problem: PlanningProblem
    schedule: str
    limit: float
    observe: Observer
    rounds: Rounds[ChunkedTerms] = field(init=False)
    best: tuple[ChunkedTerms, Stops] | None = None
    _first: dict[ChunkedTerms, Stops | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        opened = [
            Opened(configuration=terms, bound_s=terms.shape.sample_s(terms.least_step_s())) for terms in self._places()
        ]
        # Among equals fewer devices come first, then fewer stages.
        opened.sort(key=lambda each: (each.bound_s, each.configuration.shape.devices, each.configuration.shape.depth))
        self.rounds = Rounds(opened=opened, limit=self.limit, observe=self.observe)

    def _places(self) -> Iterator[ChunkedTerms]:
        """Every shape that the cuts allow, on each orientation."""
        problem, options, blocks = self.problem, self.problem.options, len(self.problem.profile.blocks)
        evaluator = Evaluator(problem=problem, measured=profiled(problem))
        sizes = [size for size in evaluator.measured.sizes if problem.batch_size % size == 0]
        batches = [(size, problem.batch_size // size) for size in sizes]
        for shape in shapes_of(self.schedule, options, devices=problem.cluster.devices, blocks=blocks, batches=batches):
            if len(options.forced_cuts) < shape.depth <= blocks - len(options.forbidden_cuts):
                chain = evaluator.chain(shape.microbatch_size)
                for links in orientations(problem.cluster, shape.width, shape.ranks):
                    yield ChunkedTerms(problem=problem, shape=shape, links=links, chain=chain)

    def settle(self, place: Opened[ChunkedTerms], until: float) -> None:
        """Finds the place's best stages, or raises its bound, until the deterministic time comes to `until`."""
        terms = place.configuration
        try:
            if terms not in self._first:
                self._first[terms] = self._first_stops(place, until)
            if place.decided:
                return
            if terms.shape.chunks == 1:
                self._split_at_once(place, until)
            elif terms.shape.chunks == 2:
                self._bisect(place, until)
            else:
                self._solve(place, until)
        except OutOfTimeError:
            return

    def _first_stops(self, place: Opened[ChunkedTerms], until: float) -> Stops | None:
        """Step 1."""
        terms, shape = place.configuration, place.configuration.shape
        self.rounds.charge(BUDGET.each_rank_s * shape.ranks + BUDGET.each_stage_s * shape.depth, until)
        if not terms.may_fit():
            place.bound_s, place.decided = inf, True
            return None
        stops = nearly_even(terms, by_memory=False)
        if stops is None and shape.chunks > 2:
            self.rounds.charge(BUDGET.by_memory * BUDGET.each_stage_s * shape.depth, until)
            stops = nearly_even(terms)
        self._keep(terms, stops)
        return stops

    def _split_at_once(self, place: Opened[ChunkedTerms], until: float) -> None:
        """Step 2."""
        terms = place.configuration
        weights = terms.chain.weight_bytes - terms.chain.weight_bytes[:, None]
        tables = []
        for rank in range(terms.shape.ranks):
            table = np.full_like(weights, inf)
            for mode in Within(terms=terms, held_bytes=terms.device_bytes).ways(rank):
                busy, *others = mode
                fits = np.logical_and.reduce([each.tables[0] <= each.most for each in others])
                table = np.minimum(table, np.where(fits, busy.tables[0], inf))
            tables.append(np.maximum(table, terms.exchange_s_per_byte(rank) * weights))
            self.rounds.charge(BUDGET.each_pair_s * table.size, until)
        path = best_path(in_a_row(range(len(tables))), tables.__getitem__)
        self._keep(terms, None if path is None else path.stops)
        place.decided = True
        place.bound_s = inf if path is None else max(place.bound_s, terms.shape.sample_s(path.worst))

    def _bisect(self, place: Opened[ChunkedTerms], until: float) -> None:
        """Step 3. While there is no plan yet, the steps increase."""
        shape = place.configuration.shape
        least_s = shape.step_s(place.bound_s)
        for times in BUDGET.first_steps if self.best is None else ():
            if self._within(place, least_s * times, until):
                break
            place.bound_s = shape.sample_s(least_s * times)
        is_found = False
        while place.bound_s < (target_s := self.rounds.target_s):
            if is_found:
                target_s = (target_s + place.bound_s) / 2
            is_found = self._within(place, shape.step_s(target_s), until)
            if not is_found:
                place.bound_s = target_s
        place.decided = True

    def _within(self, place: Opened[ChunkedTerms], step_s: float, until: float) -> bool:
        """Whether there are stages within a step that is below the best; they then become the best."""
        terms = place.configuration
        within = Within(terms=terms, step_s=step_s, held_bytes=terms.device_bytes)
        pairs = Pairs(within=within, charge=lambda entries: self.rounds.charge(BUDGET.each_pair_s * entries, until))
        stops = pairs.stops()
        if stops is not None and not self._keep(terms, stops):
            raise ArithmeticError(f"the recurrence's stages are not within the step that it was given: {step_s}")
        return stops is not None

    def _solve(self, place: Opened[ChunkedTerms], until: float) -> None:
        """Step 4."""
        terms, shape = place.configuration, place.configuration.shape
        is_best = self.best is not None and self.best[0] is terms
        found = least_step(
            terms,
            least_s=shape.step_s(place.bound_s),
            below_s=shape.step_s(self.rounds.target_s),
            hint=self.best[1] if is_best and self.best else self._first[terms],
            limit=until - self.rounds.spent,
        )
        self.rounds.spent += found.spent
        self._keep(terms, found.stops)
        reached_s = shape.sample_s(found.bound_s)  # infinite if no stages are below the target
        place.bound_s = max(place.bound_s, min(reached_s, self.rounds.target_s))
        place.decided = found.proven

    def _keep(self, terms: ChunkedTerms, stops: Stops | None) -> bool:
        """Keeps stages that are faster than the best and fit; returns whether there were any."""
        if stops is None:
            return False
        step_s, rank_bytes, _ = _of_ranks(terms, stops)
        if max(rank_bytes) <= terms.device_bytes and terms.shape.sample_s(step_s) < self.rounds.best_s:
            self.best, self.rounds.best_s = (terms, stops), terms.shape.sample_s(step_s)
            return True
        return False


def _of_ranks(terms: ChunkedTerms, stops: Sequence[int]) -> tuple[float, list[int], bool]:
    """The seconds of the slowest rank, the bytes of every rank, and whether any recomputes, each in its best mode."""
    ranks = range(terms.shape.ranks)
    modes = [terms.mode(rank, stops) for rank in ranks]
    step_s = max(terms.rank_s(rank, stops, recompute=modes[rank]) for rank in ranks)
    return step_s, [terms.rank_bytes(rank, stops, recompute=modes[rank]) for rank in ranks], any(modes)


def alternatives(terms: ChunkedTerms, stops: Stops) -> Iterator[Alternative]:
    """Stages of equal numbers of blocks, if they are not the answer."""
    shape = terms.shape
    even = tuple(terms.blocks * stage // shape.depth for stage in range(1, shape.depth + 1))
    allowed = all(terms.may_be_stage[start, stop] for start, stop in zip((0, *even[:-1]), even, strict=True))
    if even == stops or not allowed:
        return
    step_s, rank_bytes, recompute = _of_ranks(terms, even)
    missing_bytes = max(rank_bytes) - terms.device_bytes
    rate = 1 / shape.sample_s(step_s)
    why = slower(rate) if missing_bytes <= 0 else shortfall(rank_bytes.index(max(rank_bytes)), missing_bytes)
    yield unpriced(
        shape,
        f"stages of equal numbers of blocks: {why}",
        recompute=recompute,
        closed_form_samples_per_s=rate if missing_bytes <= 0 else None,
        memory_bytes=max(rank_bytes),
    )


def infeasible(search: ChunkedSearch) -> Infeasible:
    """The nearest misses with stages of nearly equal times; or why there is no shape.

    Shapes that differ only in their width and placement hold nearly the same: the first stands for all.
    """
    places = [each.configuration for each in search.rounds.opened]
    alike = {(p.shape.ranks, p.shape.chunks, p.shape.microbatch_size): p for p in reversed(places)}
    reasons = []
    for terms in alike.values():
        stops, shape = even_by_time(terms), terms.shape
        if stops is None:
            continue
        _, rank_bytes, _ = _of_ranks(terms, stops)
        worst = max(rank_bytes)
        layout = f"{shape.schedule}, {shape.ranks} ranks x {shape.chunks} chunks, width {shape.width}"
        reason = memory_reason(
            f"{layout}, microbatches of {shape.microbatch_size}",
            stage=rank_bytes.index(worst),
            missing_bytes=worst - terms.device_bytes,
            device_bytes=terms.device_bytes,
            configurations=1,
        )
        reasons.append(reason)
    reasons.sort(key=lambda miss: miss.missing_bytes or 0)
    problem, options = search.problem, search.problem.options
    requested = [
        f"{n} {what} asked for" for n, what in ((options.stages, "ranks"), (options.chunks, "chunks a rank")) if n
    ]
    counts = f"{len(problem.profile.blocks)} blocks", f"{problem.cluster.devices} devices"
    no_shape = Reason(
        rule=(
            f"ranks, chunks and cuts must leave every stage a block, and {search.schedule} must take the batch's "
            "microbatches on these ranks (docs/schedules.md)"
        ),
        detail=", ".join([*requested, *counts, f"{problem.batch_size} samples in a batch"]),
    )
    listed = tuple(reasons[: BUDGET.reasons]) or (no_shape,)
    return Infeasible(planner=NAME, reasons=listed, configurations_considered=len(places))
