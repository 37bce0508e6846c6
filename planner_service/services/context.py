"""Context: what every service needs, made once by whoever wires the application."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

from planner_service.core.errors import NotFoundError
from planner_service.core.plan import Answer
from planner_service.core.planner.problem import Problem
from planner_service.metrics import Metrics
from planner_service.storage.database import Database

T = TypeVar("T")

Solve = Callable[[str, Problem], Answer]
"""A planner's name and a problem in, the answer out."""


def utc_now() -> datetime:
    """The present moment."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The database, the planners, the clock, the rules of leases, what is counted, and the key given for tokens."""

    database: Database
    solve: Solve
    now: Callable[[], datetime] = field(default=utc_now)
    lease_s: float = 30.0
    max_attempts: int = 3
    metrics: Metrics = field(default_factory=Metrics)
    token_key: str | None = field(default=None, repr=False)


def found(what: str, identity: str, content: T | None) -> T:
    """The content. Raises NotFoundError where there is none."""
    if content is None:
        raise NotFoundError(f"there is no {what} {identity}")
    return content
