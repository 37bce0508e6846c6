"""Auth: the caller of a request, and the scope that every route requires.

`Door` runs before the routes. `Admission` identifies a request's caller for it, by `Identities`, which looks up the
request's token or session and caches the answer for KNOWN_FOR_S. `scope` declares a route's scope; the service does not
start with a route without one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Request, Response
from fastapi.routing import RouteContext, iter_route_contexts
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from pipeplan.errors import ForbiddenError, PipeplanError, ServiceError, UnauthorizedError, UnavailableError
from pipeplan.protocol.problems import headers_of, problem_of
from pipeplan.protocol.tokens import (
    LOCAL,
    NOBODY,
    SESSION_PREFIX,
    TOKEN_PREFIX,
    Credential,
    Identity,
    Scope,
    parse_credential,
)
from planner_service.access import service
from planner_service.access.service import KnownToken, TokenKey, token_key
from planner_service.platform.base_path import base_of
from planner_service.platform.context import Context
from planner_service.platform.middleware import Rates, caller_address
from planner_service.platform.problems import API_PREFIX, problem_response
from planner_service.platform.requests import KEY
from planner_service.platform.trail import ATTEMPT
from planner_service.platform.writers import in_writer

KNOWN_FOR_S = 2.0
"""How long a process caches a token: one that another process revokes stays valid here for this time."""

HONOURED_S = 300.0
"""How long a process accepts a token that it has read while the database does not answer."""

MAX_KNOWN = 10_000
RETRY_AFTER_S = 2.0
COOKIE = "pipeplan_session"
PUBLIC_PATHS = frozenset({"/healthz", "/login"})
PUBLIC_FOLDER = "/static/"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
LOG = logging.getLogger("pipeplan.auth")

LoginPage = Callable[[Request, str, str | None], Response]
"""Makes the login page: for a request, the login's target, and the error of the last try."""


LookUp = Callable[[Context, TokenKey, str], KnownToken | None]
"""Looks up a token or a session by its id."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A cached credential, and the time of its look-up."""

    known: KnownToken
    at: datetime


class Identities:
    """Finds the owner of a token or a session. It caches only valid ones: guesses fill no memory.

    Requests that bring the same credential at the same time share one query.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._key: TokenKey | None = None
        self._read: dict[str, _Read] = {}
        self._under_way: dict[str, asyncio.Task[KnownToken | None]] = {}
        self._noted: dict[str, datetime] = {}

    async def of_token(self, text: str, *, may_look: Callable[[], None]) -> Identity | None:
        """The token's owner; None unless the token is valid.

        `may_look` may raise before an unknown token is queried.
        """
        return await self._of(parse_credential(TOKEN_PREFIX, text), service.known, may_look)

    async def of_session(self, text: str, *, may_look: Callable[[], None]) -> Identity | None:
        """The session's owner; None unless the session is valid."""
        return await self._of(parse_credential(SESSION_PREFIX, text), service.known_by_session, may_look)

    async def open_session(self, identity: Identity) -> Credential:
        return await in_writer(service.open_session, self._context, await self._token_key(), identity)

    async def end_session(self, text: str) -> None:
        """Ends the session with this text, if there is one: in this process at once, in others within KNOWN_FOR_S."""
        credential = parse_credential(SESSION_PREFIX, text)
        if credential is not None and await self.of_session(text, may_look=lambda: None) is not None:
            await in_writer(service.end_session, self._context, credential.id)
        self.forget()

    def forget(self) -> None:
        self._read.clear()

    async def note_use(self, identity: Identity) -> None:
        """Records that the token was used, at most once a minute. A failure is logged, and the request continues."""
        now = self._context.now()
        if identity.token_id is None or _within(self._noted.get(identity.token_id), now, service.USE_NOTED_S):
            return
        self._noted[identity.token_id] = now
        try:
            await in_writer(service.note_use, self._context, identity.token_id)
        except PipeplanError as error:
            LOG.warning("the last use of a token could not be noted: %s", error)

    async def _of(
        self, credential: Credential | None, look_up: LookUp, may_look: Callable[[], None]
    ) -> Identity | None:
        if credential is None:
            return None
        try:
            return await self._found(credential, look_up, may_look)
        except ServiceError as error:  # the caller is unknown: it learns nothing, not even where tokens are looked up
            LOG.warning("no token can be looked up: %s", error)
            raise UnavailableError("the service cannot look up tokens now; ask again", RETRY_AFTER_S) from error

    async def _found(self, credential: Credential, look_up: LookUp, may_look: Callable[[], None]) -> Identity | None:
        key = await self._token_key()
        read = self._read.get(credential.id)
        if read is not None and _within(read.at, self._context.now(), KNOWN_FOR_S):
            known: KnownToken | None = read.known
        else:
            if read is None:
                may_look()
            task = self._under_way.get(credential.id)
            if task is None:
                task = asyncio.create_task(self._look(credential.id, key, look_up))
                self._under_way[credential.id] = task
                task.add_done_callback(lambda _: self._under_way.pop(credential.id, None))
            try:
                known = await asyncio.shield(task)
            except ServiceError:
                if read is None or not _within(read.at, self._context.now(), HONOURED_S):
                    raise
                known = read.known

        if known is None or not key.proves(credential.secret, known.secret_hash):
            return None
        if known.expires_at is not None and known.expires_at <= self._context.now():
            return None
        return known.identity

    async def _look(self, identity: str, key: TokenKey, look_up: LookUp) -> KnownToken | None:
        """Queries the database, and keeps the credential if it is valid."""
        at = self._context.now()
        known = await asyncio.to_thread(look_up, self._context, key, identity)
        self._read.pop(identity, None)
        if known is not None:
            if len(self._read) >= MAX_KNOWN:
                self._read.clear()
            self._read[identity] = _Read(known, at)
        return known

    async def _token_key(self) -> TokenKey:
        if self._key is None:
            self._key = await asyncio.to_thread(token_key, self._context)
        return self._key


