"""Timelines in chunks, as revision 0003 packs them: a copy of what the service had then. Never changed.

The service's own packing may go on; a revision gives every database the same rows, whichever release runs it.
"""

import json
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

FORMAT = 1
LEVEL = 6
NS_PER_S = 10**9
LARGEST_S = 2.0**62 / NS_PER_S

_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,17})(?![0-9])")
"""What int() and str() give back as it stood, and 64 bits hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows of a lane in execution order: instructions' texts, moments in seconds, bytes held."""

    instructions: Sequence[str]
    start_s: Floats
    end_s: Floats
    memory_bytes: Integers


def pack_rows(rows: Rows) -> bytes:
    """The rows as a chunk."""
    split = [_split(text) for text in rows.instructions]
    templates = sorted({template for template, _ in split})
    ids = {template: number for number, template in enumerate(templates)}
    kinds = np.array([ids[template] for template, _ in split], dtype=np.int64)
    order = np.argsort(kinds, kind="stable")
    start_ns, end_ns = nanoseconds(rows.start_s), nanoseconds(rows.end_s)
    gaps_ns = start_ns - np.concatenate(([0], end_ns[:-1]))
    return _framed(
        json.dumps(templates).encode(),
        _packed(kinds),
        _packed(_number_steps(split, templates)),
        _packed(gaps_ns[order]),
        _packed((end_ns - start_ns)[order]),
        _packed(_beyond(rows.start_s, start_ns)),
        _packed(_beyond(rows.end_s, end_ns)),
        _packed(_steps(rows.memory_bytes[order])),
    )


def unpack_rows(chunk: bytes) -> Rows:
    """The rows of a chunk."""
    texts, *columns = _unframed(chunk)
    templates: list[str] = json.loads(texts)
    kinds, numbers, gaps_ns, durations_ns, start_steps, end_steps, memory_steps = map(_unpacked, columns)
    place = np.empty(len(kinds), dtype=np.int64)
    place[np.argsort(kinds, kind="stable")] = np.arange(len(kinds))
    durations_ns = durations_ns[place]
    end_ns = np.cumsum(gaps_ns[place] + durations_ns)
    return Rows(
        instructions=_joined(templates, kinds, numbers, place),
        start_s=_seconds(end_ns - durations_ns, start_steps),
        end_s=_seconds(end_ns, end_steps),
        memory_bytes=np.cumsum(memory_steps)[place],
    )


def nanoseconds(moments_s: Floats) -> Integers:
    """The nearest whole nanoseconds; those of moments beyond 64 bits of them are as far as these reach."""
    return np.rint(np.clip(moments_s, -LARGEST_S, LARGEST_S) * NS_PER_S).astype(np.int64)


def pack_floats(values: Sequence[float]) -> bytes:
    """Numbers as a chunk: every bit of them is kept."""
    return _framed(_packed(np.array(values, dtype=np.float64).view(np.int64)))


def unpack_floats(chunk: bytes) -> tuple[float, ...]:
    """The numbers of a chunk."""
    (column,) = _unframed(chunk)
    return tuple(_unpacked(column).view(np.float64).tolist())


def _beyond(moments_s: Floats, whole_ns: Integers) -> Integers:
    return moments_s.view(np.int64) - (whole_ns / NS_PER_S).view(np.int64)


def _seconds(whole_ns: Integers, steps: Integers) -> Floats:
    return ((whole_ns / NS_PER_S).view(np.int64) + steps).view(np.float64)


def _split(text: str) -> tuple[str, list[int]]:
    """The template of a text, in the notation of the operator %, and the numbers in it."""
    return _NUMBER.sub("%d", text.replace("%", "%%")), [int(number) for number in _NUMBER.findall(text)]


