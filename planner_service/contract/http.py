"""HTTP: the connection that all clients of the service share. Problem details come back as the errors they tell of."""

import ipaddress
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import httpx
from pydantic import ValidationError

from planner_service.contract.problems import Problem, error_of
from planner_service.core.errors import InvalidInputError, PipeplanError, ServiceError

DEFAULT_URL = "http://127.0.0.1:8437"
TIMEOUT_S = 60.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0

Parameters = Mapping[str, str | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Real time, or a test's."""

    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(slots=True)
class Connection:
    """A service by its URL. Raises what the service's problem details tell of, ServiceError if it is out of reach."""

    url: str
    token: str | None = None
    transport: httpx.BaseTransport | None = None
    clock: Clock = field(default_factory=Clock)
    _client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self._client = httpx.Client(
            base_url=_checked(self.url),
            headers=headers,
            timeout=TIMEOUT_S,
            transport=self.transport,
            trust_env=not is_loopback(httpx.URL(self.url).host),
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
        """The answer to a JSON body. With patience, what the service could not take yet is sent again until then."""
        content = {"Content-Type": "application/json"} if body is not None else {}
        request = self._client.build_request("POST", path, content=body, headers={**content, **(headers or {})})
        return self._send(request, patience_s=patience_s).content

    def close(self) -> None:
        """Ends the connection."""
        self._client.close()

    def _send(self, request: httpx.Request, *, patience_s: float = 0.0) -> httpx.Response:
        deadline_s = self.clock.now_s() + patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            answer = self._attempt(request)
            if isinstance(answer, httpx.Response) and answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                return _checked_answer(answer)
            if self.clock.now_s() + pause_s > deadline_s:
                raise self._unavailable(answer)
            self.clock.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _attempt(self, request: httpx.Request) -> httpx.Response | httpx.TransportError:
        try:
            return self._client.send(request)
        except httpx.TransportError as error:
            return error

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


def _checked(url: str) -> httpx.URL:
    rule = "must be a URL such as " + DEFAULT_URL
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidInputError("url", rule, url) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidInputError("url", rule, url)
    return parsed


def _checked_answer(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    raise _error_in(response)


def _error_in(response: httpx.Response) -> PipeplanError:
    try:
        return error_of(Problem.model_validate_json(response.content))
    except ValidationError:
        where = f"{response.request.method} {response.request.url}"
        return ServiceError(f"{where} answered {response.status_code} {response.reason_phrase}")
