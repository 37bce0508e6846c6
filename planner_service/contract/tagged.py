"""Documents of several kinds: a task, a completion. Their errors name the field as the sender wrote it."""

from typing import cast

from pipeplan.documents.files import parse_sent
from pipeplan.errors import InvalidInputError
from planner_service.contract.factories import require_specs
from planner_service.contract.jobs import Completion, LinksTask, PlanTask, ProfileTask, RunTask, Task

KINDS = ("profile", "links", "run", "plan", "part")


def parse_task(content: bytes) -> Task:
    """The task in a JSON text, its SPECs checked. Raises InvalidInputError.

    The tasks themselves hold any text where a SPEC belongs: jobs of earlier versions must stay readable.
    """
    try:
        task = parse_sent(cast(type[ProfileTask | LinksTask | RunTask | PlanTask], Task), content)
    except InvalidInputError as error:
        raise _without_tag(error, "") from error
    require_specs(task)
    return task


def parse_completion(content: bytes) -> Completion:
    """The completion in a JSON text. Raises InvalidInputError."""
    try:
        return parse_sent(Completion, content)
    except InvalidInputError as error:
        raise _without_tag(error, "result.") from error


def _without_tag(error: InvalidInputError, place: str) -> InvalidInputError:
    """The path that pydantic gives has the chosen kind in it, which is no key of the document."""
    for kind in KINDS:
        if error.field.startswith(f"{place}{kind}."):
            field = place + error.field.removeprefix(f"{place}{kind}.")
            return InvalidInputError(field, error.rule, error.value)
    return error
