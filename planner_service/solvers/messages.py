"""What a solver's process and whoever asks it say to each other, pickled, through its standard input and output."""

from dataclasses import dataclass

from planner_service.core.errors import PipeplanError
from planner_service.core.plan import Answer
from planner_service.core.planner.problem import Problem
from planner_service.solvers.progress import Progress


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


@dataclass(frozen=True, slots=True)
class Refused:
    """The planner raised this."""

    error: PipeplanError


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The memory that the process may have was not enough."""


Message = Progress | Answered | Refused | Exhausted
"""What comes back: any number of Progress, then one of the others."""
