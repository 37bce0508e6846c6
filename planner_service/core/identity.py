"""Content addressing: the same content has the same id, on every machine."""

import dataclasses
import hashlib
import json
from functools import cache
from typing import Any


def canonical_json(content: Any) -> str:
    """The one JSON text of a dataclass or plain value: sorted keys, no spaces, NaN refused."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_fields)


def content_id(content: Any) -> str:
    """32 hexadecimal digits of the content's SHA-256."""
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:32]


def _fields(content: Any) -> dict[str, Any]:
    """A dataclass as a dictionary, one level deep: the encoder asks for the rest."""
    return {name: getattr(content, name) for name in _names(type(content))}  # type: ignore[arg-type]


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
