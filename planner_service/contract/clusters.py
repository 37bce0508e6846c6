"""Clusters as lists show them."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from planner_service.contract.listing import ListQuery, Name
from planner_service.contract.wire import Wire


class ClusterSummary(Wire):
    """A stored cluster: what identifies it, without its levels."""

    id: str
    device: str
    devices: int
    created_at: datetime


class ClusterQuery(ListQuery):
    """Which clusters, and in which order: a minus before it is from the most to the least. Default: newest first."""

    sort: Literal["created_at", "-created_at", "devices", "-devices"] | None = None
    device: Name | None = Field(default=None, description="the type of the devices")
    devices: int | None = Field(default=None, ge=1, le=2**31 - 1)