def _within(moment: datetime | None, now: datetime, duration_s: float) -> bool:
    return moment is not None and timedelta(0) <= now - moment < timedelta(seconds=duration_s)


class Demand:
    """Lets callers with one of the scopes pass. Raises ForbiddenError for all others."""

    def __init__(self, *scopes: Scope) -> None:
        self.scopes = frozenset(scopes)

    async def __call__(self, request: Request) -> None:
        identity = await caller(request)
        if not self.scopes & identity.scopes:
            wanted = " or ".join(sorted(self.scopes))
            raise ForbiddenError(f"the token {identity.name!r} does not have the scope {wanted}, which this asks for")


def scope(*scopes: Scope) -> Any:
    """The dependency that lets callers with one of the scopes pass."""
    return Depends(Demand(*scopes))


async def caller(request: Request) -> Identity:
    """Who calls."""
    identity: Identity = request.scope[KEY]
    return identity


Caller = Annotated[Identity, Depends(caller)]


def demands_of(route: RouteContext) -> list[frozenset[Scope]]:
    """The scopes that a route demands: one of each set."""
    dependant = getattr(route, "dependant", None)
    calls = [] if dependant is None else [dependency.call for dependency in dependant.dependencies]
    return [call.scopes for call in calls if isinstance(call, Demand)]


def is_public(path: str) -> bool:
    """Whether a path is answered to anybody: the health check, the login page, the pages' style and script."""
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_FOLDER)


