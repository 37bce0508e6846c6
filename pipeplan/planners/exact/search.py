"""Search: the shapes of a problem, the lowest bound first, each by an exact recurrence, within a limit of time.

The steps, as the comments number them:

1. Bound: every shape's `bound_s` starts at what its compute alone allows. Shapes are taken up in this order.
2. Settle: the recurrence finds the shape's fastest stages (`paths`), which is then its `bound_s`.
3. Prune: a shape is decided once its `bound_s` is not below the best plan, less the precision.
4. Time: a shape that would take more than its share of the time waits for the second round; until then only some of its
   placements count. What does not end in time stays open.
5. No plan is faster than the lowest `bound_s` of all shapes. Where all are decided, the best plan is proven.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Generic, TypeVar

from pipeplan.arrays import FloatArray
from pipeplan.documents.plan import Stage
from pipeplan.planners.exact.budget import BUDGET
from pipeplan.planners.exact.paths import Path, StageStep, best_path, every_path, in_a_row
from pipeplan.planners.exact.places import Lattice, Placed, Places
from pipeplan.planners.exact.tables import StageKind, StageShape, StageTables, TableCache
from pipeplan.planners.messages import excess_bytes, with_messages
from pipeplan.planners.problem import Observer, PlanningProblem, SearchProgress

Quantity = Callable[[StageTables, StageShape, StageKind], FloatArray]
"""What is least: `StageTables.time_s` or `StageTables.excess_bytes`."""


class OutOfTimeError(Exception):
    """The search has used up its deterministic seconds."""


T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class Opened(Generic[T]):
    """A configuration, and a known lower bound on its seconds a sample."""

    configuration: T
    bound_s: float
    decided: bool = False


@dataclass(slots=True, kw_only=True)
class Rounds(Generic[T]):
    """Configurations that are settled one after the other, within a limit of deterministic seconds."""

    opened: Sequence[Opened[T]]
    limit: float
    observe: Observer
    spent: float = 0.0
    best_s: float = inf

    def run(self, settle: Callable[[Opened[T], float], None]) -> None:
        """Two rounds; in the first, each open configuration has an equal share of the time that is left (step 4).

        `settle` raises a bound or finds plans, until it is decided or the deterministic time comes to its argument.
        """
        for last in (False, True):
            for number, each in enumerate(self.opened):
                each.decided = each.decided or each.bound_s >= self.target_s  # step 3
                if each.decided or self.spent >= self.limit:
                    continue
                left = 1 if last else sum(not other.decided for other in self.opened[number:])
                settle(each, self.spent + (self.limit - self.spent) / left)
                self.report()

    @property
    def target_s(self) -> float:
        """The target of a better plan."""
        return self.best_s * (1 - BUDGET.precision)

    @property
    def bound_s(self) -> float:
        """A lower bound on the seconds a sample of all plans (step 5)."""
        return min([self.best_s, *(each.bound_s for each in self.opened)])

    @property
    def decided(self) -> bool:
        """Whether the time sufficed for all configurations."""
        return all(each.decided or each.bound_s >= self.target_s for each in self.opened)

    def charge(self, seconds: float, until: float) -> None:
        """Spends time; raises, before it is spent, where it would not be enough."""
        if self.spent + seconds >= until:
            raise OutOfTimeError
        self.spent += seconds

    def report(self) -> None:
        """Reports the best plan, and the bound on better ones, to the observer."""
        undecided = [each.bound_s for each in self.opened if not each.decided]
        bound_s = min([*undecided, self.best_s])
        self.observe(
            SearchProgress(
                best_s=None if self.best_s == inf else self.best_s,
                bound_s=0.0 if bound_s == inf else bound_s,
                open_shapes=len(undecided),
                spent=self.spent,
                limit=self.limit,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """Stages on devices, and their slowest."""

    shape: StageShape
    placed: Placed
    stops: tuple[int, ...]
    step_s: float

    @property
    def sample_s(self) -> float:
        """Seconds a sample."""
        return self.shape.sample_s(self.step_s)


@dataclass(kw_only=True)
class ExactSearch:
    """The search through one problem's shapes."""

    problem: PlanningProblem
    shapes: Sequence[StageShape]
    limit: float
    observe: Observer
    places: Places = field(init=False)
    rounds: Rounds[StageShape] = field(init=False)
    best: Solution | None = field(init=False, default=None)
    _tables: dict[int, StageTables] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.places = Places(cluster=self.problem.cluster)
        opened = [
            Opened(configuration=shape, bound_s=shape.sample_s(self.least_step_s(shape))) for shape in self.shapes
        ]
        opened.sort(key=lambda each: each.bound_s)  # step 1
        self.rounds = Rounds(opened=opened, limit=self.limit, observe=self.observe)

    def run(self) -> None:
        """Settles the shapes."""
        self.rounds.run(self._settle)

    def tables(self, microbatch_size: int) -> StageTables:
        """The tables at a size."""
        if microbatch_size not in self._tables:
            self._tables[microbatch_size] = StageTables(problem=self.problem, microbatch_size=microbatch_size)
        return self._tables[microbatch_size]

    def least_step_s(self, shape: StageShape) -> float:
        """The least seconds of a shape's slowest stage: its compute, spread evenly over the fastest type of device."""
        blocks_s = self.tables(shape.microbatch_size).blocks_s
        shares, widest = (shape.workers, shape.workers) if shape.width is None else (shape.depth, 1)
        return max(float(blocks_s.sum()) / shares, float(blocks_s.max()) / widest) * (1 - 1e-12)

    def _settle(self, opened: Opened[StageShape], until: float) -> None:
        """Step 2. Where PipeDream's stages do not fit with their messages, again with these in the tables.

        The first answer is a bound all the same.
        """
        for messages in (False, True):
            found, is_exact = self.least(opened.configuration, until, messages=messages)
            if is_exact:
                opened.bound_s = max(opened.bound_s, found.sample_s if found else inf)
            equally_wide = opened.configuration.width is not None
            fits = found is not None and (equally_wide or max(excess_bytes(self.problem, self.stages(found))) <= 0)
            if found is None or fits:
                break
        opened.decided = is_exact and (found is None or fits)
        if found is not None and fits and found.sample_s < self.rounds.target_s:
            self.best, self.rounds.best_s = found, found.sample_s

    def least(
        self, shape: StageShape, until: float, quantity: Quantity = StageTables.time_s, messages: bool = False
    ) -> tuple[Solution | None, bool]:
        """The stages with the least largest entry; whether all placements were compared, or only some (step 4)."""
        for coarse in (False, True):
            try:
                every = self.solutions(shape, quantity=quantity, until=until, messages=messages, coarse=coarse)
            except OutOfTimeError:
                continue
            return min(every, key=lambda each: each.step_s, default=None), not coarse
        return None, False

    def solutions(
        self,
        shape: StageShape,
        *,
        quantity: Quantity = StageTables.time_s,
        until: float = inf,
        messages: bool = False,
        coarse: bool = False,
    ) -> list[Solution]:
        """The stages with the least largest entry, of seconds or of missing bytes: on each orientation, or of all."""
        table = self.table_of(shape, quantity)
        one_type = len(self.places.counts) == 1 and shape.width is not None
        given = list(self.places.orientations(shape)) if one_type else [None]
        found = []
        for placed in given:
            if placed is None:
                steps = self._lattice_steps(shape, until, messages=messages, coarse=coarse)
            else:
                steps = in_a_row(placed.kinds)
                self.rounds.charge(len(steps) * self._step_s(shape, 1), until)
            path = best_path(steps, table, fewest=not shape.depth)
            if path is not None:
                found.append(self._solution(shape, placed or self.places.placed(path.kinds), path))
        return found

    def _lattice_steps(
        self, shape: StageShape, until: float, *, messages: bool = False, coarse: bool = False
    ) -> list[StageStep[StageKind]]:
        """All steps, charged before they are read. Raises OutOfTimeError if they are too many."""
        straight = self.problem.options.straight
        lattice = Lattice(places=self.places, shape=shape, straight=straight, messages=messages, coarse=coarse)
        steps, targets, listing_s = list[StageStep[StageKind]](), 0, 0.0
        step_s = self._step_s(shape, BUDGET.by_messages if messages else 1)
        for step in lattice.steps():
            steps.append(step)
            targets += len(step.targets)
            listing_s = BUDGET.each_target_s * targets
            if self.rounds.spent + listing_s + len(steps) * step_s >= until:
                self.rounds.spent += listing_s
                raise OutOfTimeError
        self.rounds.spent += listing_s + len(steps) * step_s
        return steps

    def _step_s(self, shape: StageShape, factor: int) -> float:
        return BUDGET.each_step_s + factor * BUDGET.each_entry_s * (self.tables(shape.microbatch_size).blocks + 1) ** 2

    def stages(self, found: Solution) -> tuple[Stage, ...]:
        """A solution's stages, as a plan has them; PipeDream's with their messages."""
        shape, tables = found.shape, self.tables(found.shape.microbatch_size)
        stages = [
            tables.stage(shape, kind, start, stop)
            for kind, start, stop in zip(found.placed.kinds, (0, *found.stops[:-1]), found.stops, strict=True)
        ]
        if shape.width is not None:
            return tuple(stages)
        return with_messages(self.problem, stages, shape.laws, shape.microbatch_size)

    def placements(self, shape: StageShape) -> tuple[list[Placed], bool]:
        """Placements of equally wide stages, and whether they are all.

        They are the orientations. Where devices are of several types, they are the placement of the fastest stages, and
        some that have all stages of a type together.
        """
        if len(self.places.counts) == 1:
            return list(self.places.orientations(shape)), True
        found = list[Placed]()
        try:
            found += [solution.placed for solution in self.solutions(shape, until=self.limit)]
            paths = every_path(self._lattice_steps(shape, self.limit, coarse=True))
            found += map(self.places.placed, islice(paths, BUDGET.placements))
        except OutOfTimeError:
            pass
        return list(dict.fromkeys(found)), False

    def split(self, shape: StageShape, placed: Placed, quantity: Quantity = StageTables.time_s) -> Solution | None:
        """The stages on these places whose slowest is fastest; ties prefer the most even. None where none fits."""
        path = best_path(in_a_row(placed.kinds), self.table_of(shape, quantity))
        return None if path is None else self._solution(shape, placed, path)

    def slowest_s(self, shape: StageShape, placed: Placed, stops: Sequence[int]) -> float:
        """The seconds of the slowest of these stages; infinite where one does not fit or may not be."""
        table, starts = self.table_of(shape, StageTables.time_s), (0, *stops[:-1])
        return max(
            float(table(kind)[start, stop]) for kind, start, stop in zip(placed.kinds, starts, stops, strict=True)
        )

    def _solution(self, shape: StageShape, placed: Placed, path: Path[StageKind]) -> Solution:
        return Solution(shape=replace(shape, depth=len(path.stops)), placed=placed, stops=path.stops, step_s=path.worst)

    def table_of(self, shape: StageShape, quantity: Quantity) -> Callable[[StageKind], FloatArray]:
        """The tables by the kind of stage."""
        tables, cached = self.tables(shape.microbatch_size), TableCache()
        return lambda kind: cached(kind, lambda: quantity(tables, shape, kind))
