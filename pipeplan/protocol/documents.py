"""Documents: profiles and clusters as lists show them."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from pipeplan.protocol.listing import ListQuery, Name, WireModel


class ProfileSummary(WireModel):
    """A stored profile: what identifies it, without its measurements.

    `estimated`: they were computed from a datasheet.
    """

    id: str
    model: str
    device: str
    dtype: str
    blocks: int
    created_at: datetime
    estimated: bool = False


class ProfileQuery(ListQuery):
    """Which profiles, and in which order: with a minus, descending. Default: newest first."""

    sort: Literal["created_at", "-created_at", "blocks", "-blocks"] | None = None
    model: Name | None = Field(default=None, description="the model's name")
    device: Name | None = Field(default=None, description="the type of the devices that were measured")
    dtype: Name | None = None
    estimated: bool | None = Field(default=None, description="whether it was computed, not measured")


class ClusterSummary(WireModel):
    """A stored cluster: what identifies it, without its levels."""

    id: str
    device: str
    devices: int
    created_at: datetime


class ClusterQuery(ListQuery):
    """Which clusters, and in which order: with a minus, descending. Default: newest first."""

    sort: Literal["created_at", "-created_at", "devices", "-devices"] | None = None
    device: Name | None = Field(default=None, description="the type of the devices")
    devices: int | None = Field(default=None, ge=1, le=2**31 - 1)
