"""Listings over HTTP: what is asked for that nobody knows is refused, not left aside."""

from typing import Any, TypeVar, get_origin
from urllib.parse import parse_qsl

from fastapi import Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from pipeplan.errors import InvalidInputError
from planner_service.contract.listing import Page

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
