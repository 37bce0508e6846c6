"""Content addressing: the same content has the same id, on every machine."""

import dataclasses
import hashlib
import json
from functools import cache, lru_cache
from typing import Any

LEFT_OUT_AS_DEFAULT = {"left_out_as_default": True}
"""Metadata of a field that came later: where it has its default, ids and documents stay those of before."""


def canonical_json(content: Any) -> str:
    """The one JSON text of a dataclass or plain value: sorted keys, no spaces, NaN refused."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_fields)


def content_id(content: Any) -> str:
    """32 hexadecimal digits of the content's SHA-256."""
    return text_id(canonical_json(content))


def text_id(canonical: str) -> str:
    """The same of a canonical text."""
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def known_id(document: Any) -> str:
    """`content_id` of a document that is asked for again and again, as all planners name the same profile."""
    return _known_id(_Same(document))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """A document by its identity: equal ones may differ in their text, as 1 and 1.0 do."""

    content: Any

    def __hash__(self) -> int:
        return id(self.content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.content is other.content


@lru_cache(maxsize=8)
def _known_id(same: _Same) -> str:
    return content_id(same.content)


def left_out(content: Any) -> frozenset[str]:
    """The fields that a dataclass's document does not have: those marked `LEFT_OUT_AS_DEFAULT`, at their default."""
    kind: Any = type(content)
    return frozenset(name for name, default in _optional(kind) if getattr(content, name) == default)


def _fields(content: Any) -> dict[str, Any]:
    """A dataclass as a dictionary, one level deep: the encoder asks for the rest."""
    kind: Any = type(content)
    absent = left_out(content) if _optional(kind) else ()
    return {name: getattr(content, name) for name in _names(kind) if name not in absent}


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@cache
def _optional(kind: type) -> tuple[tuple[str, Any], ...]:
    fields = dataclasses.fields(kind)
    return tuple(
        (field.name, field.default) for field in fields if LEFT_OUT_AS_DEFAULT.items() <= field.metadata.items()
    )
