"""Listing: the common part of all documents of the protocol, and the requests and answers of lists.

A list comes a page at a time, in an order, and holds the items that pass the filters.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, WrapValidator

T = TypeVar("T")

MAX_LIMIT = 200
"""The most items of a page."""


class WireModel(BaseModel):
    """A document of the protocol: unknown keys, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class Page(WireModel, Generic[T]):
    """Some items, in the requested order, by default newest first.

    `next_cursor` requests the next ones; it is null on the last page. A page may hold fewer items than its limit
    although more follow: if few rows pass the filters, one page searches only a limited number of rows.
    """

    items: tuple[T, ...]
    next_cursor: str | None = Field(default=None, description="give it as `cursor` to get the next page")


def _moment(value: object, parse: Callable[[object], datetime]) -> datetime:
    """The time in UTC. A number of seconds is refused: a time must be written out, as in the lists themselves."""
    if isinstance(value, str) and value.replace(".", "", 1).lstrip("+-").isdigit():
        raise ValueError("must be a date and time with its zone, such as 2026-01-31T12:00:00Z")
    try:
        return parse(value).astimezone(UTC)
    except OverflowError as error:
        raise ValueError("must lie within the years 1 to 9999 UTC") from error


def _without_null(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not hold a null character")
    return value


Moment = Annotated[AwareDatetime, WrapValidator(_moment)]
"""A date and time with its zone, such as 2026-01-02T03:04:05Z."""

Name = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_without_null)]
"""A filter's text. A stored text is never longer or empty."""


class ListQuery(WireModel):
    """The parameters of every list. Lists with filters and orders of their own add them."""

    limit: int = Field(default=50, ge=1, le=MAX_LIMIT, description="items on a page, at most")
    cursor: str | None = Field(default=None, max_length=2000, description="the `next_cursor` of the page before")
    created_after: Moment | None = Field(default=None, description="stored at this moment or later")
    created_before: Moment | None = Field(default=None, description="stored before this moment")


Noun = Literal["profile", "cluster", "plan", "job", "run"]
"""The nouns with ids of 32 hexadecimal digits."""


class IdQuery(WireModel):
    """Which ids: those of a noun with a prefix."""

    noun: Noun
    prefix: str = Field(pattern=r"^[0-9a-f]{4,32}$", description="the beginning of an id")


class Matches(WireModel):
    """The first ids with the prefix, in order; `more`: there are others."""

    ids: tuple[str, ...]
    more: bool
