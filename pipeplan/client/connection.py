"""Connection: the HTTP that all clients of the service share. Problem details are raised as the errors they carry."""

import ipaddress
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from pydantic import ValidationError

from pipeplan.errors import (
    InvalidInputError,
    PipeplanError,
    ServiceError,
    TooManyRequestsError,
    UnavailableError,
    require,
)
from pipeplan.protocol.problems import Problem, error_of

DEFAULT_URL = "http://127.0.0.1:8437"
TIMEOUT_S = 60.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
NOT_NOW = (httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.TOO_MANY_REQUESTS)
"""Answers that ask to come back."""

LOG = logging.getLogger("pipeplan")

Parameters = Mapping[str, str | int | float | list[str] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryClock:
    """Real time, or a test's."""

    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(slots=True)
class Connection:
    """A service by its URL. Raises the error in the service's problem details, ServiceError if it is out of reach."""

    url: str
    token: str | None = field(default=None, repr=False)
    transport: httpx.BaseTransport | None = None
    clock: RetryClock = field(default_factory=RetryClock)
    _client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        rule = "must be a URL such as " + DEFAULT_URL
        try:
            base_url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise InvalidInputError("url", rule, self.url) from error
        require(base_url.scheme in ("http", "https") and bool(base_url.host), "url", rule, self.url)

        headers = {}
        if self.token:
            # A token that no header can hold is not shown in the error: it is a secret all the same.
            plain = self.token.isascii() and self.token.isprintable() and " " not in self.token
            require(plain, "token", "must be a token as `pipeplan token create` shows it", "a text that is none")
            headers["Authorization"] = f"Bearer {self.token}"
            if base_url.scheme == "http" and not is_loopback(base_url.host):
                LOG.warning("the token goes to %s unencrypted: who listens on the way has it; use https", base_url.host)

        self._client = httpx.Client(
            base_url=base_url,
            headers=headers,
            timeout=TIMEOUT_S,
            transport=self.transport,
            trust_env=not is_loopback(base_url.host),
        )

    def get(self, path: str, parameters: Parameters | None = None) -> bytes:
        """The body of what is there."""
        given = {key: value for key, value in (parameters or {}).items() if value is not None}
        return self._send(self._client.build_request("GET", path, params=given)).content

    def post(
        self,
        path: str,
        body: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        patience_s: float = 0.0,
    ) -> bytes:
        """The answer to a JSON body. What the service cannot take yet is sent again until the patience is over."""
        content = {"Content-Type": "application/json"} if body is not None else {}
        request = self._client.build_request("POST", path, content=body, headers={**content, **(headers or {})})
        return self._send(request, patience_s=patience_s).content

    def put(self, path: str, body: str, *, headers: Mapping[str, str] | None = None) -> bytes:
        """The answer to a JSON body that is to stand under the path."""
        content = {"Content-Type": "application/json", **(headers or {})}
        return self._send(self._client.build_request("PUT", path, content=body, headers=content)).content

    def delete(self, path: str, *, headers: Mapping[str, str] | None = None) -> None:
        """Takes away what is there."""
        self._send(self._client.build_request("DELETE", path, headers=headers))

    @contextmanager
    def lines(self, path: str, headers: Mapping[str, str], *, silence_s: float) -> Iterator[Iterator[str]]:
        """The lines of an answer as they come. Raises ServiceError if nothing comes for so long, or it breaks off."""
        timeout = httpx.Timeout(TIMEOUT_S, read=silence_s)
        try:
            with self._client.stream("GET", path, headers=headers, timeout=timeout) as answer:
                if not answer.is_success:
                    answer.read()
                yield _checked_answer(answer).iter_lines()
        except httpx.TransportError as error:
            raise self._unavailable(error) from error

    def close(self) -> None:
        """Ends the connection."""
        self._client.close()

    def _send(self, request: httpx.Request, *, patience_s: float = 0.0) -> httpx.Response:
        deadline_s = self.clock.now_s() + patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            answer: httpx.Response | httpx.TransportError
            try:
                answer = self._client.send(request)
            except httpx.TransportError as error:
                answer = error
            if isinstance(answer, httpx.Response) and answer.status_code not in NOT_NOW:
                return _checked_answer(answer)
            wait_s = max(pause_s, _retry_after_s(answer))
            if self.clock.now_s() + wait_s > deadline_s:
                raise self._unavailable(answer)
            self.clock.sleep(wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _unavailable(self, answer: httpx.Response | httpx.TransportError) -> PipeplanError:
        if isinstance(answer, httpx.Response):
            return _error_in(answer)
        cause = str(answer) or type(answer).__name__
        error = ServiceError(f"the service at {self.url} cannot be reached ({cause}); is `pipeplan serve` running?")
        error.__cause__ = answer
        return error


def is_loopback(host: str) -> bool:
    """Whether a name or an address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _retry_after_s(answer: httpx.Response | httpx.TransportError) -> float:
    """How long the service asks to wait; 0 where it does not say so in seconds."""
    text = answer.headers.get("Retry-After", "") if isinstance(answer, httpx.Response) else ""
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _checked_answer(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    raise _error_in(response)


def _error_in(response: httpx.Response) -> PipeplanError:
    try:
        error = error_of(Problem.model_validate_json(response.content))
    except ValidationError:
        where = f"{response.request.method} {response.request.url}"
        return ServiceError(f"{where} answered {response.status_code} {response.reason_phrase}")
    if isinstance(error, TooManyRequestsError | UnavailableError):
        error.retry_after_s = _retry_after_s(response) or error.retry_after_s
    return error
