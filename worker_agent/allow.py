"""Allow: the factories that a node's operator lets jobs name. The service cannot name code of its own choosing."""

from collections.abc import Sequence

from planner_service.contract.factories import refusal
from planner_service.contract.jobs import AgentTask
from worker_agent.settings import BUILT_IN


def require_allowed(task: AgentTask, allow: Sequence[str]) -> None:
    """Raises InvalidInputError for a model, data or loss that is neither built in nor on the operator's list."""
    refused = refusal(task, (*BUILT_IN, *allow))
    if refused is not None:
        raise refused
