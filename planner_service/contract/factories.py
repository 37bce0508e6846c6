"""Factories: what a SPEC names, and whether an operator's list allows it. Both sides go by it: the service when it
chooses an agent for a job, the agent before it runs one.
"""

from collections.abc import Iterable, Iterator
from urllib.parse import unquote

from pipeplan.documents.names import MAX_LENGTH, parse_spec, require_line
from pipeplan.errors import InvalidInputError, require

RULE = "must be a factory that this agent's operator allows (pipeplan-agent start --allow)"
FIELDS = ("model", "data", "loss")


def specs_of(task: object) -> Iterator[tuple[str, str]]:
    """The task's SPECs by field."""
    for field in FIELDS:
        spec = getattr(task, field, None)
        if spec is not None:
            yield field, spec


def require_specs(task: object) -> None:
    """Raises InvalidInputError for a task with a text that is no SPEC, or data or a loss that is no callable."""
    for field, text in specs_of(task):
        spec = parse_spec(text, field=field)
        rule = "must name a callable as preset:NAME or package.module:factory"
        require(field == "model" or not spec.is_hugging_face, field, rule, text)


def require_patterns(field: str, patterns: Iterable[str]) -> None:
    """Raises InvalidInputError for an operator's list with a text that no SPEC could match."""
    for pattern in patterns:
        require_line(field, pattern)
        rule = "must hold SPECs without options and spaces, a * at the end only"
        fits = pattern.strip() and not set(pattern.removesuffix("*")) & set("*?") and " " not in pattern
        require(bool(fits) and len(pattern) <= MAX_LENGTH, field, rule, pattern)
        if not pattern.endswith("*"):
            parse_spec(pattern, field=field)


def factory_of(text: str) -> str:
    """What a SPEC names, without its options and escapes; of a text that is none, as in earlier jobs, its start."""
    try:
        return parse_spec(text, field="model").target
    except InvalidInputError:
        return text.partition("?")[0]


def allows(patterns: Iterable[str], factory: str) -> bool:
    """Whether one of the patterns allows a factory."""
    return any(_covers(unquote(pattern), factory) for pattern in patterns)


def refusal(task: object, patterns: Iterable[str]) -> InvalidInputError | None:
    """Why a list does not allow a task; None if it does."""
    known = tuple(patterns)
    for field, spec in specs_of(task):
        try:
            target = parse_spec(spec, field=field).target
        except InvalidInputError as error:  # a job from before the grammar was checked
            return error
        if not allows(known, target):
            return InvalidInputError(field, RULE, spec)
    return None


def _covers(pattern: str, factory: str) -> bool:
    """Whether a pattern allows a factory. A trailing * reaches no further than a module's own names.

    `mine.models:*` must not allow `mine.models:os.system`, which the module holds if it imports os; nor does `hf:*`
    allow a path.
    """
    if not pattern.endswith("*"):
        return factory == pattern
    prefix = pattern[:-1]
    rest = factory.removeprefix(prefix)
    return factory.startswith(prefix) and not set("./") & set(rest.rpartition(":")[2])
