"""What a solver's process is asked, and what it answers."""

from dataclasses import dataclass

from planner_service.core.plan import Answer
from planner_service.core.planner.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a planner is asked."""

    planner: str
    problem: Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The planner's answer, and how many seconds it took for it."""

    answer: Answer
    solve_time_s: float
