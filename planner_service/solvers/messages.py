"""What a solver's process is asked, and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.documents.plan import Answer
from pipeplan.planners.problem import PlanningProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a planner is asked. `pose` makes the problem where the planner is: to read its documents takes a while."""

    planner: str
    pose: Callable[[], PlanningProblem]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The planner's answer, and how many seconds it took for it."""

    answer: Answer
    solve_time_s: float
