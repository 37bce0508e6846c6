"""Search: a branch and bound over shapes; within a shape the solver decides questions with a limit of time.

A shape is everything but the places of the cuts. The steps, as the comments number them:

1. Bound: every shape's `bound_s` starts at what its compute alone allows. Shapes are taken up in this order.
2. First plans: recurrences find good ones (`first_plans`), in half of the time at most; the solver only improves them.
3. Ask: are there stages of this shape within a limit (`branches`, `decision`)? The limit is just below the best plan.
   a. There are: they are the best plan now. The next limit is half-way between it and `bound_s`.
   b. It is proven that there are none: the limit is the shape's new `bound_s`.
   c. Time is up: the shape stays undecided. There are two rounds, which leaves time for others after a hard shape.
4. Prune: a shape is decided once its `bound_s` is not below the best plan, less the precision.
5. No plan is faster than the lowest `bound_s` of all shapes. Where all are decided, the best plan is proven.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from pipeplan.planners.exact import first_plans
from pipeplan.planners.exact.branches import Questions
from pipeplan.planners.exact.decision import decide
from pipeplan.planners.exact.first_plans import balanced
from pipeplan.planners.exact.kinds import StageShape, Tabulated
from pipeplan.planners.exact.places import Placed, Places
from pipeplan.planners.problem import Observer, PlanningProblem, SearchProgress

PRECISION = 5e-7
"""The search ignores plans that are faster by less."""

_EACH_ENTRY = 4e-9
"""Deterministic seconds for each table entry that is read: work outside the solver counts as well."""

_EACH_SPLIT = 4
"""The number of times that a recurrence reads an entry."""


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """The best solution, None where there is none; no plan takes less than `bound_s` a sample.

    `decided`: the time sufficed for all shapes. `claim`: why, where messages decide (`room`).
    """

    best: Solution | None
    bound_s: float
    decided: bool
    spent: float
    claim: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Open:
    """A shape, and a known lower bound on its seconds a sample."""

    questions: Questions
    bound_s: float
    decided: bool = False


@dataclass(slots=True, kw_only=True)
class ExactSearch:
    """The search through one problem's shapes, within a limit of deterministic seconds."""

    problem: PlanningProblem
    shapes: Sequence[StageShape]
    limit: float
    observe: Observer
    reserved_bytes: float = 0.0
    places: Places = field(init=False)
    spent: float = 0.0
    best: Solution | None = None
    _open: list[_Open] = field(default_factory=list)
    _tabulated: dict[int, Tabulated] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = Places(cluster=self.problem.cluster)

    def run(self) -> Result:
        """First plans, then the questions, in two rounds."""
        # Step 1: compute alone, spread evenly over the fastest type of device.
        self._open = [
            _Open(questions=self.questions(shape), bound_s=shape.sample_s(self.least_step_s(shape)))
            for shape in self.shapes
        ]
        self._open.sort(key=lambda each: each.bound_s)

        for opened in self._open[: 1 if self.free_depth else None]:
            if opened.bound_s < self._target_s() and self.spent < self.limit / 2:
                self._first_plans(opened.questions)  # step 2
                opened.questions.forget()

        for share in (0.5, 1.0):
            for place, opened in enumerate(self._open):
                left = sum(not other.decided for other in self._open[place:])
                allowed = (self.limit - self.spent) * share if left else 0.0
                until = self.spent + allowed / max(left, 1) if share < 1 else self.limit
                self._settle(opened, until)  # steps 3 and 4
                opened.questions.forget()

        bound_s = min((each.bound_s for each in self._open), default=inf)  # step 5
        decided = all(each.decided for each in self._open)
        best_s = self.best.sample_s if self.best else inf
        return Result(best=self.best, bound_s=min(bound_s, best_s), decided=decided, spent=self.spent)

    def least_step_s(self, shape: StageShape) -> float:
        """The least seconds of a shape's slowest stage: its compute, on the fastest type of device."""
        tabulated = self.tabulated(shape.microbatch_size)
        types = range(len(tabulated.types))
        blocks_s = np.minimum.reduce([np.diagonal(tabulated.compute_s(kind)) for kind in types])
        workers = sum(self.places.counts) if shape.width is None else shape.depth
        widest = max(self.places.counts) if shape.width is None else 1
        return max(float(blocks_s.sum()) / workers, float(blocks_s.max()) / widest) * (1 - 1e-12)

    @property
    def free_depth(self) -> bool:
        """Whether all shapes have the same first plans: PipeDream's do, unless the stages are requested."""
        return any(shape.width is None for shape in self.shapes) and self.problem.options.stages is None

    def questions(self, shape: StageShape) -> Questions:
        """The questions about a shape."""
        options = self.problem.options
        return Questions(
            shape=shape,
            tabulated=self.tabulated(shape.microbatch_size),
            places=self.places,
            straight=options.straight,
            fewer=options.fewer_machines,
            charge=self._charge,
        )

    def _charge(self, entries: float) -> None:
        self.spent += _EACH_ENTRY * entries

    def tabulated(self, microbatch_size: int) -> Tabulated:
        """The tables at a size."""
        if microbatch_size not in self._tabulated:
            self._tabulated[microbatch_size] = Tabulated(
                problem=self.problem, microbatch_size=microbatch_size, reserved_bytes=self.reserved_bytes
            )
        return self._tabulated[microbatch_size]

    def _target_s(self) -> float:
        """The target of a better plan."""
        return self.best.sample_s * (1 - PRECISION) if self.best else inf

    def _first_plans(self, questions: Questions) -> None:
        """Keeps the best first plan of a shape; PipeDream's have any number of stages unless it is requested."""
        blocks = questions.tabulated.blocks
        for placed in self.first_places(questions):
            shape = replace(questions.shape, depth=len(placed.kinds))
            self._charge(_EACH_SPLIT * blocks * blocks * shape.depth)
            found = solution(questions if shape == questions.shape else self.questions(shape), placed)
            if found is not None and found.sample_s < self._target_s():
                self._keep(found)
            if self.spent >= self.limit / 2 and self.best is not None:
                return

    def first_places(self, questions: Questions, quantity: str = "time_s") -> Iterator[Placed]:
        """The places that the recurrences try for a shape."""
        shape, options = questions.shape, self.problem.options
        if shape.width is not None:
            yield from first_plans.placed(shape, self.places)
            return
        tabulated = questions.tabulated
        for row in first_plans.rows(tabulated, self.places, straight=options.straight, fewer=options.fewer_machines):
            self._charge(row.entries(options.stages))
            teams = row.teams(shape, depth=options.stages, quantity=quantity)
            if teams is not None:
                yield self.places.in_a_row(teams)
            if self.spent >= self.limit:
                return

    def _keep(self, found: Solution) -> None:
        self.best = found
        self._report()

    def _report(self) -> None:
        """Reports the best plan, and the bound on better ones, to the observer."""
        undecided = [shape.bound_s for shape in self._open if not shape.decided]
        best_s = self.best.sample_s if self.best else None
        bound_s = min([*undecided, *([] if best_s is None else [best_s])], default=0.0)
        progress = SearchProgress(
            best_s=best_s, bound_s=bound_s, open_shapes=len(undecided), spent=self.spent, limit=self.limit
        )
        self.observe(progress)

    def _settle(self, shape: _Open, until: float) -> None:
        """Asks about a shape until it is decided or the deterministic time comes to `until`."""
        middle = False
        while not shape.decided:
            target_s = self._target_s()
            if shape.bound_s >= target_s:
                shape.decided = True  # step 4
                break
            if middle:
                target_s = (target_s + shape.bound_s) / 2
            found, proven = self._ask(shape, target_s, until)
            if found is None and not proven:
                break  # step 3c
            middle = found is not None  # step 3a
            if found is None:
                shape.bound_s = target_s  # step 3b
                shape.decided = target_s == inf
        self._report()

    def _ask(self, shape: _Open, target_s: float, until: float) -> tuple[Solution | None, bool]:
        """Step 3: a solution within the target; or None, and whether it is proven that there is none."""
        proven = True
        if self.spent + _EACH_ENTRY * shape.questions.entries >= until:
            return None, False
        for question in shape.questions.within(shape.questions.shape.step_s(target_s)):
            if self.spent >= until:
                return None, False
            verdict = decide(question.asked, until - self.spent)
            self.spent += verdict.spent
            if verdict.found is not None:
                placed = question.placed or self.places.in_a_row(verdict.found[0])
                found = solution(shape.questions, placed)
                if found is None or found.sample_s >= (self.best.sample_s if self.best else inf):
                    raise ArithmeticError(f"the solver's plan is not within the limit that it was given: {target_s}")
                self._keep(found)
                return found, False
            proven = proven and verdict.proven
        return None, proven


def solution(questions: Questions, placed: Placed) -> Solution | None:
    """The split on these places whose slowest stage is fastest; ties prefer the most even. None where none fits."""
    tables = [questions.table(questions.shared(kind)) for kind in placed.kinds]
    stops = balanced(tables)
    if stops is None:
        return None
    step_s = slowest(tables, stops)
    return Solution(shape=questions.shape, placed=placed, stops=stops, step_s=step_s)


def slowest(tables: Sequence[np.ndarray], stops: Iterable[int]) -> float:
    """The largest of the stages' entries."""
    start, worst = 0, -inf
    for table, stop in zip(tables, stops, strict=True):
        worst = max(worst, float(table[start, stop - 1]))
        start = stop
    return worst
