"""Records: dataclasses from the JSON texts that our own processes write for each other, with Python alone.

`canonical_json` writes them. `documents.files` reads what people and other programs send: it explains mistakes better,
and loads pydantic for this. A computing process reads its job without pydantic.
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
"""JSON's whole numbers may be larger than any float."""

_PLAIN: dict[Any, tuple[frozenset[type], str]] = {
    str: (frozenset({str}), "must be a text"),
    bool: (frozenset({bool}), "must be true or false"),
    int: (frozenset({int}), "must be a whole number"),
    float: (frozenset({float, int}), "must be a number"),
}
"""The simple types: what JSON may hold for each, and the rule in an error."""

_Reader = Callable[[str, Any], Any]
"""The value of a field, from the field's path and what JSON gives for it."""


def read_record(kind: type[T], text: str | bytes) -> T:
    """The dataclass, or mapping of them, that a text describes. Raises InvalidInputError.

    Types are enforced: every key is known, a count is neither a text nor a boolean, and every number is finite.
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
    """Raises InvalidInputError for NaN and the infinities, which Python's parser would take."""
    raise InvalidInputError("document", "must hold finite numbers", name)


@cache
def _reader(kind: Any) -> _Reader:
    """The reader of a type; made once for each."""
    if dataclasses.is_dataclass(kind):
        return _reader_of_dataclass(kind)
    if kind in _PLAIN:
        return _reader_of_plain(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return _reader_of_tuple(arguments)
    if origin in (Union, types.UnionType):  # of one type, or None
        (only,) = (argument for argument in arguments if argument is not types.NoneType)
        return lambda path, value: None if value is None else _reader(only)(path, value)
    if origin is Literal:

        def read_literal(path: str, value: Any) -> Any:
            require(value in arguments, path, f"must be one of {', '.join(map(str, arguments))}", value)
            return value

        return read_literal
    if origin in (Mapping, dict):

        def read_mapping(path: str, value: Any) -> dict[str, Any]:
            require(isinstance(value, dict), path or "document", "must be an object", value)
            return {name: _reader(arguments[1])(_under(path, name), item) for name, item in value.items()}

        return read_mapping
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


def _reader_of_tuple(kinds: tuple[Any, ...]) -> _Reader:
    """Of any length, or with an item for each of the types."""
    endless = kinds[-1] is Ellipsis
    json_types = _PLAIN[kinds[0]][0] if endless and kinds[0] in _PLAIN else None

    def read(path: str, value: Any) -> tuple[Any, ...]:
        require(isinstance(value, list), path, "must be a list", value)
        plain = json_types is not None and json_types.issuperset(map(type, value))
        if plain and (kinds[0] is not float or all(abs(item) <= _LARGEST for item in value)):
            return tuple(map(kinds[0], value))  # the columns of a long run, at once
        require(endless or len(value) == len(kinds), path, f"must have {len(kinds)} items", value)
        of_items = (_reader(kinds[0]),) * len(value) if endless else tuple(map(_reader, kinds))
        return tuple(of(f"{path}.{i}", item) for i, (of, item) in enumerate(zip(of_items, value, strict=True)))

    return read


def _reader_of_plain(kind: Any) -> _Reader:
    json_types, rule = _PLAIN[kind]

    def read(path: str, value: Any) -> Any:
        require(type(value) in json_types, path, rule, value)
        if kind is float:
            require(abs(value) <= _LARGEST, path, "must be finite", value)
        return kind(value)

    return read


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
