"""Requests: how routes read bodies and query parameters, and how they answer with documents and pages.

Every route that reads a body declares its maximum size. The service reads no further than that, and parses nothing on
the event loop. A query parameter that the route does not have is refused, not ignored.
"""

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, TypeVar, get_origin
from urllib.parse import parse_qs, parse_qsl

from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from pydantic import BaseModel, ValidationError
from starlette.types import Scope as AsgiScope

from pipeplan.documents.files import parse_sent
from pipeplan.errors import InvalidInputError, PipeplanError, TooLargeError, require
from pipeplan.protocol.listing import Page
from pipeplan.protocol.tokens import Identity, Scope
from planner_service.platform.context import Context
from planner_service.platform.listing import Cut

KEY = "pipeplan.caller"
"""The key of a request's caller in its ASGI scope."""

GENERAL_LIMIT = None
"""The limit of profiles and of jobs' results, whose size depends on the model: PIPEPLAN_MAX_BODY_BYTES."""

SMALL = 64 * 1024
"""The limit of requests of a few fields."""

MEBIBYTE = 2**20
"""The limit of clusters of many groups, and of agents that allow many factories."""

CALIBRATED = 4 * 2**20
"""The limit of requests that may hold a calibration: four factors a block."""

MAX_FORM_BYTES = 8 * 1024
MAX_FORM_FIELDS = 64
FORM = "application/x-www-form-urlencoded"

T = TypeVar("T")
Q = TypeVar("Q", bound=BaseModel)

_SIZE = "pipeplan.size"
"""The key of the route's `BodySize` in a request's ASGI scope."""

_Parameters = dict[str, bool]
"""A route's query parameters, and whether each may come several times."""

_KNOWN: dict[Any, _Parameters] = {}
"""The parameters of the routes requested so far, by their endpoints."""


def may(scope: AsgiScope, scopes: tuple[Scope, ...]) -> bool:
    """Whether the request's caller has one of these scopes, for code outside of routes."""
    caller: Identity | None = scope.get(KEY)
    return caller is not None and not caller.scopes.isdisjoint(scopes)


async def context(request: Request) -> Context:
    return _context(request)


class BodySize:
    """Declares the upper bound on the bytes of the route's bodies; the general limit applies as well."""

    def __init__(self, most_bytes: int | None) -> None:
        self.most_bytes = most_bytes

    async def __call__(self, request: Request) -> None:
        request.scope[_SIZE] = self


def takes(most_bytes: int | None) -> Any:
    """The dependency that declares the size; None is the general limit, PIPEPLAN_MAX_BODY_BYTES."""
    return Depends(BodySize(most_bytes))


async def body(request: Request) -> bytes:
    """The request's body. Raises TooLargeError beyond the limit, before or while it is read, and 415 unless it is JSON.

    Demanding JSON's media type keeps other sites' pages out: a browser sends it across sites only after a preflight
    request, which the service refuses.
    """
    return await _received(request, "application/json", "the body")


async def form(request: Request) -> dict[str, str]:
    """A form's fields, the first of each name."""
    content = await _received(request, FORM, "the form")
    try:
        fields = parse_qs(content.decode(), max_num_fields=MAX_FORM_FIELDS)
    except ValueError as error:
        raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, "the form cannot be read") from error
    given = {name: values[0] for name, values in fields.items()}
    for name, value in given.items():
        require("\0" not in name + value, name, "must not hold a null character", value)
    return given


async def _received(request: Request, kind: str, what: str) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"{what} must be sent as {kind}")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"{what} must be sent uncompressed")
    size: BodySize = request.scope[_SIZE]
    limit_bytes = limit_of(request.app, size)
    source = "this address's limit" if limit_bytes == size.most_bytes else "PIPEPLAN_MAX_BODY_BYTES"
    too_large = TooLargeError(f"{what} must have at most {limit_bytes} bytes ({source})")

    # A body that is too large is refused before it is received. A request need not declare its size.
    declared = request.headers.get("content-length", "")
    declared_bytes = int(declared[:20]) if declared.isascii() and declared.isdigit() else 0
    if declared_bytes > limit_bytes:
        raise too_large
    _context(request).parsing.require_room(declared_bytes)

    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > limit_bytes:
            raise too_large
    return bytes(content)


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


