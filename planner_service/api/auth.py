"""Auth: who calls, and what every route asks of its caller. A route that asks for nothing does not start."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Request, Response
from fastapi.routing import RouteContext, iter_route_contexts
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from pipeplan.errors import ForbiddenError, PipeplanError, UnauthorizedError
from planner_service.api.identities import Identities
from planner_service.api.limits import Rates, address_of
from planner_service.api.problems import API_PREFIX, problem_response
from planner_service.contract.problems import headers_of, problem_of
from planner_service.contract.tokens import LOCAL, NOBODY, Identity, Scope

KEY = "pipeplan.caller"
"""Where a request's caller stands in its ASGI scope."""

COOKIE = "pipeplan_session"
PUBLIC_PATHS = frozenset({"/healthz", "/login"})
PUBLIC_FOLDER = "/static/"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

LoginPage = Callable[[Request, str, str | None], Response]
"""How one logs in, where it leads to, and what was wrong with the last try."""


class Demand:
    """Passes callers with one of the scopes. Raises ForbiddenError for the others."""

    def __init__(self, *scopes: Scope) -> None:
        self.scopes = frozenset(scopes)

    async def __call__(self, request: Request) -> None:
        """Passes or raises."""
        identity = await caller(request)
        if not self.scopes & identity.scopes:
            wanted = " or ".join(sorted(self.scopes))
            raise ForbiddenError(f"the token {identity.name!r} does not have the scope {wanted}, which this asks for")


def scope(*scopes: Scope) -> Any:
    """The dependency that lets callers with one of the scopes in."""
    return Depends(Demand(*scopes))


async def caller(request: Request) -> Identity:
    """Who calls."""
    identity: Identity = request.scope[KEY]
    return identity


Caller = Annotated[Identity, Depends(caller)]


def demands_of(route: RouteContext) -> list[frozenset[Scope]]:
    """What a route asks of its callers: a scope out of each set."""
    dependant = getattr(route, "dependant", None)
    calls = [] if dependant is None else [dependency.call for dependency in dependant.dependencies]
    return [call.scopes for call in calls if isinstance(call, Demand)]


def is_public(path: str) -> bool:
    """Whether a path is answered to anybody: that the process lives, how to log in, and the pages' style."""
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_FOLDER)


def require_scopes(app: FastAPI) -> None:
    """Raises PipeplanError where a route, or what is mounted, could be reached without any scope."""
    for route in iter_route_contexts(app.routes):
        path = route.path or ""
        if not demands_of(route) and not is_public(path) and path + "/" != PUBLIC_FOLDER:
            raise PipeplanError(f"the route {path or route.original_route!r} does not say which scope it asks for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Who is let in: whether a token is demanded, and how often who may ask and fail."""

    identities: Identities
    demanded: bool
    requests: Rates | None
    failures: Rates
    login_page: LoginPage

    async def identify(self, request: AsgiScope) -> Identity:
        """Who sends the request. Raises UnauthorizedError, ForbiddenError and TooManyRequestsError."""
        if is_public(request["path"]):
            return NOBODY
        headers = Headers(scope=request)
        given = headers.getlist("authorization")
        if given:
            identity = await self.of_token(request, _bearer(given))
        else:
            identity = await self._of_cookie(request, headers) or self._without(request)
        if self.requests is not None:
            self._count(self.requests, identity.token_id or address_of(request))
        return identity

    async def of_token(self, request: AsgiScope, text: str) -> Identity:
        """Whose token it is. An address that failed often has to wait before it may name one that is new here."""
        identity = await self.identities.of_token(text, may_look=lambda: self._require_patience(request))
        if identity is None:
            self._require_patience(request)
            self.failures.take(address_of(request))
            raise UnauthorizedError("the token is not valid: unknown, expired or revoked")
        return identity

    async def _of_cookie(self, request: AsgiScope, headers: Headers) -> Identity | None:
        text = session_text(headers)
        if text is None:
            return None
        identity = await self.identities.of_session(text, may_look=lambda: self._require_patience(request))
        if identity is None and self.demanded:
            self.failures.take(address_of(request))
        if identity is not None and request["method"] not in SAFE_METHODS and not from_own_page(headers):
            raise ForbiddenError("what changes something must be sent from a page of this service, or with a token")
        return identity

    def _without(self, request: AsgiScope) -> Identity:
        if not self.demanded:
            return LOCAL
        raise UnauthorizedError("a token is needed: send it as `Authorization: Bearer ...`, or log in at /login")

    def _require_patience(self, request: AsgiScope) -> None:
        self.failures.require(address_of(request), "too many tokens from this address were not valid")

    def _count(self, rates: Rates, who: str) -> None:
        rates.require(who, "too many requests")
        rates.take(who)


class Door:
    """Lets nobody in who is not known, whichever path is asked for; only then the routes look at scopes."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Passes on with the caller in the scope, or answers."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._pass(scope, receive, send)

    async def _pass(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        scope[KEY] = NOBODY
        try:
            scope[KEY] = await self._admission.identify(scope)
        except PipeplanError as error:
            await self._refusal(Request(scope), error)(scope, receive, send)
            return
        await self._app(scope, receive, send)
        await self._admission.identities.note_use(scope[KEY])

    def _refusal(self, request: Request, error: PipeplanError) -> Callable[..., Awaitable[None]]:
        wants_page = "text/html" in request.headers.get("accept", "") and not request.url.path.startswith(API_PREFIX)
        if wants_page and isinstance(error, UnauthorizedError):
            response = self._admission.login_page(request, _way_back(request), None)
            response.status_code = HTTPStatus.UNAUTHORIZED
        else:
            response = problem_response(problem_of(error))
        response.headers.update(headers_of(error))
        over = isinstance(error, UnauthorizedError) and "authorization" not in request.headers
        if over and session_text(request.headers) is not None:
            response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return response


def session_text(headers: Headers) -> str | None:
    """The session's cookie. It is never quoted, and the framework takes quadratic time to unquote what others set."""
    pairs = (part.partition("=") for part in headers.get("cookie", "").split(";"))
    return next((value.strip() for name, _, value in pairs if name.strip() == COOKIE), None)


def from_own_page(headers: Headers) -> bool:
    """Whether a browser says that a page of this service sends the request. Other sites' pages cannot say so."""
    origin = headers.get("origin")
    return origin is not None and same_origin(origin, headers.get("host", ""))


def same_origin(origin: str, host: str) -> bool:
    """Whether an Origin is this service under the name that it was asked by."""
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def _way_back(request: Request) -> str:
    query = f"?{request.url.query}" if request.url.query else ""
    return request.url.path + query if request.method in SAFE_METHODS else "/"


def _bearer(given: Iterable[str]) -> str:
    values = list(given)
    kind, _, text = values[0].strip().partition(" ")
    if len(values) > 1 or kind.lower() != "bearer":
        raise UnauthorizedError("the Authorization header must be one, of the form `Bearer TOKEN`")
    return text.strip()