def _number_steps(split: Sequence[tuple[str, list[int]]], templates: Sequence[str]) -> Integers:
    """Template by template, and within it number by number: the differences from row to row."""
    numbers: dict[str, list[list[int]]] = {template: [] for template in templates}
    for template, values in split:
        numbers[template].append(values)
    columns = [_steps(column) for rows in numbers.values() for column in np.array(rows, dtype=np.int64).T]
    return np.concatenate(columns) if columns else np.empty(0, dtype=np.int64)


def _joined(templates: Sequence[str], kinds: Integers, number_steps: Integers, place: Integers) -> list[str]:
    """The texts, in execution order."""
    texts: list[str] = []
    read = 0
    for template, rows in zip(templates, np.bincount(kinds, minlength=len(templates)).tolist(), strict=True):
        slots = template.replace("%%", "").count("%d")
        columns = number_steps[read : read + slots * rows].reshape(slots, rows).cumsum(axis=1)
        read += slots * rows
        texts += [template % tuple(row) for row in columns.T.tolist()] if slots else [template % ()] * rows
    return [texts[row] for row in place.tolist()]


def _steps(values: Integers) -> Integers:
    return np.diff(values, prepend=np.int64(0))


def _packed(values: Integers) -> bytes:
    """Byte planes of the numbers, the sign in the lowest bit so that small negative numbers are small."""
    unsigned = ((values << 1) ^ (values >> 63)).astype("<u8")
    return zlib.compress(unsigned.view(np.uint8).reshape(-1, 8).T.tobytes(), LEVEL)


def _unpacked(column: bytes) -> Integers:
    planes = np.frombuffer(zlib.decompress(column), dtype=np.uint8).reshape(8, -1)
    unsigned = np.ascontiguousarray(planes.T).view("<u8").reshape(-1)
    return (unsigned >> np.uint64(1)).astype(np.int64) ^ -(unsigned & np.uint64(1)).astype(np.int64)


def _framed(*columns: bytes) -> bytes:
    lengths = struct.pack(f"<BB{len(columns)}I", FORMAT, len(columns), *(len(column) for column in columns))
    return lengths + b"".join(columns)


def _unframed(chunk: bytes) -> list[bytes]:
    version, count = struct.unpack_from("<BB", chunk)
    if version != FORMAT:
        raise ValueError(f"a chunk of format {version} cannot be read, only {FORMAT}")
    lengths = struct.unpack_from(f"<{count}I", chunk, 2)
    stops = np.cumsum((2 + 4 * count, *lengths)).tolist()
    return [chunk[start:stop] for start, stop in pairwise(stops)]


CHUNK_ROWS = 8192
LOSSES = -1

Document = dict[str, Any]
"""A timeline as the JSON that revision 0002 stored."""

run_chunks = sa.table(
    "run_chunks",
    *map(sa.column, ("run_id", "series", "part", "rows", "first", "last")),
    sa.column("content", sa.LargeBinary),
)


def canonical_json(content: Any) -> str:
    """Sorted keys, no spaces, NaN refused."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def head(timeline: Document) -> str:
    """What the chunks leave out: which worker every lane is, and what a batch holds."""
    lanes = [{name: lane[name] for name in ("rank", "stage", "replica")} for lane in timeline["lanes"]]
    return json.dumps({"batch_size": timeline["batch_size"], "batches": timeline["batches"], "lanes": lanes})


def store(connection: sa.Connection, run_id: str, timeline: Document, losses: Sequence[float]) -> None:
    """Adds a run's chunks."""
    for chunk in (*_chunks_of(timeline), *_chunks_of_losses(losses)):
        connection.execute(sa.insert(run_chunks).values(run_id=run_id, **chunk))


def read(connection: sa.Connection, run_id: str, head_text: str) -> Document:
    """The timeline."""
    described = json.loads(head_text)
    lanes: list[list[Rows]] = [[] for _ in described["lanes"]]
    for row in _chunks(connection, run_id, run_chunks.c.series > LOSSES):
        lanes[row.series].append(unpack_rows(row.content))
    return {
        "lanes": [worker | _columns(rows) for worker, rows in zip(described["lanes"], lanes, strict=True)],
        "batch_size": described["batch_size"],
        "batches": described["batches"],
    }


