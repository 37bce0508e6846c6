"""Bodies: every route says how large one it takes; none is read beyond that, nor parsed on the event loop.

Listings over HTTP: what is asked for that nobody knows is refused, not left aside.
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

from pipeplan.documents.files import parse_sent
from pipeplan.errors import InvalidInputError, PipeplanError, TooLargeError
from pipeplan.protocol.listing import Page
from planner_service.platform.context import Context
from planner_service.platform.listing import Cut

KEY = "pipeplan.caller"
"""Where a request's caller stands in its ASGI scope."""


T = TypeVar("T")

GENERAL_LIMIT = None
"""Of profiles and of jobs' results, which are as large as what was measured."""

SMALL = 64 * 1024
"""Of requests of a few fields."""

MEBIBYTE = 2**20
"""Of clusters of many groups, and of agents that allow many factories."""

CALIBRATED = 4 * 2**20
"""Of requests that may hold a calibration: four factors a block."""

MAX_FORM_BYTES = 8 * 1024
MAX_FORM_FIELDS = 10
FORM = "application/x-www-form-urlencoded"
_SIZE = "pipeplan.size"


async def context(request: Request) -> Context:
    """What the services need."""
    return _context(request)


class BodySize:
    """Declares how large a body the route takes: so many bytes, and never more than the general limit."""

    def __init__(self, most_bytes: int | None) -> None:
        self.most_bytes = most_bytes

    async def __call__(self, request: Request) -> None:
        """Leaves word for whatever reads the body."""
        request.scope[_SIZE] = self


def takes(most_bytes: int | None) -> Any:
    """The dependency that declares the size; None is the general limit, PIPEPLAN_MAX_BODY_BYTES."""
    return Depends(BodySize(most_bytes))


async def body(request: Request) -> bytes:
    """The request's body. Raises TooLargeError beyond the limit, before or while it is read, and 415 unless it is JSON.

    Asking for JSON by name keeps other sites' pages out: a browser sends it across sites only after asking first.
    """
    return await _received(request, "application/json", "the body")


async def form(request: Request) -> dict[str, str]:
    """A form's fields, the first of each name."""
    content = await _received(request, FORM, "the form")
    try:
        fields = parse_qs(content.decode(), max_num_fields=MAX_FORM_FIELDS)
    except ValueError as error:
        raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, "the form cannot be read") from error
    return {name: values[0] for name, values in fields.items()}


async def _received(request: Request, kind: str, what: str) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"{what} must be sent as {kind}")
    limit_bytes, source = _limit(request)
    too_large = TooLargeError(f"{what} must have at most {limit_bytes} bytes ({source})")
    parsing = _context(request).parsing
    declared = _declared_bytes(request)
    if declared > limit_bytes:
        raise too_large
    parsing.require_room(declared)
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > limit_bytes:
            raise too_large
    return bytes(content)


def _limit(request: Request) -> tuple[int, str]:
    """The limit of the request's route, and where it comes from."""
    size: BodySize = request.scope[_SIZE]
    limit_bytes = limit_of(request.app, size)
    return limit_bytes, "this address's limit" if limit_bytes == size.most_bytes else "PIPEPLAN_MAX_BODY_BYTES"


def _declared_bytes(request: Request) -> int:
    """What the request says of its body's size; 0 where it says nothing."""
    text = request.headers.get("content-length", "")
    return int(text[:20]) if text.isascii() and text.isdigit() else 0


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


async def cut(limit: Annotated[int, Query(ge=1, le=200)] = 50, cursor: str | None = None) -> Cut:
    """Which page of a listing is asked for."""
    return Cut(limit=limit, cursor=cursor)


Services = Annotated[Context, Depends(context)]
Body = Annotated[bytes, Depends(body)]
Form = Annotated[dict[str, str], Depends(form)]
CutOf = Annotated[Cut, Depends(cut)]
Batches = Annotated[int, Query(ge=1, le=1000, description="how many batches to play, from the first on")]


def sent(read: Callable[[bytes], T]) -> Callable[..., Awaitable[T]]:
    """The dependency that gives a route what `read` makes of the body; a function that another process can import."""

    async def parsed(request: Request, content: Body) -> T:
        return await _context(request).parsing.read(read, content)

    return parsed


def document(kind: type[T]) -> Callable[..., Awaitable[T]]:
    """The dependency that gives a route the body as a document of this kind."""
    return sent(partial(parse_sent, kind))


def require_sizes(app: FastAPI) -> None:
    """Raises PipeplanError where a route reads a body and does not declare how large one it takes."""
    for route in iter_route_contexts(app.routes):
        if reads_body(route) and size_of(route) is None:
            raise PipeplanError(f"the route {route.path!r} does not say how large a body it takes")


def size_of(route: RouteContext) -> BodySize | None:
    """What the route declares."""
    return next((one.call for one in _dependencies(route) if isinstance(one.call, BodySize)), None)


def limit_of(app: FastAPI, size: BodySize) -> int:
    """The bytes that a body may have."""
    general: int = app.state.max_body_bytes
    return general if size.most_bytes is None else min(size.most_bytes, general)


def reads_body(route: RouteContext) -> bool:
    """Whether the route, or something that it depends on, reads a body."""
    return any(one.call in (body, form) for one in _dependencies(route))


def _dependencies(route: RouteContext) -> Iterator[Dependant]:
    waiting = [dependant] if (dependant := getattr(route, "dependant", None)) is not None else []
    while waiting:
        dependant = waiting.pop()
        waiting += dependant.dependencies
        yield dependant


def raw_json(text: str) -> Response:
    """A stored document, sent as it is."""
    return Response(text, media_type="application/json")


def mark_created(response: Response, new: bool, location: str) -> None:
    """201 and where it is, or 200 for what was there before."""
    response.status_code = HTTPStatus.CREATED if new else HTTPStatus.OK
    response.headers["Location"] = location


Q = TypeVar("Q", bound=BaseModel)

_Parameters = dict[str, bool]
"""A route's query parameters: whether each may come several times."""

_KNOWN: dict[Any, _Parameters] = {}


async def known_parameters(request: Request) -> None:
    """Raises InvalidInputError for a query parameter that the route does not have, or that comes twice."""
    route = request.scope["route"]
    if not request.scope["query_string"] or not isinstance(route, APIRoute):
        return
    known = _known(route)
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
    """The query that the text of an address holds; None where the route has to say what is wrong with it."""
    pairs = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)
    given = dict(pairs)
    if len(given) < len(pairs):
        return None
    try:
        return kind.model_validate(given)
    except ValidationError:
        return None


def page_response(page: Page[Any]) -> Response:
    """A page, as it goes over the wire: it is ours, and not validated once more."""
    return Response(page.model_dump_json(), media_type="application/json")


def _known(route: APIRoute) -> _Parameters:
    if route.endpoint not in _KNOWN:
        _KNOWN[route.endpoint] = _parameters(route.dependant)
    return _KNOWN[route.endpoint]


def _parameters(dependant: Dependant) -> _Parameters:
    """Those of a route, or of what it depends on."""
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
