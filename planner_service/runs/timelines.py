"""Timelines and losses of runs, stored in chunks of a few thousand rows. Each states its span, and windows are cheap.

Storage is exact to the last bit, and takes few bytes. Repeated parts are stored once. An instruction is a template,
such as `F%d@%d`, and its numbers. Rows are ordered by template, which groups similar rows. Each number becomes its
difference to the previous one. The differences become byte planes (all lowest bytes, all second ones, ...), and zlib
compresses these to little more than the measurements' noise. Every column is packed separately. Times are whole
nanoseconds, as clocks give them, each with the number of float steps by which the exact value differs: none for
measured times, few for computed ones.

The first byte of a chunk names its format. Every released format stays readable.
"""

import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, and_, func, insert, select

from pipeplan.errors import InvalidInputError
from pipeplan.programs.timeline_document import LaneDocument, TimelineDocument
from planner_service.platform.tables import run_chunks

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

ROWS = 8192
"""The rows of a chunk: some 40 KB of a timeline."""

LOSSES, EARLIER_LOSSES = -1, -2
"""The series of the losses of the reported steps, and of those before; a lane's is its place in the timeline."""

FORMAT = 1
LEVEL = 6
NS_PER_S = 10**9
LARGEST_S = 2.0**62 / NS_PER_S

_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,17})(?![0-9])")
"""The numbers that int() and str() give back unchanged, and that 64 bits hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionRows:
    """Some rows of a lane in execution order: instructions' texts, moments in seconds, bytes (empty: unknown)."""

    instructions: Sequence[str]
    start_s: Floats
    end_s: Floats
    memory_bytes: Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows [part x ROWS, ...) of a series. They lie within [first, last], in nanoseconds or, of losses, in rows."""

    series: int
    part: int
    rows: int
    first: int
    last: int
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineWindow:
    """The seconds [start_s, stop_s) since the run's start. An event that overlaps them is in the window."""

    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The extent of a timeline: its number of instructions, its first event's start and its last event's end."""

    instructions: int
    first_s: float
    last_s: float


def head(timeline: TimelineDocument) -> str:
    """The data outside the chunks: the worker of every lane, and the size and number of batches."""
    lanes = [{"rank": lane.rank, "stage": lane.stage, "replica": lane.replica} for lane in timeline.lanes]
    return json.dumps({"batch_size": timeline.batch_size, "batches": timeline.batches, "lanes": lanes})


def chunks_of(timeline: TimelineDocument) -> Iterator[Chunk]:
    """The timeline's chunks. Raises InvalidInputError if numbers exceed the stored range."""
    for series, lane in enumerate(timeline.lanes):
        try:
            memory_bytes: Integers = np.array(lane.memory_bytes, dtype=np.int64)
        except OverflowError as error:
            largest = max(lane.memory_bytes, key=abs)
            raise InvalidInputError(f"timeline.lanes.{series}.memory_bytes", "must fit in 64 bits", largest) from error
        start_s, end_s = np.array(lane.start_s, dtype=np.float64), np.array(lane.end_s, dtype=np.float64)

        for part, start in enumerate(range(0, len(lane.instructions), ROWS)):
            some = slice(start, start + ROWS)
            packed = InstructionRows(
                instructions=lane.instructions[some],
                start_s=start_s[some],
                end_s=end_s[some],
                memory_bytes=memory_bytes[some],
            )
            moments_ns = nanoseconds(np.concatenate((packed.start_s, packed.end_s)))
            yield Chunk(
                series=series,
                part=part,
                rows=len(packed.instructions),
                first=int(moments_ns.min()),
                last=int(moments_ns.max()),
                content=pack_rows(packed),
            )


def chunks_of_losses(losses: Sequence[float], series: int = LOSSES) -> Iterator[Chunk]:
    """The losses' chunks."""
    for part, start in enumerate(range(0, len(losses), ROWS)):
        some = losses[start : start + ROWS]
        last = start + len(some) - 1
        yield Chunk(series=series, part=part, rows=len(some), first=start, last=last, content=pack_floats(some))


