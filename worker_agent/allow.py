"""Allow: the factories that a node's operator lets jobs name. The service cannot name code of its own choosing."""

from collections.abc import Sequence

from pipeplan.protocol.jobs import AgentTask, refusal
from worker_agent.settings import BUILT_IN


def require_allowed(task: AgentTask, allow: Sequence[str]) -> None:
    """Raises InvalidInputError for a model, data or loss that is neither built in nor on the operator's list."""
    refused = refusal(task, (*BUILT_IN, *allow))
    if refused is not None:
        raise refused
