"""Listings: newest first, a page at a time."""

from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    """Some items, newest first. `next_cursor` asks for those that follow; it is null on the last page."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    items: tuple[T, ...]
    next_cursor: str | None = Field(default=None, description="give it as `cursor` to get the next page")
