"""Documents: JSON texts in, core dataclasses out, and back.

JSON has one type of number: 4.0 is a count and 4 an amount. But neither "4" nor true is a number. Whatever is wrong
with a document is one InvalidInputError.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from pipeplan.documents.identity import content_id, plain
from pipeplan.documents.names import hub_model, on_one_line
from pipeplan.documents.plan import Answer, Infeasible, Plan
from pipeplan.documents.validators import MISSING, excerpt, fault_of_number, rule_of, validator_of
from pipeplan.errors import InvalidInputError, require, require_unique

T = TypeVar("T")

PRICE = ("time_per_microbatch_s", "throughput_samples_per_s", "bubble_fraction")
"""A plan's played figures. In a document without `closed_form`, of release 0.1.0, they are the closed form's."""

DEGREES = {
    "tensor": "devices that share the matrices of a block",
    "pipeline": "ranks of a pipeline",
    "virtual_stages": "stages of each rank",
    "data": "replicas of the pipeline, where all stages have the same",
    "context": "devices that share a sequence",
    "expert": "groups of devices that share the experts of a block",
    "expert_tensor": "devices that share the features of an expert",
}
"""The number of ways in which a plan divides the work: `Plan.degrees`."""

SAID = {
    "synchronous": "whether it trains as one process does; null where its schedule is not installed",
    "training": "the same in words, with how many updates a gradient may be late",
    "optimality": "how far it may be from the optimum; null where nothing is known",
}
"""What an answer says of its plan, in keys that the plan's own document does not have (`formats.spoken_document`)."""

PLAN_EXTRAS = frozenset(
    {"id", "feasible", "depth", "width", "solve_time_s", *PRICE, *DEGREES, "sequence_parallel", *SAID}
)
"""The keys of a plan's document besides the plan: derived, or true of one answer only."""

_PLAYING = "auto"
"""The planner whose alternatives had played throughputs in release 0.1.0; the others' were the closed form's."""

MAX_NESTING = 200
"""How deep pydantic's parser goes."""

MOST_KEYS_SHOWN = 4
"""Keys that an error about a document of another kind quotes."""

_OWN_KEYS = {"profile": "blocks", "cluster": "levels", "plan": "stages", "calibration": "runs"}
"""For each kind of document, a required key that the others do not have."""

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""Pydantic's findings for a key that is not known."""

_NULL = re.compile(rb"(?<!\\)(?:\\\\)*+\\u0000")
"""The escape itself, not an escaped backslash before such a text."""

_MISTYPED: dict[str, tuple[type, ...]] = {
    "int_type": (str, bool),
    "float_type": (str, bool),
    "bool_type": (str, int, float),
}
"""By pydantic's finding: a text or a boolean instead of a number, a text or a number instead of a boolean."""

_UNREADABLE: dict[type[Exception], str] = {
    FileNotFoundError: "there is none of this name",
    NotADirectoryError: "there is none of this name",
    IsADirectoryError: "this is a folder",
    PermissionError: "this user may not read it",
}

_UNWRITABLE: dict[type[Exception], str] = {
    FileNotFoundError: "its folder does not exist",
    NotADirectoryError: "its folder does not exist",
    IsADirectoryError: "this is a folder",
    PermissionError: "this user may not write it",
}


def load(kind: type[T], path: str | Path) -> T:
    """The profile, cluster, plan or calibration in a JSON file. Raises InvalidInputError that names file and field."""
    return read(kind, Path(path))


def save(document: object, path: str | Path) -> None:
    """Writes a document that `load` reads. Raises InvalidInputError if that fails."""
    write_document(Path(path), dump(answer_document(document) if isinstance(document, Plan | Infeasible) else document))


def parse(kind: type[T], content: str | bytes | dict[str, Any]) -> T:
    """The dataclass or model that a JSON text (or its parsed value) describes. Raises InvalidInputError.

    A bad document takes about as long as a good one of its size: findings end at a sequence's first wrong item.
    """
    text = json.dumps(content) if isinstance(content, dict) else content
    return _validated(kind, text, repeated_keys=True)


def parse_sent(kind: type[T], content: bytes) -> T:
    """The same for a body, which must not hold anything that a database cannot store."""
    has_null = rb"\u0000" in content and _NULL.search(content) is not None
    require(not has_null, "document", "must not hold the null character, which a database cannot keep", r"\u0000")
    return parse(kind, content)


