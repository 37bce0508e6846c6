"""Timelines and losses of runs: chunks of a few thousand rows, each with what it spans, so that windows are cheap.

Everything comes back exactly as it was stored, to the last bit.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy import ColumnElement, Connection, and_, func, insert, select

from pipeplan.errors import InvalidInputError
from pipeplan.programs.timeline import Lane, Timeline
from planner_service.storage.series import (
    NS_PER_S,
    Integers,
    Rows,
    nanoseconds,
    pack_floats,
    pack_rows,
    unpack_floats,
    unpack_rows,
)
from planner_service.storage.tables import run_chunks

ROWS = 8192
"""Rows of a chunk: some 40 KB of a timeline."""

LOSSES = -1
"""The series of the losses; a lane's is its place in the timeline."""


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
class Window:
    """The seconds [start_s, stop_s) since the run's start. An event of which any instant lies in it is in it."""

    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much there is of a timeline: lanes' instructions, and from its first event's start to its last one's end."""

    instructions: int
    first_s: float
    last_s: float


def head(timeline: Timeline) -> str:
    """What the chunks leave out: which worker every lane is, and what a batch holds."""
    lanes = [{"rank": lane.rank, "stage": lane.stage, "replica": lane.replica} for lane in timeline.lanes]
    return json.dumps({"batch_size": timeline.batch_size, "batches": timeline.batches, "lanes": lanes})


def chunks_of(timeline: Timeline) -> Iterator[Chunk]:
    """The timeline's chunks. Raises InvalidInputError where numbers are beyond what is kept."""
    for series, lane in enumerate(timeline.lanes):
        rows = _rows(series, lane)
        for part, start in enumerate(range(0, len(lane.instructions), ROWS)):
            some = slice(start, start + ROWS)
            packed = Rows(
                instructions=rows.instructions[some],
                start_s=rows.start_s[some],
                end_s=rows.end_s[some],
                memory_bytes=rows.memory_bytes[some],
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


def chunks_of_losses(losses: Sequence[float]) -> Iterator[Chunk]:
    """The losses' chunks."""
    for part, start in enumerate(range(0, len(losses), ROWS)):
        some = losses[start : start + ROWS]
        last = start + len(some) - 1
        yield Chunk(series=LOSSES, part=part, rows=len(some), first=start, last=last, content=pack_floats(some))


def store(connection: Connection, run_id: str, chunks: Iterable[Chunk]) -> None:
    """Adds chunks to a run."""
    for chunk in chunks:
        values = {name: getattr(chunk, name) for name in Chunk.__slots__}
        connection.execute(insert(run_chunks).values(run_id=run_id, **values))


def extent_of(connection: Connection, run_id: str, window: Window | None = None) -> Extent:
    """How much the chunks hold that have a share in the window."""
    columns = (func.sum(run_chunks.c.rows), func.min(run_chunks.c.first), func.max(run_chunks.c.last))
    rows, first, last = connection.execute(select(*columns).where(_sharing(run_id, window))).one()
    return Extent(instructions=int(rows or 0), first_s=(first or 0) / NS_PER_S, last_s=(last or 0) / NS_PER_S)


def read(connection: Connection, run_id: str, head_text: str, window: Window | None = None) -> Timeline:
    """The timeline's events in the window; lanes without any stay, empty. Reads no chunk that has no share in it."""
    described = json.loads(head_text)
    columns = (run_chunks.c.series, run_chunks.c.content)
    order = (run_chunks.c.series, run_chunks.c.part)
    lanes: list[list[Rows]] = [[] for _ in described["lanes"]]
    for row in connection.execute(select(*columns).where(_sharing(run_id, window)).order_by(*order)):
        lanes[row.series].append(_within(unpack_rows(row.content), window))
    return Timeline(
        lanes=tuple(_lane(worker, rows) for worker, rows in zip(described["lanes"], lanes, strict=True)),
        batch_size=described["batch_size"],
        batches=described["batches"],
    )


def read_losses(connection: Connection, run_id: str, start: int = 0, stop: int | None = None) -> tuple[float, ...]:
    """The losses of the run's steps [start, stop), counted from its first one."""
    sharing = and_(run_chunks.c.run_id == run_id, run_chunks.c.series == LOSSES, run_chunks.c.last >= start)
    query = select(run_chunks.c.part, run_chunks.c.content).where(sharing).order_by(run_chunks.c.part)
    rows = connection.execute(query if stop is None else query.where(run_chunks.c.first < stop)).all()
    if not rows:
        return ()
    read_from = rows[0].part * ROWS
    losses = tuple(loss for row in rows for loss in unpack_floats(row.content))
    return losses[max(start - read_from, 0) : None if stop is None else stop - read_from]


def _sharing(run_id: str, window: Window | None) -> ColumnElement[bool]:
    lanes = and_(run_chunks.c.run_id == run_id, run_chunks.c.series > LOSSES)
    if window is None:
        return lanes
    start_ns, stop_ns = nanoseconds(np.array([window.start_s, window.stop_s])).tolist()
    return and_(lanes, run_chunks.c.first <= stop_ns, run_chunks.c.last >= start_ns)


def _within(rows: Rows, window: Window | None) -> Rows:
    if window is None:
        return rows
    begun = rows.start_s < window.stop_s
    places = np.flatnonzero(begun & ((rows.end_s > window.start_s) | (rows.start_s >= window.start_s)))
    return Rows(
        instructions=[rows.instructions[place] for place in places.tolist()],
        start_s=rows.start_s[places],
        end_s=rows.end_s[places],
        memory_bytes=rows.memory_bytes[places],
    )


def _rows(series: int, lane: Lane) -> Rows:
    try:
        memory_bytes: Integers = np.array(lane.memory_bytes, dtype=np.int64)
    except OverflowError as error:
        largest = max(lane.memory_bytes, key=abs)
        raise InvalidInputError(f"timeline.lanes.{series}.memory_bytes", "must fit in 64 bits", largest) from error
    return Rows(
        instructions=lane.instructions,
        start_s=np.array(lane.start_s, dtype=np.float64),
        end_s=np.array(lane.end_s, dtype=np.float64),
        memory_bytes=memory_bytes,
    )


def _lane(worker: dict[str, int], chunks: Sequence[Rows]) -> Lane:
    return Lane(
        rank=worker["rank"],
        stage=worker["stage"],
        replica=worker["replica"],
        instructions=tuple(text for rows in chunks for text in rows.instructions),
        start_s=tuple(moment_s for rows in chunks for moment_s in rows.start_s.tolist()),
        end_s=tuple(moment_s for rows in chunks for moment_s in rows.end_s.tolist()),
        memory_bytes=tuple(held for rows in chunks for held in rows.memory_bytes.tolist()),
    )
