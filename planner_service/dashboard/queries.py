"""Queries: what an address asks of a list, by the rules that the API's lists have."""

from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError

from planner_service.contract.documents import invalid_input
from planner_service.contract.listing import ListQuery
from planner_service.dashboard.addresses import address_of

Query = TypeVar("Query", bound=ListQuery)

SHOWN = 50
"""Items on a page."""


def query_of(kind: type[Query], request: Request) -> Query:
    """The address's filters, sort and cursor. Raises InvalidInputError for what the list does not know."""
    given = {name: value for name, value in address_of(request).parameters if name != "back"}
    try:
        return kind.model_validate({"limit": SHOWN} | given)
    except ValidationError as error:
        raise invalid_input(error) from error
