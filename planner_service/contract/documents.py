"""Documents: JSON texts in, core dataclasses out, and back. What is wrong with a document is one InvalidInputError."""

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from planner_service.core.errors import InvalidInputError
from planner_service.core.identity import content_id
from planner_service.core.plan import Answer, Infeasible, Plan

T = TypeVar("T")

PLAN_EXTRAS = frozenset({"id", "feasible", "depth", "width", "solve_time_s"})
"""What a plan's document says beside the plan: derived, or true of one answer only."""


def parse(kind: type[T], content: str | bytes | dict[str, Any]) -> T:
    """The dataclass or model that a JSON text (or its parsed value) describes. Raises InvalidInputError."""
    adapter: TypeAdapter[T] = TypeAdapter(kind)
    try:
        if isinstance(content, dict):
            return adapter.validate_python(content)
        return adapter.validate_json(content)
    except ValidationError as error:
        raise invalid_input(error) from error
    except OverflowError as error:  # a whole number of hundreds of digits is JSON, but no quantity
        raise InvalidInputError("document", "must not hold numbers beyond 1.8e308", "a longer one") from error


def read(kind: type[T], path: Path) -> T:
    """The document in a file; its errors name the file."""
    text = read_text(path)
    try:
        return parse_plan(text) if kind is Plan else parse(kind, text)  # type: ignore[return-value]
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error.field}", error.rule, error.value) from error


def read_text(path: Path) -> str:
    """A file's text. Raises InvalidInputError where there is none to be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError("file", "must be a readable text file", str(path)) from error


def parse_plan(content: str | bytes) -> Plan:
    """A plan from its document; the derived keys that `plan_document` adds are allowed and left aside."""
    try:
        document = json.loads(content)
    except ValueError as error:
        raise InvalidInputError("plan", "must be a JSON document", _head(content)) from error
    if not isinstance(document, dict):
        raise InvalidInputError("plan", "must be a JSON object", document)
    if document.get("feasible") is False:
        raise InvalidInputError("feasible", "must be true: this document says that no plan fits", False)
    return parse(Plan, {key: value for key, value in document.items() if key not in PLAN_EXTRAS})


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, with its id and what can be read off it."""
    derived = {"id": content_id(plan), "feasible": True, "depth": plan.depth, "width": plan.width}
    return derived | dataclasses.asdict(plan)


def answer_document(answer: Answer) -> dict[str, Any]:
    """A plan's document, or the reasons why there is none."""
    if isinstance(answer, Infeasible):
        return {"feasible": False} | dataclasses.asdict(answer)
    return plan_document(answer)


def dump(content: Any) -> str:
    """A dataclass, model or plain value as readable JSON."""
    return TypeAdapter(Any).dump_json(content, indent=2).decode()


def invalid_input(error: ValidationError) -> InvalidInputError:
    """The first of pydantic's findings, as field, rule and value; how many more there are is said in the rule."""
    findings = error.errors(include_url=False)
    first = findings[0]
    field = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInputError):
        field, rule, value = ".".join(filter(None, (field, cause.field))), cause.rule, cause.value
    elif first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        rule, value = "is not a known key", first["input"]
    elif first["type"] in ("missing", "missing_argument"):
        rule, value = "is required", None
    else:
        rule, value = first["msg"], first["input"]
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return InvalidInputError(field or "document", rule + more, value)


def _head(content: str | bytes) -> str:
    text = content.decode(errors="replace") if isinstance(content, bytes) else content
    return text[:60]
