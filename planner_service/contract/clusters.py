"""Clusters as lists show them."""

from datetime import datetime

from planner_service.contract.wire import Wire


class ClusterSummary(Wire):
    """A stored cluster: what identifies it, without its levels."""

    id: str
    device: str
    devices: int
    created_at: datetime
