"""Problem details (RFC 9457): every error of ours as a document, and back. Errors get their statuses only here."""

import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pipeplan.documents.names import on_one_line
from pipeplan.errors import (
    ConflictError,
    DeadlineError,
    EndedBySignalError,
    ForbiddenError,
    InFlightError,
    InvalidInputError,
    LeaseLostError,
    MissingDependencyError,
    NotFoundError,
    PipeplanError,
    PreconditionFailedError,
    RunFailedError,
    ScheduleError,
    ServiceError,
    SolverError,
    TooLargeError,
    TooManyRequestsError,
    UnauthorizedError,
    UnavailableError,
)

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:pipeplan:problem:"

SHOWN_CHARACTERS = 200
"""The most characters of a refused value that are sent back."""


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """How one error appears in a document."""

    slug: str
    status: HTTPStatus
    title: str


KINDS: dict[type[PipeplanError], ProblemKind] = {
    InvalidInputError: ProblemKind("invalid-input", HTTPStatus.UNPROCESSABLE_ENTITY, "The input breaks a rule"),
    TooLargeError: ProblemKind("too-large", HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "It is too large"),
    NotFoundError: ProblemKind("not-found", HTTPStatus.NOT_FOUND, "There is no such thing"),
    ConflictError: ProblemKind("conflict", HTTPStatus.CONFLICT, "The present state does not allow it"),
    PreconditionFailedError: ProblemKind("precondition-failed", HTTPStatus.PRECONDITION_FAILED, "It has changed"),
    LeaseLostError: ProblemKind("lease-lost", HTTPStatus.CONFLICT, "The lease is no longer held"),
    InFlightError: ProblemKind("in-flight", HTTPStatus.CONFLICT, "The same request is being worked on"),
    UnauthorizedError: ProblemKind("unauthorized", HTTPStatus.UNAUTHORIZED, "A valid token is needed"),
    ForbiddenError: ProblemKind("forbidden", HTTPStatus.FORBIDDEN, "The token does not allow it"),
    TooManyRequestsError: ProblemKind("too-many-requests", HTTPStatus.TOO_MANY_REQUESTS, "Asked too often"),
    ServiceError: ProblemKind("service-failure", HTTPStatus.SERVICE_UNAVAILABLE, "The service cannot do it"),
    UnavailableError: ProblemKind("unavailable", HTTPStatus.SERVICE_UNAVAILABLE, "The service cannot do it now"),
    MissingDependencyError: ProblemKind("missing-dependency", HTTPStatus.NOT_IMPLEMENTED, "An extra is not installed"),
    SolverError: ProblemKind("solver", HTTPStatus.INTERNAL_SERVER_ERROR, "The solver ended without an answer"),
    DeadlineError: ProblemKind("deadline", HTTPStatus.GATEWAY_TIMEOUT, "The planner takes longer than a request may"),
    ScheduleError: ProblemKind("schedule", HTTPStatus.INTERNAL_SERVER_ERROR, "The schedule cannot be played"),
    EndedBySignalError: ProblemKind("ended-by-signal", HTTPStatus.INTERNAL_SERVER_ERROR, "A signal has ended the work"),
    RunFailedError: ProblemKind("run-failed", HTTPStatus.INTERNAL_SERVER_ERROR, "The run failed"),
    PipeplanError: ProblemKind("failure", HTTPStatus.INTERNAL_SERVER_ERROR, "The service failed"),
}


class BrokenRule(BaseModel):
    """One finding in the input."""

    field: str = Field(description="dotted path of the field", examples=["blocks.0.weight_bytes"])
    rule: str = Field(description="what must hold")
    value: Any = Field(default=None, description="what was given")


class Problem(BaseModel):
    """Problem details. `errors` names field, rule and value where input is wrong."""

    model_config = ConfigDict(extra="ignore")

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: tuple[BrokenRule, ...] = ()
    request_id: str | None = Field(default=None, description="the request's X-Request-ID, as the log has it")


def problem_of(error: PipeplanError) -> Problem:
    """The error as a document."""
    kind = KINDS[type(error)]
    errors: tuple[BrokenRule, ...] = ()
    if isinstance(error, InvalidInputError):
        errors = (BrokenRule(field=error.field, rule=error.rule, value=shown(error.value)),)
    return Problem(type=TYPE_PREFIX + kind.slug, title=kind.title, status=kind.status, detail=str(error), errors=errors)


def headers_of(error: PipeplanError) -> dict[str, str]:
    """The headers of an answer besides the document: how to authenticate, or after how many seconds to retry."""
    if isinstance(error, UnauthorizedError):
        return {"WWW-Authenticate": 'Bearer realm="pipeplan"'}
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    return {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}


def error_of(problem: Problem) -> PipeplanError:
    """The error in the document, in printable words; a ServiceError if it is none of ours."""
    for error, kind in KINDS.items():
        if problem.type != TYPE_PREFIX + kind.slug:
            continue
        if error is InvalidInputError and problem.errors:
            first = problem.errors[0]
            return InvalidInputError(on_one_line(first.field), on_one_line(first.rule), first.value)
        if error not in (InvalidInputError, PipeplanError):
            return error(on_one_line(problem.detail))
    return ServiceError(f"the service answered {problem.status}: {on_one_line(problem.detail)}")


def shown(value: object) -> object:
    """The value, in JSON and short: a refused document is not sent back whole."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    value = value.decode(errors="replace") if isinstance(value, bytes) else value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
