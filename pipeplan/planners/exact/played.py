"""Played: the plans that the exact planner plays: every shape's best split on every placement that it knows.

A shape's evenly spread compute is a lower bound on its step, which bounds its plays. PipeDream's shapes are not played
one by one; the closed form's optimum stands for them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf

from pipeplan.documents.plan import Alternative, Plan
from pipeplan.planners.exact.kinds import StageShape
from pipeplan.planners.exact.places import Placed
from pipeplan.planners.exact.planner import NAME, decided, shapes_of
from pipeplan.planners.exact.search import ExactSearch, Solution, slowest, solution
from pipeplan.planners.problem import CutGraph, PlanningProblem, unobserved
from pipeplan.planners.reasons import unpriced
from pipeplan.planners.spaces import EverySplit, Splits

MOST_SHAPES = 400
"""Upper bound on the shapes that are split, the highest bounds first."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedShape:
    """A shape on one placement, split on demand."""

    search: ExactSearch
    shape: StageShape
    placed: Placed
    most: float

    @property
    def schedule(self) -> str:
        """The name of its schedule."""
        return self.shape.schedule

    def split(self) -> tuple[int, ...] | None:
        """The stops of the closed form's best split; None if none fits."""
        found = solution(self.search.questions(self.shape), self.placed)
        return None if found is None else found.stops

    def most_of(self, stops: tuple[int, ...]) -> float:
        """The shape's bound: the plan's own bound counts the compute of its stages."""
        return self.most

    def most_of_any(self) -> float:
        """The same."""
        return self.most

    def splits_above(self, rate: float, split: tuple[int, ...]) -> Splits:
        """All splits, where the shape's bound is above the rate."""
        return EverySplit(split, self.most_of, rate)

    def plan(self, stops: tuple[int, ...]) -> Plan | None:
        """Its plan with these stages, not played; None where they do not fit, or a cut is not allowed."""
        questions = self.search.questions(self.shape)
        step_s = slowest([questions.table(questions.shared(kind)) for kind in self.placed.kinds], stops)
        if step_s == inf:
            return None
        found = Solution(shape=self.shape, placed=self.placed, stops=stops, step_s=step_s)
        return decided(self.search, found)

    def alternative(self, reason: str) -> Alternative:
        """Its entry among a plan's alternatives, without a price."""
        return unpriced(self.shape, reason, recompute=bool(self.search.problem.options.recompute))


@dataclass(frozen=True, kw_only=True, eq=False)
class PlayedShapes:
    """The space of a problem that the planner has answered."""

    problem: PlanningProblem
    planner: str = NAME

    @property
    def graph(self) -> CutGraph | None:
        """The graph that the chain represents, if there is one."""
        return self.problem.graph

    @property
    def considered(self) -> int:
        """The shapes on their placements."""
        return len(self._placed)

    @property
    def beyond(self) -> float:
        """Upper bound on the other shapes' samples a second."""
        return max((most for most, _ in self._bounded[1]), default=0.0)

    def configurations(self, needed: Callable[[], float] | None = None) -> Iterator[PlayedShape]:
        """Those with the highest bounds."""
        return iter(self._placed)

    @cached_property
    def _search(self) -> ExactSearch:
        return ExactSearch(problem=self.problem, shapes=shapes_of(self.problem), limit=inf, observe=unobserved)

    @cached_property
    def _bounded(self) -> tuple[list[tuple[float, StageShape]], list[tuple[float, StageShape]]]:
        """The shapes with their bounds: those that are played, and the others."""
        bounded = []
        for shape in self._search.shapes:
            step_s = self._search.least_step_s(shape)
            bounded.append((shape.samples / step_s * (1 + _ROUNDING) if step_s > 0 else inf, shape))
        equal = [(most, shape) for most, shape in bounded if shape.width is not None]
        equal.sort(key=lambda each: -each[0])
        return equal[:MOST_SHAPES], [*equal[MOST_SHAPES:], *(each for each in bounded if each[1].width is None)]

    @cached_property
    def _placed(self) -> list[PlayedShape]:
        return [
            PlayedShape(search=self._search, shape=shape, placed=placed, most=most)
            for most, shape in self._bounded[0]
            for placed in self._search.first_places(self._search.questions(shape))
        ]
