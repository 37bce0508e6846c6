"""Factories: what a SPEC names, and whether an operator's list allows it. Both sides go by it: the service when it
chooses an agent for a job, the agent before it runs one.
"""

from collections.abc import Iterable, Iterator

from planner_service.core.errors import InvalidInputError

RULE = "must be a factory that this agent's operator allows (pipeplan-agent start --allow)"
FIELDS = ("model", "data", "loss")


def specs_of(task: object) -> Iterator[tuple[str, str]]:
    """The task's SPECs by field."""
    for field in FIELDS:
        spec = getattr(task, field, None)
        if spec is not None:
            yield field, spec


def factory_of(spec: str) -> str:
    """What a SPEC names, without its options."""
    return spec.partition("?")[0]


def allows(patterns: Iterable[str], factory: str) -> bool:
    """Whether one of the patterns allows a factory."""
    return any(_covers(pattern, factory) for pattern in patterns)


def refusal(task: object, patterns: Iterable[str]) -> InvalidInputError | None:
    """Why a list does not allow a task; None if it does."""
    known = tuple(patterns)
    for field, spec in specs_of(task):
        if not allows(known, factory_of(spec)):
            return InvalidInputError(field, RULE, spec)
    return None


def _covers(pattern: str, factory: str) -> bool:
    """Whether a pattern allows a factory. A trailing * reaches no further than a module's own names.

    `mine.models:*` must not allow `mine.models:os.system`, which the module holds if it imports os.
    """
    if not pattern.endswith("*"):
        return factory == pattern
    prefix = pattern[:-1]
    rest = factory.removeprefix(prefix)
    return factory.startswith(prefix) and "." not in rest.rpartition(":")[2]
