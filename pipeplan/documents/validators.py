"""Validators: pydantic's, made from the dataclasses and models themselves, and strict in what a bad document may cost.

Pydantic collects every finding, and makes several Python objects for each: a list of a million wrong items gives a
million findings. Here a sequence ends at its first wrong item. Pydantic has no such rule for an object of a million
unknown keys: `most_keys` finds that before pydantic sees it.

An error shows only an `excerpt` of a value, which may be as large as its document.
"""

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import CoreSchema, SchemaValidator

MISTAKEN_KEYS = 32
"""How many keys an object may have beyond those of any kind: up to this number, mistakes are reported one by one."""

_NESTING = frozenset(
    {"schema", "choices", "items_schema", "fields", "definitions", "keys_schema", "values_schema", "extras_schema"}
    | {"json_schema", "python_schema", "lax_schema", "strict_schema", "steps"}
)
"""The keys under which a core schema holds others."""

_BY_NAME = frozenset({"fields", "choices"})
"""Of these, the keys whose schemas may be under names of the document's own."""

_SEQUENCES = frozenset({"list", "tuple", "set", "frozenset"})
_FIELDS = frozenset({"model-field", "dataclass-field"})

_WHOLE_NUMBER = {
    "type": "union",
    "mode": "left_to_right",
    "custom_error_type": "int_type",
    "choices": [
        {"type": "int", "strict": True},
        {"type": "chain", "steps": [{"type": "float", "strict": True}, {"type": "int"}]},
    ],
}
"""JSON has one type of number: 4.0 is a count and 4 an amount. But neither "4" nor true is a number."""

_LENIENT_INT = SchemaValidator({"type": "int"})

SHOWN_CHARACTERS = 300
SHOWN_ITEMS = 100
"""A larger value is shown as an excerpt."""

_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 6
_SHORT.maxlevel = 4
_SHORT.maxstring = 60


class Missing:
    """Represents a field that a document lacks. No schema accepts it as a value.

    Pydantic's own finding holds the whole object that lacks the field, and makes Python objects of all that is in it.
    """


MISSING = Missing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Validator:
    """Validates documents of one kind. No object in a document has more than `most_keys` keys; None: keys are free."""

    schema: SchemaValidator
    most_keys: int | None


@cache
def validator_of(kind: Any) -> Validator:
    """The validator of a dataclass, a model or an annotated union of them."""
    schema = TypeAdapter(kind).core_schema
    every = list(_all_of(schema))
    free_keys = any(one.get("type") in ("dict", "any") for one in every)
    hardened: CoreSchema = _hardened(schema)
    return Validator(
        schema=SchemaValidator(hardened, _use_prebuilt=False),  # prebuilt ones were made of other schemas
        most_keys=None if free_keys else max(len(one.get("fields", ())) for one in every) + MISTAKEN_KEYS,
    )


def rule_of(message: str) -> str:
    """Pydantic's message as a rule in our words, which say what a value must be."""
    return message.replace("Input should ", "must ", 1)


def fault_of_number(value: float) -> str | None:
    """Why a number is not a whole one, in pydantic's words."""
    try:
        _LENIENT_INT.validate_python(value)
    except ValidationError as error:
        return error.errors(include_url=False)[0]["msg"]
    return None


@dataclass(frozen=True, slots=True, repr=False)
class Excerpt:
    """The beginning of a large value, in the form in which Python shows it."""

    text: str

    def __repr__(self) -> str:
        return self.text


def excerpt(value: object) -> object:
    """The value itself if it is small; the beginning of a longer text, an Excerpt of a larger collection."""
    if isinstance(value, str):
        return value if len(value) <= SHOWN_CHARACTERS else value[: SHOWN_CHARACTERS - 3] + "..."
    if isinstance(value, bytes):
        return value[:SHOWN_CHARACTERS]
    if not isinstance(value, list | tuple | dict):
        return value

    # A small value is walked through completely, a large one only until it is known to be large.
    waiting: list[object] = [value]
    seen = 0
    while waiting and seen <= SHOWN_ITEMS:
        match waiting.pop():
            case dict() as pairs if len(pairs) <= SHOWN_ITEMS:
                waiting += [*pairs.keys(), *pairs.values()]
            case list() | tuple() as items if len(items) <= SHOWN_ITEMS:
                waiting += items
            case dict() | list() | tuple():
                return Excerpt(_SHORT.repr(value))
            case str() as text:
                seen += len(text) // 10
            case _:
                pass
        seen += 1
    return Excerpt(_SHORT.repr(value)) if waiting else value


def _hardened(schema: Any) -> Any:
    """The same schema, in which a sequence ends at its first wrong item, and only numbers are numbers."""
    if isinstance(schema, list | tuple):
        return type(schema)(_hardened(item) for item in schema)
    if not isinstance(schema, Mapping):
        return schema
    kind = schema.get("type")
    if kind == "int":
        bounds = {name: schema[name] for name in ("ge", "gt", "le", "lt", "multiple_of") if name in schema}
        return {"type": "chain", "steps": [_WHOLE_NUMBER, {"type": "int", **bounds}]} if bounds else _WHOLE_NUMBER

    hardened = dict(schema)
    for name in _NESTING & schema.keys():
        inner = schema[name]
        by_name = name in _BY_NAME and isinstance(inner, Mapping)
        hardened[name] = {key: _hardened(one) for key, one in inner.items()} if by_name else _hardened(inner)
    if kind in _SEQUENCES:
        hardened["fail_fast"] = True
    if kind in ("float", "bool"):
        hardened["strict"] = True
    if kind in _FIELDS and hardened["schema"]["type"] not in ("default", "any"):
        missing = {"type": "default", "default": MISSING, "validate_default": True}
        hardened["schema"] = missing | {"schema": hardened["schema"]}
    return hardened


def _all_of(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and all within it."""
    if isinstance(schema, list | tuple):
        for one in schema:
            yield from _all_of(one)
    elif isinstance(schema, Mapping):
        yield schema
        for name in _NESTING & schema.keys():
            by_name = name in _BY_NAME and isinstance(schema[name], Mapping)
            yield from _all_of(list(schema[name].values()) if by_name else schema[name])
