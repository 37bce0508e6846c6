"""Caching: entity tags, and what lies ready. Documents are stored by content, so that an id is a strong entity tag."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import Request, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeplan.errors import PipeplanError
from pipeplan.protocol.plans import is_plan_id as is_content_id
from pipeplan.protocol.problems import headers_of, problem_of
from pipeplan.protocol.tokens import Identity
from pipeplan.protocol.tokens import Scope as TokenScope
from planner_service.platform.context import Context
from planner_service.platform.problems import problem_response
from planner_service.platform.requests import KEY
from planner_service.platform.stored import Noun

IMMUTABLE = "private, max-age=31536000, immutable"
"""Of what is named by its content's hash."""

REVALIDATE = "private, no-cache"
"""Of what may change under its name: to be asked for each time, with the tag of what is there."""

JSON = "application/json"
READERS = 4

UNCHANGED: dict[int | str, dict[str, Any]] = {304: {"description": "It is what the caller has (If-None-Match)"}}
"""What routes that answer with entity tags add to their description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLane:
    """A route of immutable documents: which, where, for whom, and what reads one that does not lie ready."""

    noun: Noun
    path: str
    scopes: tuple[TokenScope, ...]
    load: Callable[[Context, str], str]


def document_response(
    request: Request,
    identity: str,
    load: Callable[[], str | bytes],
    *,
    cache_control: str = IMMUTABLE,
    media_type: str = JSON,
) -> Response:
    """The content under the tag of its identity; 304 and no content for whoever has it."""
    tag = f'"{identity}"'
    headers = {"ETag": tag, "Cache-Control": cache_control}
    if _matches(request.headers.get("if-none-match"), tag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(load(), media_type=media_type, headers=headers)


def derived_tag(identity: str, *parameters: object) -> str:
    """The identity of what this version makes of a document."""
    return ".".join((identity, *map(str, parameters), _version()))


def stored(services: Context, noun: Noun, identity: str, load: Callable[[Context, str], str]) -> bytes:
    """A document's bytes, from where it lies ready or as it is read, which puts it there. Raises NotFoundError."""
    ready = services.documents.get(noun, identity)
    if ready is None:
        ready = load(services, identity).encode()
        services.documents.put(noun, identity, ready)
    return ready


Answer = Callable[[Context], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLane:
    """A route of a list: where, for whom, and what answers its query; None for a query that the route has to judge."""

    path: str
    scopes: tuple[TokenScope, ...]
    answer: Callable[[bytes], Answer | None]


class Express:
    """Answers for documents and lists before any route is looked for: that takes longer than the answer.

    Stands behind everything that checks callers, and asks for the scopes that the route asks for. All else, queries
    that cannot be read among it, is the routes'. Lists are read in a few threads: never more than there are connections
    to a database, and not so many that they wait for one another. What a database gives at once is read right here:
    to hand it over to a thread and back takes longer than to read it.
    """

    def __init__(
        self, app: ASGIApp, context: Context, lanes: Sequence[DocumentLane], lists: Sequence[ListLane]
    ) -> None:
        self._app = app
        self._context = context
        self._documents = context.documents
        self._lanes: Mapping[str, DocumentLane] = {lane.noun: lane for lane in lanes}
        self._lists: Mapping[str, ListLane] = {lane.path: lane for lane in lists}
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reader")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers or passes on."""
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
        elif scope["path"] in self._lists:
            await self._list(self._lists[scope["path"]], scope, receive, send)
        else:
            await self._document(scope, receive, send)

    async def _document(self, scope: Scope, receive: Receive, send: Send) -> None:
        lane, identity = self._asked_for(scope["path"])
        if lane is None or scope["query_string"] or not _may(scope, lane.scopes) or not is_content_id(identity):
            await self._app(scope, receive, send)
            return
        scope["route"] = lane
        content = self._documents.get(lane.noun, identity)
        if content is None:
            read = partial(stored, self._context, lane.noun, identity, lane.load)
            content = await self._read(read, scope, receive, send)
        if content is not None:
            await _answer(scope, send, identity, content)

    async def _list(self, lane: ListLane, scope: Scope, receive: Receive, send: Send) -> None:
        answer = lane.answer(scope["query_string"]) if _may(scope, lane.scopes) else None
        if answer is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = lane
        content = await self._read(partial(answer, self._context), scope, receive, send)
        if content is None:
            return
        headers = [(b"content-type", JSON.encode()), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _read(self, read: Callable[[], bytes], scope: Scope, receive: Receive, send: Send) -> bytes | None:
        """What the database gives; None where the caller has been told why there is nothing."""
        try:
            if self._context.database.reads_at_once:
                return read()
            return await asyncio.get_running_loop().run_in_executor(self._readers, read)
        except PipeplanError as error:
            response = problem_response(problem_of(error))
            response.headers.update(headers_of(error))
            await response(scope, receive, send)
            return None

    def _asked_for(self, path: str) -> tuple[DocumentLane | None, str]:
        parts = path.split("/")
        if len(parts) != 4 or parts[1] != "v1":
            return None, ""
        return self._lanes.get(parts[2]), parts[3]


class Head:
    """Answers HEAD as the GET would be, without its content."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Asks for the content and leaves it away; who streams it is told that nobody listens."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        started = False

        async def headers_only(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                await send(message)
                await send({"type": "http.response.body"})

        async def nothing_more() -> Message:
            return {"type": "http.disconnect"} if started else await receive()

        inner = {**scope, "method": "GET"}
        await self._app(inner, nothing_more, headers_only)
        scope["route"] = inner.get("route")


def _may(scope: Scope, scopes: tuple[TokenScope, ...]) -> bool:
    caller: Identity | None = scope.get(KEY)
    return caller is not None and not caller.scopes.isdisjoint(scopes)


async def _answer(scope: Scope, send: Send, identity: str, content: bytes) -> None:
    tag = f'"{identity}"'
    headers = [(b"etag", tag.encode()), (b"cache-control", IMMUTABLE.encode())]
    if _matches(Headers(scope=scope).get("if-none-match"), tag):
        await send({"type": "http.response.start", "status": 304, "headers": headers})
        await send({"type": "http.response.body"})
        return
    headers += [(b"content-type", JSON.encode()), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _matches(if_none_match: str | None, tag: str) -> bool:
    """Whether the caller has what the tag is of: the comparison is the weak one, as RFC 9110 has it for reading."""
    if if_none_match is None:
        return False
    tags = (one.strip().removeprefix("W/") for one in if_none_match.split(","))
    return any(one in (tag, "*") for one in tags)


@cache
def _version() -> str:
    return version("pipeplan")
