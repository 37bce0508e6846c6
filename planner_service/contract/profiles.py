"""Profiles as lists show them."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from planner_service.contract.listing import ListQuery, Name
from planner_service.contract.wire import Wire


class ProfileSummary(Wire):
    """A stored profile: what identifies it, without its measurements.

    `estimated` says that they were computed from a datasheet.
    """

    id: str
    model: str
    device: str
    dtype: str
    blocks: int
    created_at: datetime
    estimated: bool = False


class ProfileQuery(ListQuery):
    """Which profiles, and in which order: a minus before it is from the most to the least. Default: newest first."""

    sort: Literal["created_at", "-created_at", "blocks", "-blocks"] | None = None
    model: Name | None = Field(default=None, description="the model's name")
    device: Name | None = Field(default=None, description="the type of the devices that were measured")
    dtype: Name | None = None
    estimated: bool | None = Field(default=None, description="whether it was computed, not measured")
