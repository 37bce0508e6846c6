"""Caching: entity tags, and a shortcut to documents and lists.

Documents are stored under their content's id, which is therefore a strong entity tag. A play of a stored plan changes
the plan's tag. `document_response` answers with a tag. `Express` answers for documents and lists without a route, and
`Head` answers HEAD as GET.
"""

import asyncio
import gzip
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeplan.errors import PipeplanError
from pipeplan.protocol.plans import is_plan_id as is_content_id
from pipeplan.protocol.tokens import Scope as TokenScope
from planner_service.platform.context import Context
from planner_service.platform.problems import send_error
from planner_service.platform.requests import may
from planner_service.platform.stored import Noun, may_change, tag_of

IMMUTABLE = "private, max-age=31536000, immutable"
"""The Cache-Control of content that is addressed by its hash."""

REVALIDATE = "private, no-cache"
"""The Cache-Control of content that may change at its address: the caller asks each time, with the tag that it has."""

JSON = "application/json"
GZIP = r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))"
"""The Accept-Encoding of a caller that takes gzip."""

READERS = 4
VERSION = version("pipeplan")

UNCHANGED: dict[int | str, dict[str, Any]] = {304: {"description": "The caller has it already (If-None-Match)"}}
"""The OpenAPI description of routes that answer with entity tags."""

Answer = Callable[[Context], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLane:
    """A route of documents: their noun, its path and scopes, and the function that reads one not in the cache."""

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
    """The content with its identity as the entity tag; 304 without content for a caller that has it."""
    tag = f'"{identity}"'
    headers = {"ETag": tag, "Cache-Control": cache_control}
    if _matches(request.headers.get("if-none-match"), tag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(load(), media_type=media_type, headers=headers)


def packed_response(request: Request, load: Callable[[], bytes], identity: str, *parameters: object) -> Response:
    """JSON that is kept compressed by gzip, under a derived tag; unpacked for a caller that does not take gzip."""
    packs = re.search(GZIP, request.headers.get("accept-encoding", "")) is not None
    tag = derived_tag(identity, *parameters, *(("gzip",) if packs else ()))
    unpacked = load if packs else lambda: gzip.decompress(load())
    response = document_response(request, tag, unpacked, cache_control=REVALIDATE)
    response.headers["Vary"] = "Accept-Encoding"
    if packs and response.status_code == HTTPStatus.OK:
        response.headers["Content-Encoding"] = "gzip"
    return response


def derived_tag(identity: str, *parameters: object) -> str:
    """The tag of a representation that this release derives from a document."""
    return ".".join((identity, *(quote(str(each), safe="") for each in parameters), VERSION))


def stored(services: Context, noun: Noun, identity: str, load: Callable[[Context, str], str]) -> bytes:
    """A document's bytes, from the cache or from the database into the cache. Raises NotFoundError."""
    ready = services.documents.get(noun, identity)
    if ready is None:
        ready = load(services, identity).encode()
        services.documents.put(noun, identity, ready)
    return ready


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLane:
    """A route of a list: its path and scopes, and the function that answers its query; None for a query that the route
    must answer.
    """

    path: str
    scopes: tuple[TokenScope, ...]
    answer: Callable[[bytes], Answer | None]


class Express:
    """Answers for documents and lists without looking up a route, which would take longer than the answer.

    It runs after all checks of callers, and requires the route's scopes. All other requests continue to the routes,
    including malformed queries. A few threads read: at most as many as the database has connections, and few enough not
    to wait for each other. If the database can answer without waiting, this thread reads: passing the work to another
    thread and back takes longer than reading.
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
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
        elif scope["path"] in self._lists:
            await self._list(self._lists[scope["path"]], scope, receive, send)
        else:
            await self._document(scope, receive, send)

    async def _document(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers for /v1/NOUN/ID; any other request goes to the routes."""
        parts = scope["path"].split("/")
        lane = self._lanes.get(parts[2]) if len(parts) == 4 and parts[1] == "v1" else None
        identity = parts[-1]
        if lane is None or scope["query_string"] or not may(scope, lane.scopes) or not is_content_id(identity):
            await self._app(scope, receive, send)
            return
        scope["route"] = lane
        content = self._documents.get(lane.noun, identity)
        if content is None:
            read = partial(stored, self._context, lane.noun, identity, lane.load)
            content = await self._read(read, scope, receive, send)
        if content is None:
            return

        tag = f'"{tag_of(lane.noun, identity, content)}"'
        control = REVALIDATE if may_change(lane.noun, content) else IMMUTABLE
        headers = [(b"etag", tag.encode()), (b"cache-control", control.encode())]
        if _matches(Headers(scope=scope).get("if-none-match"), tag):
            await send({"type": "http.response.start", "status": 304, "headers": headers})
            await send({"type": "http.response.body"})
            return
        headers += [(b"content-type", JSON.encode()), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _list(self, lane: ListLane, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the list's query, or leaves it to the route."""
        answer = lane.answer(scope["query_string"]) if may(scope, lane.scopes) else None
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
        """The database's answer; None if it failed and the problem has been sent."""
        try:
            if self._context.database.reads_at_once:
                return read()
            return await asyncio.get_running_loop().run_in_executor(self._readers, read)
        except PipeplanError as error:
            await send_error(error, scope, receive, send)
            return None


class Head:
    """Answers HEAD as the GET would be, without its content."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Requests the content and drops it. A stream gets a disconnect once its headers are sent."""
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


def _matches(if_none_match: str | None, tag: str) -> bool:
    """Whether the caller has the tagged content, by the weak comparison of RFC 9110, section 13.1.2."""
    if if_none_match is None:
        return False
    tags = (one.strip().removeprefix("W/") for one in if_none_match.split(","))
    return any(one in (tag, "*") for one in tags)
