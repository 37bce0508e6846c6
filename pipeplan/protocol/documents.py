"""Documents: profiles and clusters as lists show them."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from pipeplan.protocol.listing import ListQuery, Name, WireModel

DEVICE_TYPES = "all types of the cluster's devices, with their numbers: 8 x A100 + 16 x V100"
"""The meaning of the text that names a cluster's devices in lists."""


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
    device: str = Field(description="the type of the first device")
    devices: int
    created_at: datetime
    device_types: str = Field(default="", description=DEVICE_TYPES)


class ClusterQuery(ListQuery):
    """Which clusters, and in which order: with a minus, descending. Default: newest first."""

    sort: Literal["created_at", "-created_at", "devices", "-devices"] | None = None
    device: Name | None = Field(default=None, description="a type of its devices")
    devices: int | None = Field(default=None, ge=1, le=2**31 - 1)
