"""Records: dataclasses from the JSON texts that our own processes write for each other, with nothing but Python.

`canonical_json` writes them. What people and other programs send is for `contract.documents`, which explains mistakes
better; a process that computes reads its job without the libraries that this takes.
"""

import dataclasses
import json
import sys
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pipeplan.errors import InvalidInputError, require

T = TypeVar("T")

_LARGEST = sys.float_info.max
"""JSON's whole numbers may be beyond, and no float holds those."""

_Reader = Callable[[str, Any], Any]
"""The value of a field, by the field's path, from what JSON gives for it."""


def read_record(kind: type[T], text: str | bytes) -> T:
    """The dataclass, or mapping of them, that a text describes. Raises InvalidInputError.

    Types are held to: no key is unknown, a count is no text and no truth value, and every number is finite.
    """
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidInputError("document", f"must be a JSON document ({error})", text[:60]) from error
    record: T = _reader(kind)("", content)  # type: ignore[arg-type]  # every type has a hash
    return record


def _refuse_constant(name: str) -> None:
    raise InvalidInputError("document", "must hold finite numbers", name)


@cache
def _reader(kind: Any) -> _Reader:
    """What reads a type."""
    if dataclasses.is_dataclass(kind):
        return _reader_of_dataclass(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _reader_of_union(arguments)
    if origin is Literal:
        return _reader_of_literal(arguments)
    if origin is tuple:
        return _reader_of_tuple(arguments)
    if origin in (Mapping, dict):
        return _reader_of_mapping(arguments[1])
    if kind in _PLAIN:
        return _PLAIN[kind]
    raise TypeError(f"no record holds a {kind}")


def _reader_of_dataclass(kind: Any) -> _Reader:
    hints = get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]

    def read(path: str, value: Any) -> Any:
        require(isinstance(value, dict), path or "document", "must be an object", value)
        for name in required:
            require(name in value, _under(path, name), "is required", None)
        for name in value:
            require(name in fields, _under(path, name), "is not a known key", value[name])
        read_fields = {name: _reader(fields[name])(_under(path, name), item) for name, item in value.items()}
        try:
            return kind(**read_fields)
        except InvalidInputError as error:
            raise InvalidInputError(_under(path, error.field), error.rule, error.value) from error

    return read


def _reader_of_union(kinds: tuple[Any, ...]) -> _Reader:
    """Of one type, or None."""
    (only,) = (kind for kind in kinds if kind is not types.NoneType)
    return lambda path, value: None if value is None else _reader(only)(path, value)


def _reader_of_literal(allowed: tuple[Any, ...]) -> _Reader:
    def read(path: str, value: Any) -> Any:
        require(value in allowed, path, f"must be one of {', '.join(map(str, allowed))}", value)
        return value

    return read


def _reader_of_tuple(kinds: tuple[Any, ...]) -> _Reader:
    """Of any length, or with an item for each of the types."""
    endless = kinds[-1] is Ellipsis
    json_types = _JSON_TYPES.get(kinds[0]) if endless else None

    def read(path: str, value: Any) -> tuple[Any, ...]:
        require(isinstance(value, list), path, "must be a list", value)
        if json_types is not None and json_types.issuperset(map(type, value)) and _are_finite(kinds[0], value):
            return tuple(map(kinds[0], value))  # the columns of a long run, at once
        require(endless or len(value) == len(kinds), path, f"must have {len(kinds)} items", value)
        of_items = (_reader(kinds[0]),) * len(value) if endless else tuple(map(_reader, kinds))
        return tuple(of(f"{path}.{i}", item) for i, (of, item) in enumerate(zip(of_items, value, strict=True)))

    return read


def _reader_of_mapping(kind: Any) -> _Reader:
    def read(path: str, value: Any) -> dict[str, Any]:
        require(isinstance(value, dict), path or "document", "must be an object", value)
        return {name: _reader(kind)(_under(path, name), item) for name, item in value.items()}

    return read


def _read_text(path: str, value: Any) -> str:
    require(isinstance(value, str), path, "must be a text", value)
    return value  # type: ignore[no-any-return]


def _read_truth(path: str, value: Any) -> bool:
    require(isinstance(value, bool), path, "must be true or false", value)
    return value  # type: ignore[no-any-return]


def _read_count(path: str, value: Any) -> int:
    require(type(value) is int, path, "must be a whole number", value)
    return value  # type: ignore[no-any-return]


def _read_amount(path: str, value: Any) -> float:
    require(type(value) in (int, float), path, "must be a number", value)
    require(abs(value) <= _LARGEST, path, "must be finite", value)
    return float(value)


_PLAIN: dict[Any, _Reader] = {str: _read_text, bool: _read_truth, int: _read_count, float: _read_amount}

_JSON_TYPES: dict[Any, frozenset[type]] = {
    str: frozenset({str}),
    bool: frozenset({bool}),
    int: frozenset({int}),
    float: frozenset({float, int}),
}
"""What JSON may give for each of them."""


def _are_finite(kind: Any, values: list[Any]) -> bool:
    return kind is not float or all(abs(value) <= _LARGEST for value in values)


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
