"""Content addressing: the same content has the same id, on every machine."""

import dataclasses
import hashlib
import json
from typing import Any


def canonical_json(content: Any) -> str:
    """The one JSON text of a dataclass or plain value: sorted keys, no spaces, NaN refused."""
    plain = dataclasses.asdict(content) if dataclasses.is_dataclass(content) else content  # type: ignore[arg-type]
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_id(content: Any) -> str:
    """32 hexadecimal digits of the content's SHA-256."""
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:32]
