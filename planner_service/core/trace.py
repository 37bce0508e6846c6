"""Chrome trace: timelines for chrome://tracing and Perfetto, a process each, a track a rank, memory as counters."""

import json
from collections.abc import Iterator, Mapping
from typing import TypedDict

from planner_service.core.schedule.instructions import Instruction, is_compute
from planner_service.core.timeline import Lane, Timeline

US_PER_S = 1e6


class TraceEvent(TypedDict, total=False):
    """One event, with the keys that the format gives it: times in microseconds."""

    name: str
    ph: str
    cat: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: dict[str, str | int]


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """The JSON text of the trace; the names head the processes."""
    events = [
        event
        for process, (name, timeline) in enumerate(timelines.items())
        for event in _process(process, name, timeline)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)


def _process(process: int, name: str, timeline: Timeline) -> Iterator[TraceEvent]:
    yield {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
    for lane in timeline.lanes:
        yield from _track(process, lane)


def _track(process: int, lane: Lane) -> Iterator[TraceEvent]:
    title = f"rank {lane.rank} (stage {lane.stage}, replica {lane.replica})"
    yield {"name": "thread_name", "ph": "M", "pid": process, "tid": lane.rank, "args": {"name": title}}
    for text, event in zip(lane.instructions, lane.events(), strict=True):
        yield {
            "name": text,
            "cat": "compute" if is_compute(event.instruction) else _category(event.instruction),
            "ph": "X",
            "pid": process,
            "tid": lane.rank,
            "ts": event.start_s * US_PER_S,
            "dur": max(event.end_s - event.start_s, 0.0) * US_PER_S,
            "args": {"kind": type(event.instruction).__name__, "memory_bytes": event.memory_bytes},
        }
        yield {
            "name": f"memory of rank {lane.rank}",
            "ph": "C",
            "pid": process,
            "tid": lane.rank,
            "ts": event.end_s * US_PER_S,
            "args": {"bytes": event.memory_bytes},
        }


def _category(instruction: Instruction) -> str:
    name = type(instruction).__name__
    return "transfer" if name.startswith(("Send", "Recv")) else "update"
