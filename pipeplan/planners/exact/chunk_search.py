"""Chunk search: the stages of ranks that hold several, in a loop or in a V, with a proof or a gap.

A place is a shape on a placement. Its step is the time of its slowest rank for a microbatch. The steps of the search,
as the comments number them:

1. Bound: every place's `bound_s` starts at what its compute alone allows. Places are taken up in this order.
2. Nearly even stages are a first plan, which the next steps can only improve.
3. With two stages a rank, a recurrence decides whether any stages stay within a step (`interleaved.pairs`): a step just
   below the best plan's, then half-way between it and the bound. One stage a rank is split at once. With more stages
   the solver looks for the least step (`chunk_model`). Places that are undecided when their time is up have a second
   round.
4. No plan is faster than the lowest `bound_s` of all places. Where all are decided, the best plan is proven.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from pipeplan.planners.exact.chunk_model import least_step
from pipeplan.planners.exact.paths import best_path, in_a_row
from pipeplan.planners.exact.search import OutOfTimeError
from pipeplan.planners.interleaved.even import nearly_even
from pipeplan.planners.interleaved.limits import Within
from pipeplan.planners.interleaved.pairs import Pairs
from pipeplan.planners.interleaved.shape import ChunkedShape, shapes_of
from pipeplan.planners.interleaved.terms import ChunkedTerms
from pipeplan.planners.problem import Observer, PlanningProblem, SearchProgress
from pipeplan.planners.two_bw.candidate import Evaluator
from pipeplan.planners.two_bw.chain import profiled
from pipeplan.planners.two_bw.placements import Links, orientations

NAME = "exact"

PRECISION = 1e-9
"""The search ignores plans that are faster by less."""

_EACH_ENTRY = 3e-8
"""Deterministic seconds for each table entry that the recurrence reads: measured."""

_EACH_RANK, _EACH_STAGE, _BY_MEMORY = 50_000, 10_000, 40
"""The costs, in table entries, of counting what a rank keeps and of moving the cuts of a stage. Moving cuts by memory
takes `_BY_MEMORY` times as long."""

_FIRST_STEPS = (1.01, 1.02, 1.04, 1.08, 1.16, 1.32, inf)
"""Where to search for first stages of ranks that hardly fit, in multiples of an even share."""

_EVEN_MIDDLES = 3
"""The answer has the most even stages over this number of middles."""


@dataclass(slots=True, kw_only=True, eq=False)
class ChunkedPlace:
    """A shape on a placement, and a known lower bound on its seconds a sample."""

    terms: ChunkedTerms
    bound_s: float
    decided: bool = False
    seen: bool = False
    first: tuple[int, ...] | None = None

    @property
    def shape(self) -> ChunkedShape:
        return self.terms.shape


@dataclass(slots=True, kw_only=True)
class ChunkedSearch:
    """The search through one problem's places, within a limit of deterministic seconds."""

    problem: PlanningProblem
    schedule: str
    limit: float
    observe: Observer
    evaluator: Evaluator = field(init=False)
    places: list[ChunkedPlace] = field(default_factory=list)
    spent: float = 0.0
    best: tuple[ChunkedPlace, tuple[int, ...]] | None = None
    best_s: float = inf

    def __post_init__(self) -> None:
        problem = self.problem
        self.evaluator = Evaluator(problem=problem, measured=profiled(problem))
        dividing = [size for size in self.evaluator.measured.sizes if problem.batch_size % size == 0]
        shapes = shapes_of(
            self.schedule,
            problem.options,
            devices=problem.cluster.devices,
            blocks=len(problem.profile.blocks),
            batches=[(size, problem.batch_size // size) for size in dividing],
        )
        cuts = problem.options.forced_cuts, problem.options.forbidden_cuts
        least, most = len(cuts[0]) + 1, len(problem.profile.blocks) - len(cuts[1])
        links_of: dict[tuple[int, int], tuple[Links, ...]] = {}
        for shape in shapes:
            if least <= shape.depth <= most:
                key = shape.width, shape.ranks
                if key not in links_of:
                    links_of[key] = orientations(problem.cluster, *key)
                chain = self.evaluator.chain(shape.microbatch_size)
                for links in links_of[key]:
                    terms = ChunkedTerms(problem=problem, shape=shape, links=links, chain=chain)
                    self.places.append(ChunkedPlace(terms=terms, bound_s=shape.sample_s(terms.least_step_s())))
        # Step 1. Among equals fewer devices come first, then fewer stages.
        self.places.sort(key=lambda each: (each.bound_s, each.shape.devices, each.shape.depth))

    def run(self) -> None:
        """Settles every place, or as many as time allows.

        In the first of two rounds the solver has a share of the time for each remaining place.
        """
        for last in (False, True):
            for number, place in enumerate(self.places):
                if place.bound_s >= self._target_s:
                    place.decided = True
                if place.decided or self.spent >= self.limit:
                    continue
                allowed = self.limit - self.spent
                if not last and place.shape.chunks > 2:
                    allowed /= 1 + sum(not other.decided for other in self.places[number:])
                self._settle(place, self.spent + allowed)
                self._report()

    @property
    def decided(self) -> bool:
        """Whether the time sufficed for all places."""
        return all(place.decided for place in self.places)

    @property
    def bound_s(self) -> float:
        """A lower bound on the seconds a sample of all plans."""
        return min((place.bound_s for place in self.places), default=inf)

    @property
    def _target_s(self) -> float:
        """The target of a better plan."""
        return self.best_s * (1 - PRECISION)

    def _settle(self, place: ChunkedPlace, until: float) -> None:
        """Steps 2 and 3, until the place is decided or the deterministic time comes to `until`."""
        try:
            self._first(place, until)
            if place.decided:
                return
            if place.shape.chunks == 1:
                self._split_at_once(place)
            elif place.shape.chunks == 2:
                self._ask_pairs(place, until)
            else:
                self._ask_solver(place, until)
        except OutOfTimeError:
            return

    def _first(self, place: ChunkedPlace, until: float) -> None:
        """Step 2, once for every place."""
        if place.seen:
            return
        place.seen = True
        terms, shape = place.terms, place.shape
        self.charge(_EACH_RANK * shape.ranks, until)
        if not terms.may_fit():
            place.bound_s, place.decided = inf, True
            return
        self.charge(_EACH_STAGE * shape.depth, until)
        place.first = nearly_even(terms, by_memory=False)
        if place.first is None and shape.chunks > 2:
            self.charge(_EACH_STAGE * shape.depth * _BY_MEMORY, until)
            place.first = nearly_even(terms)
        self._keep(place, place.first)

    def _split_at_once(self, place: ChunkedPlace) -> None:
        terms = place.terms
        tables = []
        for rank in range(place.shape.ranks):
            table = np.full((terms.blocks + 1, terms.blocks + 1), inf)
            for way in Within(terms=terms, held_bytes=terms.device_bytes).ways(rank):
                seconds, *others = (limit.tables[0] for limit in way)
                fits = np.logical_and.reduce([o <= each.most for o, each in zip(others, way[1:], strict=True)])
                table = np.minimum(table, np.where(fits, seconds, inf))
            exchange_s = terms.exchange_s_per_byte(rank) * (
                terms.chain.weight_bytes - terms.chain.weight_bytes[:, None]
            )
            tables.append(np.maximum(table, exchange_s))
            self.charge(table.size, self.limit)
        path = best_path(in_a_row(range(len(tables))), tables.__getitem__)
        stops = None if path is None else path.stops
        self._keep(place, stops)
        place.decided = True
        place.bound_s = inf if stops is None else max(place.bound_s, self.sample_s(place, stops))

    def _ask_pairs(self, place: ChunkedPlace, until: float) -> None:
        """Decides by the recurrence; while there is no plan yet, with increasing steps."""
        shape = place.shape
        least_s = shape.step_s(place.bound_s)
        if self.best is None:
            for times in _FIRST_STEPS:
                if self._found(place, least_s * times, until):
                    break
                place.bound_s = shape.sample_s(least_s * times)
        middle = False
        while True:
            target_s = self._target_s
            if place.bound_s >= target_s:
                place.decided = True
                return
            if middle:
                target_s = (target_s + place.bound_s) / 2
            middle = self._found(place, shape.step_s(target_s), until)
            if not middle:
                place.bound_s = target_s

    def _found(self, place: ChunkedPlace, step_s: float, until: float) -> bool:
        """Whether there are stages within a step that is below the best; they then become the best."""
        stops = self._pairs(place, step_s, until).stops()
        if stops is not None and not self._keep(place, stops):
            raise ArithmeticError(f"the recurrence's stages are not within the step that it was given: {step_s}")
        return stops is not None

    def _pairs(self, place: ChunkedPlace, step_s: float, until: float) -> Pairs:
        within = Within(terms=place.terms, step_s=step_s, held_bytes=place.terms.device_bytes)
        return Pairs(within=within, charge=lambda entries: self.charge(entries, until))

    def _ask_solver(self, place: ChunkedPlace, until: float) -> None:
        shape = place.shape
        mine = self.best is not None and self.best[0] is place
        found = least_step(
            place.terms,
            least_s=shape.step_s(place.bound_s),
            below_s=shape.step_s(self._target_s),
            hint=self.best[1] if mine and self.best else place.first,
            limit=until - self.spent,
        )
        self.spent += found.spent
        self._keep(place, found.stops)
        reached_s = self._target_s if found.bound == inf else shape.sample_s(found.bound)
        place.bound_s = max(place.bound_s, min(reached_s, self.best_s))
        place.decided = found.proven
        if found.bound == inf and self.best is None:
            place.bound_s = inf

    def _keep(self, place: ChunkedPlace, stops: tuple[int, ...] | None) -> bool:
        """Keeps stages that are faster than the best and fit; returns whether there were any."""
        if stops is None:
            return False
        terms = place.terms
        modes = [terms.mode(rank, stops) for rank in range(place.shape.ranks)]
        held = [terms.rank_bytes(rank, stops, recompute=mode) for rank, mode in enumerate(modes)]
        if max(held) <= terms.device_bytes and (reached_s := self.sample_s(place, stops)) < self.best_s:
            self.best, self.best_s = (place, stops), reached_s
            return True
        return False

    def sample_s(self, place: ChunkedPlace, stops: Sequence[int]) -> float:
        """Seconds a sample with these stages, whether they fit or not."""
        terms = place.terms
        ranks = range(place.shape.ranks)
        return place.shape.sample_s(max(terms.rank_s(rank, stops, recompute=terms.mode(rank, stops)) for rank in ranks))

    def most_even(self) -> tuple[ChunkedPlace, tuple[int, ...]]:
        """The best plan's place, with the most even of its stages that were found."""
        assert self.best is not None
        place, stops = self.best
        if place.shape.chunks != 2:
            return place, stops
        found = self._pairs(place, place.shape.step_s(self.best_s), inf).stops(_EVEN_MIDDLES)
        return place, found or stops

    def charge(self, entries: int, until: float) -> None:
        """Counts entries read; raises when the deterministic time reaches `until`."""
        self.spent += _EACH_ENTRY * entries
        if self.spent >= until:
            raise OutOfTimeError

    def _report(self) -> None:
        undecided = [place.bound_s for place in self.places if not place.decided]
        progress = SearchProgress(
            best_s=None if self.best is None else self.best_s,
            bound_s=min([*undecided, *([] if self.best is None else [self.best_s])], default=0.0),
            open_shapes=len(undecided),
            spent=self.spent,
            limit=self.limit,
        )
        self.observe(progress)