def read(kind: type[T], path: Path) -> T:
    """The document in a file; its errors name the file or, if there is none, the wanted kind."""
    text = read_text(path, field=kind.__name__.lower())
    try:
        if kind is Plan:
            _require_plain_keys(text, None, repeated=False)
            return parse_plan(text)  # type: ignore[return-value]
        return _validated(kind, text, repeated_keys=False)
    except InvalidInputError as error:
        _refuse_another_kind(kind.__name__.lower(), text, path)
        raise InvalidInputError(f"{path}: {error.field}", error.rule, error.value) from error


def read_text(path: Path, *, field: str = "file") -> str:
    """A file's text, without a byte order mark. Raises InvalidInputError for `field` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(field, "must be a text file, and this one is not in UTF-8", str(path)) from error
    except (OSError, ValueError) as error:
        reason = _UNREADABLE.get(type(error), "this one cannot be read")
        raise InvalidInputError(field, f"must be a file that can be read: {reason}", str(path)) from error


def write_document(path: Path, text: str, *, field: str = "output") -> None:
    """Writes a document. Raises InvalidInputError for `field` if that fails."""
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        reason = _UNWRITABLE.get(type(error), str(error.strerror))
        raise InvalidInputError(field, f"must be a file that can be written: {reason}", str(path)) from error


def require_place(path: Path | None, *, field: str = "output") -> None:
    """Raises InvalidInputError if a document cannot be written to the path; called before the work, not after it."""
    if path is not None:
        rule = "must be a file that can be written"
        require(not path.is_dir(), field, f"{rule}: this is a folder", str(path))
        require(path.absolute().parent.is_dir(), field, f"{rule}: its folder does not exist", str(path))


def require_model(path: Path) -> None:
    """Raises InvalidInputError for a Hugging Face model's file or folder that is not here; says how to get a hub's."""
    if path.exists():
        return
    rule = "must be a file or folder on this machine: there is none of this name, and nothing is downloaded"
    if path.parts[0] == "~":
        rule += ", and ~ is not replaced here: write the whole path"
    elif not path.is_absolute() and len(path.parts) == 2 and path.parts[0] != ".." and path.suffix != ".json":
        rule += f". Of a model of the hub the config is enough: {hub_model(str(path))}"
    raise InvalidInputError("model", rule, str(path))


def parse_plan(content: str | bytes | dict[str, Any]) -> Plan:
    """A plan from its document, of any release; the derived keys that `plan_document` adds are ignored."""
    try:
        document = content if isinstance(content, dict) else json.loads(content)
    except (ValueError, RecursionError) as error:
        text = content.decode(errors="replace") if isinstance(content, bytes) else str(content)
        deep = f" that is nested at most {MAX_NESTING} levels deep" if isinstance(error, RecursionError) else ""
        raise InvalidInputError("plan", f"must be a JSON document{deep}", text[:60]) from error
    if not isinstance(document, dict):
        raise InvalidInputError("plan", "must be a JSON object", document)
    if document.get("feasible") is False:
        raise InvalidInputError("feasible", "must be true: this document says that no plan fits", False)
    if "closed_form" not in document:
        document = _with_closed_form(document)
    elif isinstance(document["closed_form"], dict):
        form = {key: value for key, value in document["closed_form"].items() if key != "cost_model"}
        document = document | {"closed_form": form}
    return parse(Plan, {key: value for key, value in document.items() if key not in PLAN_EXTRAS})


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, with its id and derived values: its price, and the closed form's name."""
    derived = {"id": content_id(plan), "feasible": True, "depth": plan.depth, "width": plan.width}
    derived |= {name: getattr(plan, name) for name in PRICE} | plan.degrees
    derived |= {"engine": plan.engine, "sharding": plan.sharding, "offload": plan.offload}
    values: dict[str, Any] = plain(plan)
    return derived | values | {"closed_form": {"cost_model": plan.cost_model, **values["closed_form"]}}


def answer_document(answer: Answer) -> dict[str, Any]:
    """A plan's document, or the reasons why there is none."""
    if isinstance(answer, Infeasible):
        return {"feasible": False} | dataclasses.asdict(answer)
    return plan_document(answer)


def _with_closed_form(document: dict[str, Any]) -> dict[str, Any]:
    """A plan's document of release 0.1.0, whose figures were the closed form's, with them in today's places."""
    today = document | {"closed_form": {name: document[name] for name in PRICE if name in document}}
    others = document.get("alternatives")
    if document.get("planner") != _PLAYING and isinstance(others, list):
        name = "throughput_samples_per_s"
        today["alternatives"] = [
            other | {name: None, "closed_form_samples_per_s": other[name]}
            if isinstance(other, dict) and name in other
            else other
            for other in others
        ]
    return today


def dump(content: Any, *, indent: int | None = 2) -> str:
    """A dataclass, model or plain value as JSON, which is readable with an indent."""
    return TypeAdapter(Any).dump_json(content, indent=indent).decode()