def read_losses(connection: sa.Connection, run_id: str) -> list[float]:
    """The losses of all steps."""
    rows = _chunks(connection, run_id, run_chunks.c.series == LOSSES)
    return [loss for row in rows for loss in unpack_floats(row.content)]


def _chunks(connection: sa.Connection, run_id: str, which: sa.ColumnElement[bool]) -> Sequence[sa.Row[Any]]:
    query = sa.select(run_chunks.c.series, run_chunks.c.content).where(run_chunks.c.run_id == run_id, which)
    return connection.execute(query.order_by(run_chunks.c.series, run_chunks.c.part)).all()


def _chunks_of(timeline: Document) -> Iterator[Document]:
    for series, lane in enumerate(timeline["lanes"]):
        for part, start in enumerate(range(0, len(lane["instructions"]), CHUNK_ROWS)):
            some = slice(start, start + CHUNK_ROWS)
            rows = Rows(
                instructions=lane["instructions"][some],
                start_s=np.array(lane["start_s"][some], dtype=np.float64),
                end_s=np.array(lane["end_s"][some], dtype=np.float64),
                memory_bytes=np.array(lane["memory_bytes"][some], dtype=np.int64),
            )
            moments_ns = nanoseconds(np.concatenate((rows.start_s, rows.end_s)))
            yield {
                "series": series,
                "part": part,
                "rows": len(rows.instructions),
                "first": int(moments_ns.min()),
                "last": int(moments_ns.max()),
                "content": pack_rows(rows),
            }


def _chunks_of_losses(losses: Sequence[float]) -> Iterator[Document]:
    for part, start in enumerate(range(0, len(losses), CHUNK_ROWS)):
        some = losses[start : start + CHUNK_ROWS]
        place = {"series": LOSSES, "part": part, "rows": len(some), "first": start, "last": start + len(some) - 1}
        yield place | {"content": pack_floats(some)}


def _columns(chunks: Sequence[Rows]) -> Document:
    return {
        "instructions": [text for rows in chunks for text in rows.instructions],
        "start_s": [moment_s for rows in chunks for moment_s in rows.start_s.tolist()],
        "end_s": [moment_s for rows in chunks for moment_s in rows.end_s.tolist()],
        "memory_bytes": [held for rows in chunks for held in rows.memory_bytes.tolist()],
    }


def pack_all(connection: sa.Connection) -> None:
    """Timelines and losses of all runs out of their documents and into chunks, a run at a time."""
    for run_id in _measured_runs(connection):
        query = sa.text("SELECT report, timeline FROM runs WHERE id = :id")
        row = connection.execute(query, {"id": run_id}).one()
        report, timeline = json.loads(row.report), json.loads(row.timeline)
        store(connection, run_id, timeline, report["losses"])
        values = {"id": run_id, "report": canonical_json({**report, "losses": []}), "head": head(timeline)}
        connection.execute(sa.text("UPDATE runs SET report = :report, timeline_head = :head WHERE id = :id"), values)


def unpack_all(connection: sa.Connection) -> None:
    """The same back into the documents."""
    for run_id in _measured_runs(connection):
        query = sa.text("SELECT report, timeline_head FROM runs WHERE id = :id")
        row = connection.execute(query, {"id": run_id}).one()
        report = canonical_json({**json.loads(row.report), "losses": read_losses(connection, run_id)})
        values = {
            "id": run_id,
            "report": report,
            "timeline": canonical_json(read(connection, run_id, row.timeline_head)),
        }
        connection.execute(sa.text("UPDATE runs SET report = :report, timeline = :timeline WHERE id = :id"), values)


def _measured_runs(connection: sa.Connection) -> list[str]:
    return list(connection.execute(sa.text("SELECT id FROM runs WHERE report IS NOT NULL")).scalars())