def store(connection: Connection, run_id: str, chunks: Iterable[Chunk]) -> None:
    """Adds chunks to a run."""
    for chunk in chunks:
        values = {name: getattr(chunk, name) for name in Chunk.__slots__}
        connection.execute(insert(run_chunks).values(run_id=run_id, **values))


def extent_of(connection: Connection, run_id: str, window: TimelineWindow | None = None) -> Extent:
    """The extent of the chunks that overlap the window."""
    columns = (func.sum(run_chunks.c.rows), func.min(run_chunks.c.first), func.max(run_chunks.c.last))
    rows, first, last = connection.execute(select(*columns).where(_sharing(run_id, window))).one()
    return Extent(instructions=int(rows or 0), first_s=(first or 0) / NS_PER_S, last_s=(last or 0) / NS_PER_S)


def read(connection: Connection, run_id: str, head_text: str, window: TimelineWindow | None = None) -> TimelineDocument:
    """The timeline's events in the window; lanes without any are included, empty. Reads only chunks that overlap the
    window.
    """
    described = json.loads(head_text)
    columns = (run_chunks.c.series, run_chunks.c.content)
    order = (run_chunks.c.series, run_chunks.c.part)
    chunks: list[list[InstructionRows]] = [[] for _ in described["lanes"]]
    for row in connection.execute(select(*columns).where(_sharing(run_id, window)).order_by(*order)):
        rows = unpack_rows(row.content)
        if window is not None:
            begun = rows.start_s < window.stop_s
            places = np.flatnonzero(begun & ((rows.end_s > window.start_s) | (rows.start_s >= window.start_s)))
            rows = InstructionRows(
                instructions=[rows.instructions[place] for place in places.tolist()],
                start_s=rows.start_s[places],
                end_s=rows.end_s[places],
                memory_bytes=rows.memory_bytes[places] if rows.memory_bytes.size else rows.memory_bytes,
            )
        chunks[row.series].append(rows)
    lanes = tuple(
        LaneDocument(
            rank=worker["rank"],
            stage=worker["stage"],
            replica=worker["replica"],
            instructions=tuple(text for chunk in of_lane for text in chunk.instructions),
            start_s=tuple(moment_s for chunk in of_lane for moment_s in chunk.start_s.tolist()),
            end_s=tuple(moment_s for chunk in of_lane for moment_s in chunk.end_s.tolist()),
            memory_bytes=tuple(held for chunk in of_lane for held in chunk.memory_bytes.tolist()),
        )
        for worker, of_lane in zip(described["lanes"], chunks, strict=True)
    )
    return TimelineDocument(lanes=lanes, batch_size=described["batch_size"], batches=described["batches"])


def earlier_losses(connection: Connection, run_id: str) -> int:
    """How many losses are known of the steps before the reported ones."""
    query = select(func.sum(run_chunks.c.rows)).where(run_chunks.c.run_id == run_id)
    return int(connection.execute(query.where(run_chunks.c.series == EARLIER_LOSSES)).scalar_one() or 0)


def read_losses(
    connection: Connection, run_id: str, start: int = 0, stop: int | None = None, series: int = LOSSES
) -> tuple[float, ...]:
    """The losses [start, stop) of a series."""
    sharing = and_(run_chunks.c.run_id == run_id, run_chunks.c.series == series, run_chunks.c.last >= start)
    query = select(run_chunks.c.part, run_chunks.c.content).where(sharing).order_by(run_chunks.c.part)
    rows = connection.execute(query if stop is None else query.where(run_chunks.c.first < stop)).all()
    if not rows:
        return ()
    read_from = rows[0].part * ROWS
    losses = tuple(loss for row in rows for loss in unpack_floats(row.content))
    return losses[max(start - read_from, 0) : None if stop is None else stop - read_from]


