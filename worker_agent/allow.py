"""Allow: the factories that a node's operator lets jobs name. The service cannot name code of its own choosing."""

from collections.abc import Sequence

from planner_service.contract.jobs import ProfileTask, RunTask
from planner_service.core.errors import require
from worker_agent.settings import BUILT_IN


def require_allowed(task: ProfileTask | RunTask, allow: Sequence[str]) -> None:
    """Raises InvalidInputError for a model, data or loss that is neither built in nor on the operator's list."""
    for field in ("model", "data", "loss"):
        spec = getattr(task, field, None)
        if spec is None:
            continue
        factory = spec.partition("?")[0]
        listed = any(_covers(pattern, factory) for pattern in (*BUILT_IN, *allow))
        require(
            listed, field, "must be a factory that this agent's operator allows (pipeplan-agent start --allow)", spec
        )


def _covers(pattern: str, factory: str) -> bool:
    """Whether a pattern allows a factory. A trailing * reaches no further than a module's own names.

    `mine.models:*` must not allow `mine.models:os.system`, which the module holds if it imports os.
    """
    if not pattern.endswith("*"):
        return factory == pattern
    prefix = pattern[:-1]
    rest = factory.removeprefix(prefix)
    return factory.startswith(prefix) and "." not in rest.rpartition(":")[2]