def require_scopes(app: FastAPI) -> None:
    """Raises PipeplanError if a route, or a mounted application, can be reached without any scope."""
    for route in iter_route_contexts(app.routes):
        path = route.path or ""
        if not demands_of(route) and not is_public(path) and path + "/" != PUBLIC_FOLDER:
            raise PipeplanError(f"the route {path or route.original_route!r} does not declare its scope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Decides who is let in: whether a token is demanded, how often a caller may ask and an address fail."""

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
            kind, _, text = given[0].strip().partition(" ")
            if len(given) > 1 or kind.lower() != "bearer":
                raise UnauthorizedError("the Authorization header must be one, of the form `Bearer TOKEN`")
            identity = await self.of_token(request, text.strip())
        else:
            holder = await self._of_cookie(request, headers)
            if holder is None and self.demanded:
                raise UnauthorizedError(
                    "a token is needed: send it as `Authorization: Bearer ...`, or log in at /login"
                )
            identity = holder or LOCAL

        if self.requests is not None:
            who = identity.token_id or caller_address(request)
            self.requests.require(who, "too many requests")
            self.requests.take(who)
        return identity

    async def of_token(self, request: AsgiScope, text: str) -> Identity:
        """The token's owner. An address that failed often must wait before it may send a token that is unknown here."""
        identity = await self.identities.of_token(text, may_look=lambda: self._require_patience(request))
        if identity is None:
            self._require_patience(request)
            self.failures.take(caller_address(request))
            raise UnauthorizedError("the token is not valid: unknown, expired or revoked")
        return identity

    async def _of_cookie(self, request: AsgiScope, headers: Headers) -> Identity | None:
        """The owner of the cookie's session; None without a valid one. It may change things only from our own pages."""
        text = session_text(headers)
        if text is None:
            return None
        identity = await self.identities.of_session(text, may_look=lambda: self._require_patience(request))
        if identity is None and self.demanded:
            self.failures.take(caller_address(request))
        if identity is not None and request["method"] not in SAFE_METHODS and not from_own_page(headers):
            raise ForbiddenError(
                "a request that changes something must come from a page of this service, or with a token"
            )
        return identity

    async def still_admits(self, request: AsgiScope) -> bool:
        """Whether the request would be admitted again, with its token or session; does not count as a use.

        While the database is unreachable, an admitted request stays admitted.
        """
        headers = Headers(scope=request)
        given, session = headers.get("authorization"), session_text(headers)
        try:
            if given is not None:
                text = given.strip().partition(" ")[2].strip()
                return await self.identities.of_token(text, may_look=lambda: None) is not None
            if session is not None and self.demanded:
                return await self.identities.of_session(session, may_look=lambda: None) is not None
        except UnavailableError:
            pass
        return True

    def _require_patience(self, request: AsgiScope) -> None:
        self.failures.require(caller_address(request), "too many tokens from this address were not valid")


def acts_as(identity: Identity) -> None:
    """Records whose attempt the request is, for the audit log."""
    attempt = ATTEMPT.get()
    if attempt is not None:
        attempt.actor, attempt.token_id = identity.name, identity.token_id


class Door:
    """Admits only known callers, on every path. The routes then check scopes."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        scope[KEY] = NOBODY
        try:
            scope[KEY] = await self._admission.identify(scope)
            acts_as(scope[KEY])
        except PipeplanError as error:
            await self._refusal(Request(scope), error)(scope, receive, send)
            return
        await self._app(scope, receive, send)
        await self._admission.identities.note_use(scope[KEY])

    def _refusal(self, request: Request, error: PipeplanError) -> Callable[..., Awaitable[None]]:
        """The login page for an unknown person, and a problem for any other caller."""
        wants_page = "text/html" in request.headers.get("accept", "") and not request.url.path.startswith(API_PREFIX)
        if wants_page and isinstance(error, UnauthorizedError):
            query = f"?{request.url.query}" if request.url.query else ""
            way_back = request.url.path + query if request.method in SAFE_METHODS else "/"
            response = self._admission.login_page(request, way_back, None)
            response.status_code = HTTPStatus.UNAUTHORIZED
        else:
            response = problem_response(problem_of(error))
        response.headers.update(headers_of(error))
        # A browser whose session has ended deletes its cookie.
        over = isinstance(error, UnauthorizedError) and "authorization" not in request.headers
        if over and session_text(request.headers) is not None:
            response.delete_cookie(COOKIE, path=cookie_path(request), httponly=True, samesite="strict")
        return response


def cookie_path(request: Request) -> str:
    """Where the session's cookie goes: to this service, and to no other of the same host."""
    return base_of(request.scope) + "/"


def session_text(headers: Headers) -> str | None:
    """The session's cookie.

    It is read here, not by the framework, which takes quadratic time to unquote other sites' cookies. Ours is never
    quoted.
    """
    pairs = (part.partition("=") for part in headers.get("cookie", "").split(";"))
    return next((value.strip() for name, _, value in pairs if name.strip() == COOKIE), None)


def from_own_page(headers: Headers) -> bool:
    """Whether the browser reports that a page of this service sent the request.

    Other sites' pages cannot forge this.
    """
    origin = headers.get("origin")
    return origin is not None and same_origin(origin, headers.get("host", ""))


def same_origin(origin: str, host: str) -> bool:
    """Whether an Origin is this service, by the request's host name."""
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False