def invalid_input(error: ValidationError) -> InvalidInputError:
    """The first of pydantic's findings, as field, rule and value; the rule says how many more there are."""
    return _invalid_input(error.errors(include_url=False))


def _refuse_another_kind(wanted: str, text: str, path: Path) -> None:
    """Raises InvalidInputError for a document of another kind; this says more than a list of missing keys."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return
    if wanted not in _OWN_KEYS or not isinstance(document, dict) or _OWN_KEYS[wanted] in document:
        return
    if "model_type" in document or "architectures" in document:
        rule = f"must be a {wanted}, and this is a model's config: name it as --model hf:{path}"
        raise InvalidInputError(f"{path}: document", rule, document.get("model_type", document.get("architectures")))
    for other, key in _OWN_KEYS.items():
        if key in document:
            rule = f"must be a {wanted}, and this is a {other}: it has {key}"
            raise InvalidInputError(f"{path}: document", rule, list(document)[:MOST_KEYS_SHOWN])


def _validated(kind: type[T], text: str | bytes, *, repeated_keys: bool) -> T:
    validator = validator_of(kind)  # type: ignore[arg-type]  # every type has a hash
    _require_plain_keys(text, validator.most_keys, repeated=repeated_keys)
    try:
        validated: T = validator.schema.validate_json(text)
    except ValidationError as error:
        findings = error.errors(include_url=False)
        mistyped = [one for one in findings if isinstance(one["input"], _MISTYPED.get(one["type"], ()))]
        raise _invalid_input(mistyped or findings) from error
    return validated


def _require_plain_keys(text: str | bytes, most: int | None, *, repeated: bool) -> None:
    """Raises InvalidInputError for an object with far more keys than any kind has, and for one that holds a key twice.

    Of two equal keys JSON parsers silently keep the last; in a file that somebody wrote that is a mistake. This takes a
    tenth of the time that validation takes: numbers and objects are dropped at once.
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
        return  # the parser reports the error


_UNITS = ("_s", "_bytes", "_flops")
"""The suffixes of the names of quantities."""


def _invalid_input(findings: Sequence[ErrorDetails]) -> InvalidInputError:
    """The first finding, and the number of others. An unknown key has precedence over a missing one."""
    items = {one["loc"][:-1] for one in findings}  # a list of wrong items is too short as well, once they are left out
    findings = [one for one in findings if one["type"] != "too_short" or one["loc"] not in items]
    unknown = [one for one in findings if one["type"] in _UNKNOWN and _meant(one, findings)]
    first = (unknown or findings)[0]
    kind, rule, value = first["type"], first["msg"], first["input"]
    field, inner = ".".join(str(part) for part in first["loc"]), ""
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInputError):
        inner, rule, value = cause.field, cause.rule, cause.value
    elif kind in _UNKNOWN:
        rule = f"is not a known key{_meant(first, findings)}"
    elif value is MISSING or kind in ("missing", "missing_argument"):
        rule, value = "is required", None
    elif kind == "union_tag_not_found":
        inner, rule, value = first["ctx"]["discriminator"].strip("'"), "is required", None
    elif kind == "json_invalid" and not value.strip():
        rule = "must be a JSON document, and is empty"
    elif kind == "json_invalid" and "recursion limit" in rule:
        rule = f"must be JSON that is nested at most {MAX_NESTING} levels deep"
    elif kind == "int_type" and isinstance(value, float):
        rule = fault_of_number(value) or rule
    elif kind in ("float_type", "int_type") and isinstance(value, str) and field.endswith(_UNITS):
        rule = "must be a number, in the unit at the end of its name"

    field = ".".join(filter(None, (field, inner)))
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    field, rule = on_one_line(str(excerpt(field))), on_one_line(str(excerpt(rule_of(rule))))  # of a sender
    return InvalidInputError(field or "document", f"{rule}{more}", excerpt(value))


def _meant(unknown: ErrorDetails, findings: Sequence[ErrorDetails]) -> str:
    """The missing key that an unknown one most likely means, as a rule's end: another spelling, or another unit."""
    *place, key = map(str, unknown["loc"])
    lacking = [one for one in findings if one["input"] is MISSING or one["type"].startswith("missing")]
    missing = sorted(str(one["loc"][-1]) for one in lacking if [*map(str, one["loc"][:-1])] == place)
    stem = key.partition("_")[0]
    same = [name for name in missing if name.endswith(_UNITS) and name.partition("_")[0] == stem]
    if same:
        return f": {same[0]} is meant, in the unit at the end of its name"
    near = get_close_matches(key, missing, n=1)
    return f": {near[0]} is meant" if near else ""