async def cut(limit: Annotated[int, Query(ge=1, le=200)] = 50, cursor: str | None = None) -> Cut:
    return Cut(limit=limit, cursor=cursor)


Services = Annotated[Context, Depends(context)]
Body = Annotated[bytes, Depends(body)]
Form = Annotated[dict[str, str], Depends(form)]
CutOf = Annotated[Cut, Depends(cut)]
Batches = Annotated[int, Query(ge=1, le=1000, description="how many batches to play, from the first on")]


def sent(read: Callable[[bytes], T]) -> Callable[..., Awaitable[T]]:
    """The dependency that gives a route the result of `read` on the body; other processes must be able to import it."""

    async def parsed(request: Request, content: Body) -> T:
        return await _context(request).parsing.read(read, content)

    return parsed


def document(kind: type[T]) -> Callable[..., Awaitable[T]]:
    return sent(partial(parse_sent, kind))


def require_sizes(app: FastAPI) -> None:
    """Raises PipeplanError if a route reads a body and does not declare its maximum size."""
    for route in iter_route_contexts(app.routes):
        if reads_body(route) and size_of(route) is None:
            raise PipeplanError(f"the route {route.path!r} does not say how large a body it takes")


def size_of(route: RouteContext) -> BodySize | None:
    """The size that the route declares; None where it declares none."""
    return next((one.call for one in _dependencies(route) if isinstance(one.call, BodySize)), None)


def limit_of(app: FastAPI, size: BodySize) -> int:
    """The upper bound on the bytes of a body of this size."""
    general: int = app.state.max_body_bytes
    return general if size.most_bytes is None else min(size.most_bytes, general)


def reads_body(route: RouteContext) -> bool:
    return any(one.call in (body, form) for one in _dependencies(route))


def _dependencies(route: RouteContext) -> Iterator[Dependant]:
    waiting = [dependant] if (dependant := getattr(route, "dependant", None)) is not None else []
    while waiting:
        dependant = waiting.pop()
        waiting += dependant.dependencies
        yield dependant


def raw_json(text: str) -> Response:
    """A stored document as it is."""
    return Response(text, media_type="application/json")


def mark_created(response: Response, new: bool, location: str) -> None:
    """Sets the status, 201 for a new document and 200 for a stored one, and the location."""
    response.status_code = HTTPStatus.CREATED if new else HTTPStatus.OK
    response.headers["Location"] = location


async def known_parameters(request: Request) -> None:
    """Raises InvalidInputError for a query parameter that the route does not have, or that comes twice."""
    route = request.scope["route"]
    if not request.scope["query_string"] or not isinstance(route, APIRoute):
        return
    if route.endpoint not in _KNOWN:
        _KNOWN[route.endpoint] = _parameters(route.dependant)
    known = _KNOWN[route.endpoint]
    seen = set()
    for name, value in request.query_params.multi_items():
        if name not in known:
            rule = f"is not a parameter of this; there is {', '.join(sorted(known)) or 'none'}"
            raise InvalidInputError(name or "query", rule, value)
        if name in seen and not known[name]:
            raise InvalidInputError(name, "must be given once", request.query_params.getlist(name))
        seen.add(name)


KnownParameters = Depends(known_parameters)


def asked_for(kind: type[Q], query_string: bytes) -> Q | None:
    """The query in an address; None for an invalid one, which the route then answers."""
    pairs = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)
    given = dict(pairs)
    if len(given) < len(pairs):
        return None
    try:
        return kind.model_validate(given)
    except ValidationError:
        return None


def page_response(page: Page[Any]) -> Response:
    """A page as it is sent. We have made it ourselves, so it is not validated again."""
    return Response(page.model_dump_json(), media_type="application/json")


def _parameters(dependant: Dependant) -> _Parameters:
    """The parameters of a route, and of all that it depends on."""
    found: _Parameters = {}
    for field in dependant.query_params:
        kind = field.field_info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= {name: _repeats(one.annotation) for name, one in kind.model_fields.items()}
        else:
            found[field.alias] = _repeats(kind)
    for inner in dependant.dependencies:
        found |= _parameters(inner)
    return found


def _repeats(kind: Any) -> bool:
    return get_origin(kind) in (list, tuple, set, frozenset)
