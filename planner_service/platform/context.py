"""Context: the common objects of all services; `app` makes it once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from pipeplan.documents.plan import Answer
from pipeplan.errors import NotFoundError
from pipeplan.planners.problem import PlanningProblem
from planner_service.platform.database import Database
from planner_service.platform.metrics import Metrics
from planner_service.platform.parsing import Parsing
from planner_service.platform.stored import DocumentCache

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)

STOOD_STILL = 0.25
"""A loop that was silent for this share of a lease's length stood still: owners may have failed to renew."""

CLOCK_STEP_S = 1.0
"""By how much the clock may deviate between two checks before it counts as changed."""

T = TypeVar("T")

Solve = Callable[[str, PlanningProblem], Answer]
"""Takes a planner's name and a problem, and returns the answer."""


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class Absence:
    """Until when leases do not expire, because the service was away and their owners could not renew them.

    `back` is called when the service starts, when its database answers again or did so late, and when `notice` finds
    that the process stood still or its clock was changed. The owners then have a lease's length to return before their
    jobs are given to others. `set_back`: the clock was set back, and the database still holds moments that lie ahead of
    it.
    """

    until: datetime = LONG_AGO
    set_back: bool = False
    _seen: tuple[float, datetime] | None = None

    def back(self, now: datetime, lease_s: float) -> None:
        self.until = max(self.until, now + timedelta(seconds=lease_s))

    def lasts(self, now: datetime) -> bool:
        """Whether owners and agents may still be reconnecting."""
        return now < self.until

    def waited(self, now: datetime, waited_s: float, lease_s: float) -> None:
        """Checks whether a request waited for the database for a part of a lease: renewals may have done so, too."""
        if self._seen is not None and waited_s > lease_s * STOOD_STILL:
            self.back(now, lease_s)

    def beat(self, now: datetime, monotonic_s: float, lease_s: float) -> None:
        """Records that the event loop runs. Its watchdog calls this some 20 times in a lease's length."""
        self.notice(now, monotonic_s, lease_s)
        self._seen = monotonic_s, now

    def notice(self, now: datetime, monotonic_s: float, lease_s: float) -> None:
        """Checks whether the loop has been silent for a part of a lease, or the clock has been changed since.

        Code that expires leases calls this first: a process that resumes after it stood still may reach that code
        before its watchdog runs. Without a watchdog there is nothing to notice.
        """
        if self._seen is None:
            return
        silent_s = monotonic_s - self._seen[0]
        set_by_s = (now - self._seen[1]).total_seconds() - silent_s
        if set_by_s < -CLOCK_STEP_S:  # a grace from before would last until the clock reaches that time again
            self.until = now
            self.set_back = True
        if silent_s > lease_s * STOOD_STILL or abs(set_by_s) > CLOCK_STEP_S:
            self.back(now, lease_s)
            self._seen = monotonic_s, now


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The common objects of services.

    `longest_search_s` is how long a plan's job may search. `documents` caches documents as they are sent. `token_key`
    is the operator's key for tokens.
    """

    database: Database
    solve: Solve
    now: Callable[[], datetime] = field(default=utc_now)
    lease_s: float = 30.0
    max_attempts: int = 3
    absence: Absence = field(default_factory=Absence)
    metrics: Metrics = field(default_factory=Metrics)
    longest_search_s: float = 3600.0
    documents: DocumentCache = field(default_factory=DocumentCache)
    parsing: Parsing = field(default_factory=Parsing)
    token_key: str | None = field(default=None, repr=False)


def found(what: str, identity: str, content: T | None) -> T:
    """The content. Raises NotFoundError where there is none."""
    if content is None:
        raise NotFoundError(f"there is no {what} {identity}")
    return content
