"""The errors that pipeplan raises.

    PipeplanError
    ├── InvalidInputError (also ValueError)   a value that breaks a rule: names field, rule and value
    ├── TooLargeError                         what was sent has more bytes, or takes more to read, than allowed
    ├── ScheduleError                         a program that must not run: `check` found a fault
    ├── NotFoundError                         no such profile, cluster, plan, job or run
    ├── ConflictError                         the state does not allow it
    │   ├── PreconditionFailedError           it has changed since the caller read it
    │   ├── LeaseLostError                    the job belongs to another agent by now
    │   └── InFlightError                     the same request is still in progress: says when to retry
    ├── UnauthorizedError                     no token, or one that is not valid
    ├── ForbiddenError                        the token does not have the scope
    ├── TooManyRequestsError                  the caller asks too often: says when to retry
    ├── MissingDependencyError                an extra is not installed
    ├── ServiceError                          the service cannot be reached, or answered with a failure
    │   └── UnavailableError                  it cannot do it now: says when to retry
    ├── SolverError                           a solver's process ended without an answer
    ├── DeadlineError                         a planner did not answer in time
    ├── EndedBySignalError                    a signal has ended the work, as it should
    └── RunFailedError                        an execution ended early: names the rank and its last instruction

"No feasible plan" is an answer (`plan.Infeasible`), not an error.
"""

import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

LARGEST_COUNT = 2**63 - 1
"""What a database and an array hold."""

LARGEST_AMOUNT = 1e24
"""More seconds or bytes than there are: their sums, products and squares stay finite."""

LEAST_AMOUNT = 1 / LARGEST_AMOUNT
"""What is divided by is not less."""


class PipeplanError(Exception):
    """The root: its text is one clear sentence for the user."""

    _outside: str | None = None

    @property
    def outside(self) -> str:
        """The text for callers of a service: not that of its operators, which may name what is theirs alone."""
        return self._outside or str(self)


class InvalidInputError(PipeplanError, ValueError):
    """A value breaks a rule. `field` is a dotted path, `rule` what must hold, `value` what was given."""

    def __init__(self, field: str, rule: str, value: object) -> None:
        self.field = field
        self.rule = rule
        self.value = value
        super().__init__(f"{field}: {rule}, got {shown(value)}")

    def __reduce__(self) -> tuple[type["InvalidInputError"], tuple[str, str, object]]:
        """How it crosses to another process."""
        return InvalidInputError, (self.field, self.rule, self.value)


class TooLargeError(PipeplanError):
    """What is sent has more bytes than the service takes, or needs more time or memory to be read."""


class ScheduleError(PipeplanError):
    """A program breaks a law of its schedule, or cannot make progress."""


class NotFoundError(PipeplanError):
    """Nothing is stored under this id."""


class ConflictError(PipeplanError):
    """The request is well-formed, but the present state does not allow it."""


class PreconditionFailedError(ConflictError):
    """What the request says must hold (If-Match, If-None-Match) does not."""


class LeaseLostError(ConflictError):
    """The lease on a job has passed to somebody else; what its former owner reports is not taken."""


class UnauthorizedError(PipeplanError):
    """The request names no caller, or one that is not known. It never says which part of a token was wrong."""


class ForbiddenError(PipeplanError):
    """The caller is known, but may not do this."""


class TooManyRequestsError(PipeplanError):
    """The caller asks more often than the service allows; it may come back after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class InFlightError(ConflictError):
    """A request under the same Idempotency-Key is in progress; `retry_after_s` says when to repeat it."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class MissingDependencyError(PipeplanError):
    """A command needs an extra that is not installed; the message says how to install it."""


class ServiceError(PipeplanError):
    """The service cannot be reached, or it failed. `outside` replaces a text that names what is its operators' alone,
    such as the database's address.
    """

    def __init__(self, message: str, *, outside: str | None = None) -> None:
        self._outside = outside
        super().__init__(message)


class UnavailableError(ServiceError):
    """The service lacks what it needs just now, its database above all; asking again in `retry_after_s` may do."""

    def __init__(self, message: str, retry_after_s: float = 1.0, *, outside: str | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message, outside=outside)


class SolverError(PipeplanError):
    """A solver's process ended without an answer: it crashed, or needed more memory than it may have."""


class DeadlineError(PipeplanError):
    """A planner did not answer within the time that a request may take."""


class EndedBySignalError(PipeplanError):
    """A signal has ended the work early. `signal` is its number."""

    def __init__(self, message: str, signal: int = 15) -> None:
        self.signal = signal
        super().__init__(message)


class RunFailedError(PipeplanError):
    """A run ended before its last step. `rank` is the culprit, None where it is not known."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)


def require(condition: bool, field: str, rule: str, value: object) -> None:
    """Raises InvalidInputError unless the condition holds."""
    if not condition:
        raise InvalidInputError(field, rule, value)


def require_count(field: str, value: int, *, at_least: int = 1) -> None:
    """Raises InvalidInputError unless the value is a whole number of at least `at_least`, and one that 64 bits hold."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= at_least, field, f"must be a whole number of at least {at_least}", value)
    require(value <= LARGEST_COUNT, field, f"must be at most {LARGEST_COUNT}", value)


def require_amount(field: str, value: float, *, positive: bool = False) -> None:
    """Raises InvalidInputError unless the value is finite and not negative (`positive`: above zero), and a quantity."""
    if type(value) in (int, float) and (LEAST_AMOUNT if positive else 0) <= value <= LARGEST_AMOUNT:
        return  # nearly always, and plans are full of amounts
    number = isinstance(value, int | float) and not isinstance(value, bool) and value < math.inf
    rule = "must be a finite number above 0" if positive else "must be a finite number of at least 0"
    require(number and (value > 0 if positive else value >= 0), field, rule, value)
    require(value <= LARGEST_AMOUNT, field, f"must be at most {LARGEST_AMOUNT:g}", value)
    if positive:
        require(value >= LEAST_AMOUNT, field, f"must be at least {LEAST_AMOUNT:g}", value)


def require_unique(field: str, rule: str, values: Sequence[object]) -> None:
    """Raises InvalidInputError naming the first value that stands twice."""
    seen: set[object] = set()
    for value in values:
        require(value not in seen, field, rule, value)
        seen.add(value)


def shown(value: object) -> str:
    """A value as messages quote it: on one line, and of a long one its beginning and its end."""
    try:
        text = repr(value)
    except ValueError:  # Python writes out no whole number of more than some thousand digits
        return "a number of too many digits"
    return text if len(text) <= 80 else text[:40] + "..." + text[-37:]


def require_one_of(names: Iterable[str], field: str, value: object) -> None:
    """Raises InvalidInputError unless the value is one of the names."""
    known = tuple(names)
    if value not in known:
        raise not_one_of(known, field, value)


def not_one_of(names: Iterable[str], field: str, value: object, beside: str = "") -> InvalidInputError:
    """The refusal of a value that is none of the names: it lists them, and those that are near.

    `beside` says in words what else the field may hold.
    """
    known = tuple(names)
    near = ", ".join(get_close_matches(str(value), known))
    rule = f"must be one of {', '.join(known)}{beside}"
    return InvalidInputError(field, f"{rule} (near: {near})" if near else rule, value)