def pack_rows(rows: InstructionRows) -> bytes:
    """The rows as a chunk."""
    # A template is the text in the notation of the operator %, its numbers left out.
    split = [
        (_NUMBER.sub("%d", text.replace("%", "%%")), [int(number) for number in _NUMBER.findall(text)])
        for text in rows.instructions
    ]
    templates = sorted({template for template, _ in split})
    ids = {template: number for number, template in enumerate(templates)}
    kinds = np.array([ids[template] for template, _ in split], dtype=np.int64)
    order = np.argsort(kinds, kind="stable")
    start_ns, end_ns = nanoseconds(rows.start_s), nanoseconds(rows.end_s)
    gaps_ns = start_ns - np.concatenate(([0], end_ns[:-1]))

    # Template by template, and within it number by number: the differences from row to row.
    numbers: dict[str, list[list[int]]] = {template: [] for template in templates}
    for template, values in split:
        numbers[template].append(values)
    number_steps = [_steps(column) for of_one in numbers.values() for column in np.array(of_one, dtype=np.int64).T]

    return _framed(
        json.dumps(templates).encode(),
        _packed(kinds),
        _packed(np.concatenate(number_steps) if number_steps else np.empty(0, dtype=np.int64)),
        _packed(gaps_ns[order]),
        _packed((end_ns - start_ns)[order]),
        _packed(_beyond(rows.start_s, start_ns)),
        _packed(_beyond(rows.end_s, end_ns)),
        _packed(_steps(rows.memory_bytes[order] if rows.memory_bytes.size else rows.memory_bytes)),
    )


def unpack_rows(chunk: bytes) -> InstructionRows:
    """The rows of a chunk."""
    texts, *columns = _unframed(chunk)
    templates: list[str] = json.loads(texts)
    kinds, number_steps, gaps_ns, durations_ns, start_steps, end_steps, memory_steps = map(_unpacked, columns)

    by_template: list[str] = []
    read_steps = 0
    for template, count in zip(templates, np.bincount(kinds, minlength=len(templates)).tolist(), strict=True):
        slots = template.replace("%%", "").count("%d")
        numbers = number_steps[read_steps : read_steps + slots * count].reshape(slots, count).cumsum(axis=1)
        read_steps += slots * count
        by_template += [template % tuple(row) for row in numbers.T.tolist()] if slots else [template % ()] * count

    place = np.empty(len(kinds), dtype=np.int64)  # of every row in execution order, among the rows by template
    place[np.argsort(kinds, kind="stable")] = np.arange(len(kinds))
    durations_ns = durations_ns[place]
    end_ns = np.cumsum(gaps_ns[place] + durations_ns)
    return InstructionRows(
        instructions=[by_template[row] for row in place.tolist()],
        start_s=_seconds(end_ns - durations_ns, start_steps),
        end_s=_seconds(end_ns, end_steps),
        memory_bytes=np.cumsum(memory_steps)[place] if memory_steps.size else memory_steps,
    )


def nanoseconds(moments_s: Floats) -> Integers:
    """The nearest whole nanoseconds; times beyond 64 bits are clamped."""
    return np.rint(np.clip(moments_s, -LARGEST_S, LARGEST_S) * NS_PER_S).astype(np.int64)


def pack_floats(values: Sequence[float]) -> bytes:
    return _framed(_packed(np.array(values, dtype=np.float64).view(np.int64)))


def unpack_floats(chunk: bytes) -> tuple[float, ...]:
    """The numbers of a chunk."""
    (column,) = _unframed(chunk)
    return tuple(_unpacked(column).view(np.float64).tolist())


def _sharing(run_id: str, window: TimelineWindow | None) -> ColumnElement[bool]:
    lanes = and_(run_chunks.c.run_id == run_id, run_chunks.c.series > LOSSES)
    if window is None:
        return lanes
    start_ns, stop_ns = nanoseconds(np.array([window.start_s, window.stop_s])).tolist()
    return and_(lanes, run_chunks.c.first <= stop_ns, run_chunks.c.last >= start_ns)


def _beyond(moments_s: Floats, whole_ns: Integers) -> Integers:
    """By how many float steps the times differ from their whole nanoseconds."""
    return moments_s.view(np.int64) - (whole_ns / NS_PER_S).view(np.int64)


def _seconds(whole_ns: Integers, steps: Integers) -> Floats:
    return ((whole_ns / NS_PER_S).view(np.int64) + steps).view(np.float64)


def _steps(values: Integers) -> Integers:
    return np.diff(values, prepend=np.int64(0))


def _packed(values: Integers) -> bytes:
    """Compressed byte planes. The sign is the lowest bit, to keep small negative numbers small."""
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
