"""Documents: JSON texts in, core dataclasses out, and back. What is wrong with a document is one InvalidInputError."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from pipeplan.documents.identity import content_id, left_out
from pipeplan.documents.plan import Answer, Infeasible, Plan
from pipeplan.documents.validators import MISSING, excerpt, fault_of_number, validator_of
from pipeplan.errors import InvalidInputError, require, require_unique

T = TypeVar("T")

PLAN_EXTRAS = frozenset({"id", "feasible", "depth", "width", "solve_time_s"})
"""What a plan's document says beside the plan: derived, or true of one answer only."""


MAX_NESTING = 200
"""How deep pydantic's parser goes."""

_NULL = re.compile(rb"(?<!\\)(?:\\\\)*+\\u0000")
"""The escape itself, and not a backslash that happens to stand before such a text."""


_OWN_KEYS = {"profile": "blocks", "cluster": "levels", "plan": "stages", "calibration": "runs"}
"""A required key of each kind of document that the others do not have."""


def load(kind: type[T], path: str | Path) -> T:
    """The profile, cluster, plan or calibration in a JSON file. Raises InvalidInputError that names file and field."""
    return read(kind, Path(path))


def save(document: object, path: str | Path) -> None:
    """Writes a document that `load` reads. Raises InvalidInputError where that is not possible."""
    write_document(Path(path), dump(plan_document(document) if isinstance(document, Plan) else document))


def parse(kind: type[T], content: str | bytes | dict[str, Any]) -> T:
    """The dataclass or model that a JSON text (or its parsed value) describes. Raises InvalidInputError.

    JSON has one type of number: 4.0 is a count and 4 an amount. But neither "4" nor true is a number. A bad document
    costs about what a good one of its size costs: findings end at a sequence's first wrong item.
    """
    text = json.dumps(content) if isinstance(content, dict) else content
    return _validated(kind, text, repeated_keys=True)


def parse_sent(kind: type[T], content: bytes) -> T:
    """The same of a body, which must hold nothing that a database cannot keep."""
    has_null = rb"\u0000" in content and _NULL.search(content) is not None
    require(not has_null, "document", "must not hold the null character, which a database cannot keep", r"\u0000")
    return parse(kind, content)


def read(kind: type[T], path: Path) -> T:
    """The document in a file; its errors name the file."""
    text = read_text(path)
    try:
        if kind is Plan:
            _require_plain_keys(text, None, repeated=False)
            return parse_plan(text)  # type: ignore[return-value]
        return _validated(kind, text, repeated_keys=False)
    except InvalidInputError as error:
        _refuse_another_kind(kind.__name__.lower(), text, path)
        raise InvalidInputError(f"{path}: {error.field}", error.rule, error.value) from error


def _refuse_another_kind(wanted: str, text: str, path: Path) -> None:
    """Says of a cluster that is given as a profile what it is, and not only which keys a profile has."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return
    if wanted not in _OWN_KEYS or not isinstance(document, dict) or _OWN_KEYS[wanted] in document:
        return
    for other, key in _OWN_KEYS.items():
        if key in document:
            rule = f"must be a {wanted}, and has the {key} of a {other}"
            raise InvalidInputError(f"{path}: document", rule, list(document))


def _validated(kind: type[T], text: str | bytes, *, repeated_keys: bool) -> T:
    validator = validator_of(kind)  # type: ignore[arg-type]  # every type has a hash
    _require_plain_keys(text, validator.most_keys, repeated=repeated_keys)
    try:
        validated: T = validator.schema.validate_json(text)
    except ValidationError as error:
        findings = error.errors(include_url=False)
        raise _invalid_input([one for one in findings if _is_mistyped(one)] or findings) from error
    return validated


def _require_plain_keys(text: str | bytes, most: int | None, *, repeated: bool) -> None:
    """Raises InvalidInputError for an object of far more keys than any has, and for one that holds a key twice.

    Of two equal keys JSON parsers keep the last without a word; in a file that somebody wrote it is a mistake.
    Takes a tenth of the time that validation takes: numbers and objects are dropped as they come.
    """

    def look(pairs: list[tuple[str, Any]]) -> None:
        rule = f"must not hold an object with more than {most} keys"
        require(most is None or len(pairs) <= most, "document", rule, len(pairs))
        if not repeated:
            require_unique("document", "must not hold a key twice", [key for key, _ in pairs])

    if most is None and repeated:
        return
    try:
        json.loads(text, object_pairs_hook=look, parse_float=bool, parse_int=bool)
    except InvalidInputError:
        raise
    except (ValueError, RecursionError):
        return  # the parser says what is wrong with it


_UNREADABLE: dict[type[Exception], str] = {
    FileNotFoundError: "does not exist",
    NotADirectoryError: "does not exist",
    IsADirectoryError: "is a folder",
    PermissionError: "may not be read by this user",
}


def read_text(path: Path) -> str:
    """A file's text, without a byte order mark. Raises InvalidInputError where there is none to be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError("file", "must be a readable text file, and is not one in UTF-8", str(path)) from error
    except (OSError, ValueError) as error:
        reason = _UNREADABLE.get(type(error), "cannot be read")
        raise InvalidInputError("file", f"must be a readable text file, and {reason}", str(path)) from error


def write_document(path: Path, text: str) -> None:
    """Writes a document. Raises InvalidInputError where that is not possible."""
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInputError("output", "must be a file that can be written", str(path)) from error


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
    absent = left_out(plan)
    return derived | {name: value for name, value in dataclasses.asdict(plan).items() if name not in absent}


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
    return _invalid_input(error.errors(include_url=False))


def _is_mistyped(finding: ErrorDetails) -> bool:
    """Whether a text or a truth value stands for a number, or a text or a number for a truth value."""
    match finding["type"]:
        case "int_type" | "float_type":
            return isinstance(finding["input"], str | bool)
        case "bool_type":
            return isinstance(finding["input"], str | int | float)
        case _:
            return False


def _invalid_input(findings: Sequence[ErrorDetails]) -> InvalidInputError:
    first = findings[0]
    field = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInputError):
        field, rule, value = ".".join(filter(None, (field, cause.field))), cause.rule, cause.value
    elif first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        rule, value = "is not a known key", first["input"]
    elif first["input"] is MISSING or first["type"] in ("missing", "missing_argument"):
        rule, value = "is required", None
    elif first["type"] == "union_tag_not_found":
        field, rule, value = (
            ".".join(filter(None, (field, first["ctx"]["discriminator"].strip("'")))),
            "is required",
            None,
        )
    elif first["type"] == "json_invalid":
        rule, value = _malformed(first), first["input"]
    elif first["type"] == "int_type" and isinstance(first["input"], float):
        rule, value = fault_of_number(first["input"]) or first["msg"], first["input"]
    else:
        rule, value = first["msg"], first["input"]
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return InvalidInputError(str(excerpt(field)) or "document", f"{excerpt(rule)}{more}", excerpt(value))


def _malformed(finding: ErrorDetails) -> str:
    """What keeps a text from being JSON."""
    if not finding["input"].strip():
        return "must be a JSON document, and is empty"
    if "recursion limit" in finding["msg"]:
        return f"must be JSON that is nested at most {MAX_NESTING} levels deep"
    return finding["msg"]


def _head(content: str | bytes) -> str:
    text = content.decode(errors="replace") if isinstance(content, bytes) else content
    return text[:60]
