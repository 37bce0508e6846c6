"""Stored documents: reading old ones, the time of their last use, and the cache of those that are sent often."""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from sqlalchemy import Connection, Row, Table, func, update

from pipeplan.documents.files import invalid_input
from pipeplan.documents.names import on_one_line
from pipeplan.errors import ConflictError

T = TypeVar("T")
Noun = Literal["profiles", "clusters", "plans", "timelines", "summaries"]
"""The kinds of cached values. Timelines are the compressed columns of played plans; summaries are those of plans."""

USE_NOTED = timedelta(hours=1)
"""The minimum interval between two writes of a document's last use."""

MAX_BYTES = 32 * 2**20
MAX_AGE_S = 30.0
"""How long a document counts as stored without a check: another process may have pruned it."""

LARGEST_SHARE = 1 / 8
"""The largest share of the cache for one document."""


ENTRY_BYTES = 400
"""The cache's own memory for a document, approximately."""

_NOT_PLAYED: dict[Noun, bytes] = {"plans": b'"simulated":null', "summaries": b'"throughput_samples_per_s":null'}
_PLAYED_LATER = b'"added_within":'
"""A part of a plan's document without a play, and of one whose play was added. No text in the document can contain
it, because quotation marks have a backslash there.
"""


def may_change(noun: Noun, content: bytes) -> bool:
    """Whether the document may still change: a plan without a play may be given one."""
    return noun in _NOT_PLAYED and _NOT_PLAYED[noun] in content


def tag_of(noun: Noun, identity: str, content: bytes) -> str:
    """The document's entity tag: its id, or another one for a plan whose play was added."""
    return f"{identity}.played" if noun == "plans" and _PLAYED_LATER in content else identity


def read_stored(adapter: TypeAdapter[T], text: str) -> T:
    """A stored task, request or registration, one from before names had to be printable too: lists must show them all
    the same. Raises ConflictError for one that this release cannot read.

    Such names, which only a calibration holds, are escaped. No planner ever gets what is changed here: the profile that
    it belongs to has the same name, and cannot be read.
    """
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        first = error
    try:
        document = json.loads(text)
        asked = document.get("request", document)
        calibration = asked.get("calibration")
        if calibration is not None:
            model = {"name": on_one_line(calibration["model"]["name"])}
            asked["calibration"] = calibration | {"model": model, "device": on_one_line(calibration["device"])}
        return adapter.validate_json(json.dumps(document))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise unreadable(first) from error


def unreadable(error: ValueError) -> ConflictError:
    """The error of a stored document that this release cannot read, by its validation's errors."""
    found = invalid_input(error) if isinstance(error, ValidationError) else error
    return ConflictError(f"another release stored it, and this one cannot read it: {found}")


def columns_of(row: Row[Any], kind: type[Any]) -> dict[str, Any]:
    """The columns of a row that are fields of a model or a dataclass, by name."""
    fields = kind.model_fields if issubclass(kind, BaseModel) else kind.__dataclass_fields__
    known = row._asdict()  # looking names up in the row itself takes five times as long
    return {name: known[name] for name in fields if name in known}


def note_use(connection: Connection, table: Table, identity: str, now: datetime) -> None:
    """Records that an existing document was stored or requested again: retention counts its age from now."""
    stale = func.coalesce(table.c.used_at, table.c.created_at) <= now - USE_NOTED
    connection.execute(update(table).where(table.c.id == identity, stale).values(used_at=now))


class DocumentCache:
    """Immutable documents as they are sent: those requested last, up to a number of bytes.

    A document that may still change is not kept, so the cache never holds a wrong document. Only whether it is still
    stored must be checked again. Several threads may use it.
    """

    def __init__(
        self, *, max_bytes: int = MAX_BYTES, max_age_s: float = MAX_AGE_S, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._now_s = now_s
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[Noun, str], tuple[bytes, float]] = OrderedDict()
        self._bytes = 0

    def get(self, noun: Noun, identity: str) -> bytes | None:
        """The document, if it was read within the last `max_age_s`."""
        with self._lock:
            entry = self._entries.get((noun, identity))
            if entry is None or self._now_s() - entry[1] > self._max_age_s:
                return None
            self._entries.move_to_end((noun, identity))
            return entry[0]

    def known(self, noun: Noun, identities: Iterable[str]) -> dict[str, bytes]:
        """The documents that are in the cache, by id, for a caller who knows that they are stored."""
        with self._lock:
            found = {identity: self._entries.get((noun, identity)) for identity in identities}
        return {identity: entry[0] for identity, entry in found.items() if entry is not None}

    def put(self, noun: Noun, identity: str, content: bytes) -> None:
        """Keeps a document that has just been read; evicts those unused for the longest time."""
        size = len(content) + ENTRY_BYTES
        if may_change(noun, content) or size > self._max_bytes * LARGEST_SHARE:
            return
        with self._lock:
            self._drop((noun, identity))
            self._entries[noun, identity] = (content, self._now_s())
            self._bytes += size
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[Noun, str]) -> None:
        entry = self._entries.pop(key, None)
        self._bytes -= 0 if entry is None else len(entry[0]) + ENTRY_BYTES
