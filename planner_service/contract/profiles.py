"""Profiles as lists show them."""

from datetime import datetime

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
