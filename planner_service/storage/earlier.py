"""Earlier: documents that were stored before a rule was there. Lists must show them all the same."""

import json
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from pipeplan.documents.names import on_one_line

T = TypeVar("T")


def read_stored(adapter: TypeAdapter[T], text: str) -> T:
    """A stored task or request. Names that no request may hold any more come with escapes.

    A profile with such a name cannot be read: no planner is ever given what was changed here.
    """
    try:
        return adapter.validate_json(text)
    except ValidationError:
        return adapter.validate_json(json.dumps(_printable(json.loads(text))))


def _printable(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the names of its calibration, if it holds one, as one line each."""
    asked = document.get("request", document)
    calibration = asked.get("calibration")
    if calibration is None:
        return document
    model = {"name": on_one_line(calibration["model"]["name"])}
    asked["calibration"] = calibration | {"model": model, "device": on_one_line(calibration["device"])}
    return document
