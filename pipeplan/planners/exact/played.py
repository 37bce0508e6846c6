"""Played: the plans that the exact planner plays: every shape's best split on every placement that it knows.

A shape's evenly spread compute is a lower bound on its step, which bounds its plays. PipeDream's shapes are not played
one by one; the closed form's optimum stands for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf

from pipeplan.documents.plan import Alternative, Plan
from pipeplan.planners.exact.answers import NAME, plan_of
from pipeplan.planners.exact.budget import BUDGET
from pipeplan.planners.exact.places import Placed
from pipeplan.planners.exact.planner import DEFAULT_TIME_LIMIT_S, shapes_of
from pipeplan.planners.exact.search import ExactSearch, Solution
from pipeplan.planners.exact.tables import StageShape
from pipeplan.planners.problem import CutGraph, PlanningProblem, unobserved
from pipeplan.planners.reasons import unpriced
from pipeplan.planners.spaces import EverySplit, Splits

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
        found = self.search.split(self.shape, self.placed)
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
        step_s = self.search.slowest_s(self.shape, self.placed, stops)
        if step_s == inf:
            return None
        return plan_of(self.search, Solution(shape=self.shape, placed=self.placed, stops=stops, step_s=step_s))

    def alternative(self, reason: str) -> Alternative:
        """Its entry among a plan's alternatives, without a price."""
        return unpriced(self.shape, reason, recompute=bool(self.search.problem.options.recompute))


@dataclass(frozen=True, kw_only=True, eq=False)
class PlayedShapes:
    """The space of a problem that the planner has answered: equally wide shapes, those with the highest bounds."""

    problem: PlanningProblem
    planner: str = NAME

    @property
    def graph(self) -> CutGraph | None:
        """The graph that the chain represents, if there is one."""
        return self.problem.graph

    @property
    def considered(self) -> int:
        """The shapes on their placements."""
        return len(self._configurations[0])

    @property
    def beyond(self) -> float:
        """Upper bound on the samples a second of other shapes and placements."""
        return self._configurations[1]

    def configurations(self) -> Iterator[PlayedShape]:
        """Those with the highest bounds."""
        return iter(self._configurations[0])

    @cached_property
    def _configurations(self) -> tuple[list[PlayedShape], float]:
        """Those that are played, and the upper bound on all others."""
        shapes, limit = shapes_of(self.problem), self.problem.options.time_limit_s or DEFAULT_TIME_LIMIT_S
        search = ExactSearch(problem=self.problem, shapes=shapes, limit=limit, observe=unobserved)
        bounded = []
        for shape in shapes:
            step_s = search.least_step_s(shape)
            bounded.append((shape.samples / step_s * (1 + _ROUNDING) if step_s > 0 else inf, shape))
        bounded.sort(key=lambda each: -each[0])
        played, beyond = list[PlayedShape](), 0.0
        for most, shape in bounded:
            is_played = shape.width is not None and len(played) < BUDGET.played_shapes
            placements, are_all = search.placements(shape) if is_played else ([], False)
            played += [PlayedShape(search=search, shape=shape, placed=placed, most=most) for placed in placements]
            beyond = beyond if are_all else max(beyond, most)
        return played, beyond
