"""Bodies: read whole but never beyond the limit, parsed by the documents' own rules in a worker thread."""

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, TypeVar

from fastapi import Depends, HTTPException, Query, Request, Response

from planner_service.contract.documents import parse
from planner_service.core.errors import require
from planner_service.services.context import Context
from planner_service.storage.listing import Cut

T = TypeVar("T")

_NULL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
"""The escape itself, and not a backslash that happens to stand before such a text."""


async def context(request: Request) -> Context:
    """What the services need."""
    made: Context = request.app.state.context
    return made


async def body(request: Request) -> bytes:
    """The request's body. Raises 413 beyond the limit, before or while it is read, and 415 unless it is JSON.

    Asking for JSON by name keeps other sites' pages out: a browser sends it across sites only after asking first.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be sent as application/json")
    limit_bytes: int = request.app.state.max_body_bytes
    too_large = HTTPException(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body must have at most {limit_bytes} bytes (PIPEPLAN_MAX_BODY_BYTES)"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise too_large
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > limit_bytes:
            raise too_large
    has_null = rb"\u0000" in content and _NULL.search(content) is not None
    require(not has_null, "document", "must not hold the null character, which a database cannot keep", r"\u0000")
    return bytes(content)


async def cut(limit: Annotated[int, Query(ge=1, le=200)] = 50, cursor: str | None = None) -> Cut:
    """Which page of a listing is asked for."""
    return Cut(limit=limit, cursor=cursor)


Services = Annotated[Context, Depends(context)]
Body = Annotated[bytes, Depends(body)]
Page = Annotated[Cut, Depends(cut)]
Batches = Annotated[int, Query(ge=1, le=1000, description="how many batches to play, from the first on")]


def document(kind: type[T]) -> Callable[[bytes], T]:
    """The dependency that gives a route the body as a document of this kind."""

    def parsed(content: Body) -> T:
        return parse(kind, content)

    return parsed


def raw_json(text: str) -> Response:
    """A stored document, sent as it is."""
    return Response(text, media_type="application/json")


def mark_created(response: Response, new: bool, location: str) -> None:
    """201 and where it is, or 200 for what was there before."""
    response.status_code = HTTPStatus.CREATED if new else HTTPStatus.OK
    response.headers["Location"] = location
