"""Queries: what an address asks of a list, by the rules that the API's lists have."""

from typing import TypeVar, get_origin

from fastapi import Request
from pydantic import ValidationError

from pipeplan.documents.files import invalid_input
from planner_service.contract.listing import ListQuery
from planner_service.dashboard.addresses import address_of

Query = TypeVar("Query", bound=ListQuery)

SHOWN = 50
"""Items on a page."""


def query_of(kind: type[Query], request: Request) -> Query:
    """The address's filters, sort and cursor. Raises InvalidInputError for what the list does not know."""
    given = [(name, value) for name, value in address_of(request).parameters if name != "back"]
    single = {name: value for name, value in given if not _repeats(kind, name)}
    several = {name: [value for key, value in given if key == name] for name, _ in given if _repeats(kind, name)}
    try:
        return kind.model_validate({"limit": SHOWN} | single | several)
    except ValidationError as error:
        raise invalid_input(error) from error


def _repeats(kind: type[ListQuery], name: str) -> bool:
    """Whether a parameter may come several times."""
    return name in kind.model_fields and get_origin(kind.model_fields[name].annotation) is list
