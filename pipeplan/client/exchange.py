"""Exchange: the clients' requests as data, and the reading of the answers, without any I/O.

An operation is a generator: it yields a `Send` or a `Pause`, is resumed with the outcome, and returns its result. A
connection performs these steps, blocking or awaiting (`client.connection`): both have the same operations.

What may be sent again, while the patience lasts: whatever has no second effect (GET, PUT, POST under an
Idempotency-Key) after an answer that asks to come back (429, 503, a request in flight), after a broken connection, and
after a proxy's answer that it got none (502, 504); DELETE, and what depends on an entity tag, only where it surely was
not done; a POST without a key never.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from pipeplan.documents.files import parse
from pipeplan.errors import InFlightError, PipeplanError, ServiceError, TooManyRequestsError, UnavailableError
from pipeplan.protocol.problems import Problem, error_of

DEFAULT_URL = "http://127.0.0.1:8437"


def service_url() -> str:
    """The service that the environment names: `PIPEPLAN_URL`, else one on this machine."""
    return os.environ.get("PIPEPLAN_URL") or DEFAULT_URL


FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
NOT_NOW = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)
"""Answers that ask the client to retry."""

NO_ANSWER = (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT)
"""What a proxy answers if the service gives it no answer. The service may have done the request."""

CACHE_BYTES = 32 * 2**20
"""The most bytes of answers with an entity tag that a client keeps."""

T = TypeVar("T")

Parameters = Mapping[str, str | int | float | bool | list[str] | None]

Again = Literal["always", "unless taken", "never"]
"""When a request may be sent again: also if the service may have done it, only if it certainly has not, or never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """One request."""

    method: str
    path: str
    parameters: Mapping[str, str | int | float | bool | list[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A pause of `duration_s` seconds."""

    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A service's answer, after `took_s` seconds; the names of its headers are in lower case."""

    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes
    url: str
    took_s: float = 0.0

    def answers(self, send: Send) -> bool:
        """Whether it is a success. The service never answers with a page: a page comes from a proxy."""
        if self.status == HTTPStatus.NOT_MODIFIED:
            return "If-None-Match" in send.headers
        return self.status < 300 and not self.headers.get("content-type", "").lower().startswith("text/html")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreached:
    """No answer came, for this cause. `taken`: the request may have reached the service. `passing`: a retry may
    succeed, unlike with a certificate that is not trusted.
    """

    cause: Exception
    taken: bool
    took_s: float = 0.0
    passing: bool = True


Outcome = Received | Unreached

Steps = Generator[Send | Pause, Any, T]
"""An operation; it returns a T. A `Send` is resumed with its Outcome, a `Pause` with None."""


class AnswerCache:
    """The last answers with an entity tag, by path and parameters. A repeated request sends the tag, and the service
    does not send the body again.
    """

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._answers: OrderedDict[str, Received] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: str) -> Received | None:
        """The answer to this request, if it is kept."""
        with self._lock:
            found = self._answers.get(key)
            if found is not None:
                self._answers.move_to_end(key)
            return found

    def keep(self, key: str, answer: Received) -> None:
        """Keeps an answer; the least recently used ones make room for it.

        An answer that does not say how long it is may have been cut off: its tag would keep it for ever.
        """
        framed = not answer.headers.keys().isdisjoint(("content-length", "transfer-encoding"))
        with self._lock:
            before = self._answers.pop(key, None)
            self._held_bytes -= len(before.content) if before is not None else 0
            if "etag" not in answer.headers or not framed or len(answer.content) > self._most_bytes:
                return
            self._answers[key] = answer
            self._held_bytes += len(answer.content)
            while self._held_bytes > self._most_bytes:
                _, dropped = self._answers.popitem(last=False)
                self._held_bytes -= len(dropped.content)


@dataclass(slots=True)
class ServiceExchange:
    """Requests to the service at `url`. Each raises the error in the service's problem details, ServiceError if it is
    out of reach for longer than `patience_s`.
    """

    url: str
    patience_s: float = 0.0
    cache: AnswerCache = field(default_factory=AnswerCache)

    def get(self, path: str, parameters: Parameters | None = None) -> Steps[bytes]:
        """The body of a resource, from memory if the service reports that it has not changed."""
        given = {key: value for key, value in (parameters or {}).items() if value is not None}
        send = Send(method="GET", path=path, parameters=given)
        key = f"{path}?{sorted(given.items())}"
        held = self.cache.find(key)
        if held is not None:
            send = replace(send, headers={"If-None-Match": held.headers["etag"]})
        answer = yield from self._answer(send, again="always")
        if held is not None and answer.status == HTTPStatus.NOT_MODIFIED:
            return held.content
        self.cache.keep(key, answer)
        return answer.content

    def post(
        self,
        path: str,
        body: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
        patience_s: float | None = None,
    ) -> Steps[bytes]:
        """The answer to a JSON body. It is sent again only under an idempotency key, or with a patience of its own: the
        caller then knows that the service accepts this body only once.
        """
        content = {"Content-Type": "application/json"} if body is not None else {}
        keyed = {"Idempotency-Key": key} if key is not None else {}
        send = Send(method="POST", path=path, body=body, headers={**content, **keyed, **(headers or {})})
        again: Again = "never" if key is None and patience_s is None else "always"
        return (yield from self._answer(send, again=again, patience_s=patience_s)).content

    def put(self, path: str, body: str, *, headers: Mapping[str, str] | None = None) -> Steps[bytes]:
        """The answer to a JSON body that is stored under the path."""
        send = Send(method="PUT", path=path, body=body, headers={"Content-Type": "application/json", **(headers or {})})
        return (yield from self._answer(send, again="unless taken" if headers else "always")).content

    def delete(self, path: str, *, headers: Mapping[str, str] | None = None) -> Steps[None]:
        yield from self._answer(Send(method="DELETE", path=path, headers=headers or {}), again="unless taken")

    def error_of(self, outcome: Outcome) -> PipeplanError:
        """The error of an outcome without success."""
        if isinstance(outcome, Received):
            return _error_in(outcome)
        cause = str(outcome.cause) or type(outcome.cause).__name__
        advice = "is `pipeplan serve` running?"
        if not outcome.passing:
            advice = "does the URL begin with the right scheme? SSL_CERT_FILE names the authorities that are trusted"
        error = ServiceError(f"the service at {self.url} cannot be reached ({cause}); {advice}")
        error.__cause__ = outcome.cause
        return error

    def _answer(self, send: Send, *, again: Again, patience_s: float | None = None) -> Steps[Received]:
        left_s = self.patience_s if patience_s is None else patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            outcome: Outcome = yield send
            if isinstance(outcome, Received) and outcome.answers(send):
                return outcome
            error = self.error_of(outcome)
            if isinstance(outcome, Received):
                comes_back = outcome.status in NOT_NOW or isinstance(error, InFlightError)
                lost = outcome.status in NO_ANSWER and type(error) is ServiceError  # not one of the service's problems
                may_again = (comes_back and again != "never") or (lost and again == "always")
            else:
                may_again = again == "always" or (again == "unless taken" and not outcome.taken)
                may_again = may_again and outcome.passing
            wait_s = max(pause_s, _retry_after_s(outcome))
            left_s -= outcome.took_s + wait_s
            if not may_again or left_s < 0:
                raise error
            yield Pause(duration_s=wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


@contextmanager
def promised(what: str) -> Iterator[None]:
    """Raises ServiceError if the block finds that an answer is not what the service promises."""
    try:
        yield
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # InvalidInputError is a ValueError
        advice = "does another program, or another version of it, answer at this address?"
        cause = " ".join(str(error).split())
        raise ServiceError(f"the service's answer is no {what} ({cause}); {advice}") from error


def answered(kind: type[T], content: bytes) -> T:
    """The document of an answer. Raises ServiceError if it is something else."""
    with promised(kind.__name__):
        return parse(kind, content)


def _retry_after_s(outcome: Outcome) -> float:
    """How long the service asks to wait; 0 if it does not say so in seconds."""
    text = outcome.headers.get("retry-after", "") if isinstance(outcome, Received) else ""
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _error_in(answer: Received) -> PipeplanError:
    try:
        error = error_of(Problem.model_validate_json(answer.content))
    except ValidationError:
        kind = answer.headers.get("content-type", "").partition(";")[0]
        what = f" ({kind}, which pipeplan does not send: is a proxy in between?)" if kind == "text/html" else ""
        return ServiceError(f"{answer.url} answered {answer.status} {answer.reason}{what}")
    if isinstance(error, TooManyRequestsError | UnavailableError | InFlightError):
        error.retry_after_s = _retry_after_s(answer) or error.retry_after_s
    return error
