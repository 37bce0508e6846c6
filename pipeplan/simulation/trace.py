"""Chrome trace: timelines for chrome://tracing and Perfetto, in the Trace Event Format.

A timeline is a process, a rank is a track in it, and an instruction is a slice on the track, named by its text. A
transfer is a flow: an arrow from the slice of the send to that of the receive. The bytes that a rank holds are a
counter.

Times are whole nanoseconds, Perfetto's unit. No slice is shorter than one nanosecond or begins before the previous one
has ended, and a receive ends after its send began. Perfetto thus drops nothing and draws every arrow. If work costs
nothing, as in the papers' pictures, slices move by the few nanoseconds that these rules need.

A trace may be bounded. It then holds the start and the end of each timeline, and `otherData` says what is left out.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from types import MappingProxyType
from typing import Any, TypedDict

import numpy as np

from pipeplan.programs.instructions import (
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    is_compute,
)
from pipeplan.programs.text import format_instruction
from pipeplan.programs.timeline import Timeline

NS_PER_S = 1_000_000_000
NS_PER_US = 1000

FIRST_TRACK = 1000
"""The track of rank 0. Perfetto puts a track 0, and one with its process's number, on the same line."""

MOST_BYTES = 10_000_000
"""Upper bound on the bytes of a run's trace, and of its timeline."""

LEAST_SLICE_BYTES = 100
"""Lower bound on the length of a slice's text."""

Message = tuple[bool, int, int]
"""A transfer: whether of a gradient, its microbatch, the stage that sends it. No two of a run are the same."""


class TraceEvent(TypedDict, total=False):
    """One event, with the keys that the format gives it: times in microseconds."""

    name: str
    ph: str
    cat: str
    pid: int
    tid: int
    id: int
    bp: str
    ts: float
    dur: float
    args: dict[str, str | int]


@dataclass(frozen=True, slots=True)
class _Slice:
    """An instruction's position on its track, in whole nanoseconds."""

    start_ns: int
    end_ns: int

    @property
    def leaves_ns(self) -> int:
        """Where an arrow begins: inside the slice, after its start if the slice is long enough."""
        return min(self.start_ns + 1, self.end_ns - 1)

    @property
    def arrives_ns(self) -> int:
        """Where an arrow ends: the last instant inside the slice."""
        return self.end_ns - 1


_NOTES = {
    "memory, predicted": "bytes that the simulator counts after each instruction",
    "memory, measured": "bytes of tensors that the runtime counts after each instruction: weight versions, gradients, "
    "optimizer states, and what microbatches keep",
}


def chrome_trace(
    timelines: Mapping[str, Timeline], *, most_bytes: int | None = None, notes: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The JSON text of the trace; the names are those of the processes, in order.

    It has at most `most_bytes`, if those are given: instructions in the middle of the timelines are left out. `notes`
    are written into `otherData`.
    """
    instructions = {name: sum(len(lane.instructions) for lane in each.lanes) for name, each in timelines.items()}
    share = 1.0
    if most_bytes is not None:
        share = min(1.0, most_bytes / LEAST_SLICE_BYTES / max(sum(instructions.values()), 1))
    while True:
        limits = {name: int(count * share) for name, count in instructions.items()}
        kept = {name: _ends(timeline, limits[name]) for name, timeline in timelines.items()}
        left_out = {
            f"left out, {name}": f"{count - limits[name]:,} of {count:,} instructions, in the middle"
            for name, count in instructions.items()
            if limits[name] < count
        }
        text = _whole(kept, {**notes, **left_out})
        if most_bytes is None or len(text) <= most_bytes or not any(limits.values()):
            return text
        share *= 0.95 * most_bytes / len(text)


def _ends(timeline: Timeline, most: int) -> Timeline:
    """The timeline with a bounded number of instructions: the first and the last ones to start, half each."""
    counts = [len(lane.instructions) for lane in timeline.lanes]
    if sum(counts) <= most:
        return timeline
    starts_s = np.concatenate([np.array(lane.start_s, dtype=np.float64) for lane in timeline.lanes])
    order = np.argsort(starts_s, kind="stable")  # in each lane the order of execution
    kept = np.zeros(len(order), dtype=bool)
    kept[order[: most - most // 2]] = kept[order[len(order) - most // 2 :]] = True
    lanes = []
    for lane, of_lane in zip(timeline.lanes, np.split(kept, np.cumsum(counts)[:-1]), strict=True):
        columns = ("instructions", "start_s", "end_s", "memory_bytes")
        some: dict[str, Any] = {name: tuple(compress(getattr(lane, name), of_lane)) for name in columns}
        lanes.append(replace(lane, **some))
    return replace(timeline, lanes=tuple(lanes))


def _whole(timelines: Mapping[str, Timeline], notes: Mapping[str, str]) -> str:
    """The text with everything in the timelines."""
    events: list[TraceEvent] = []
    flows = 0
    for process, (name, timeline) in enumerate(timelines.items(), start=1):
        drawn = _Drawn(timeline)
        events += [
            {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}},
            {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}},
        ]
        numbers = {message: flows + n for n, message in enumerate(sorted(drawn.received.values()), start=1)}
        for number in range(len(drawn.lanes)):
            events += _track(process, number, drawn, numbers)
        flows += len(drawn.received)
    document = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {**_NOTES, **notes}}
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


class _Drawn:
    """A timeline's slices, lane by lane, and the transfers by lane and index."""

    def __init__(self, timeline: Timeline) -> None:
        self.lanes = timeline.lanes
        self.sent: dict[tuple[int, int], Message] = {}
        received: dict[tuple[int, int], Message] = {}
        span = 1 + max(lane.stage for lane in timeline.lanes)
        # In a V, the last rank's first stage sends nothing.
        last = [instruction for lane in self.lanes if lane.stage == span - 1 for instruction in lane.instructions]
        several = any(instruction.chunk == 1 for instruction in last)
        v_shaped = several and not any(isinstance(one, SendActivation) and one.chunk == 0 for one in last)
        for number, lane in enumerate(self.lanes):
            for index, instruction in enumerate(lane.instructions):
                returns = v_shaped and instruction.chunk == 1
                stage = 2 * span - 1 - lane.stage if returns else lane.stage + instruction.chunk * span
                match instruction:
                    case SendActivation(microbatch=k):
                        self.sent[number, index] = False, k, stage
                    case RecvActivation(microbatch=k):
                        received[number, index] = False, k, stage - 1
                    case SendGradient(microbatch=k):
                        self.sent[number, index] = True, k, stage
                    case RecvGradient(microbatch=k):
                        received[number, index] = True, k, stage + 1
        messages = set(self.sent.values())
        self.received = {place: message for place, message in received.items() if message in messages}
        self.slices: list[list[_Slice]] = [[] for _ in timeline.lanes]
        self._lay_out()

    def _lay_out(self) -> None:
        """Places the slices of every lane, up to a receive whose send has not been placed yet."""
        left_ns: dict[Message, int] = {}
        waiting: dict[Message, int] = {}
        ready = deque(range(len(self.lanes)))
        while ready:
            number = ready.popleft()
            lane, placed = self.lanes[number], self.slices[number]
            for index in range(len(placed), len(lane.instructions)):
                message, sent = self.received.get((number, index)), self.sent.get((number, index))
                if message is not None and message not in left_ns:
                    waiting[message] = number
                    break
                arrow_ns = -1 if message is None else left_ns[message]
                start_ns = max(round(lane.start_s[index] * NS_PER_S), placed[-1].end_ns if placed else 0)
                end_ns = max(round(lane.end_s[index] * NS_PER_S), start_ns + 1, arrow_ns + 2)
                placed.append(_Slice(start_ns, end_ns))
                if sent is not None:
                    left_ns[sent] = placed[-1].leaves_ns
                if sent in waiting:
                    ready.append(waiting.pop(sent))
            if not ready and waiting:  # no run has lanes that all wait for each other: they get no arrow there
                self.received = {place: message for place, message in self.received.items() if message not in waiting}
                ready.extend(waiting.values())
                waiting.clear()


def _track(process: int, number: int, drawn: _Drawn, flows: Mapping[Message, int]) -> Iterator[TraceEvent]:
    """A lane: its name and place, and for every instruction a slice, the ends of its arrows and what the rank holds."""
    lane = drawn.lanes[number]
    track = FIRST_TRACK + lane.rank
    title = f"rank {lane.rank} (stage {lane.stage}, replica {lane.replica})"
    yield {"name": "thread_name", "ph": "M", "pid": process, "tid": track, "args": {"name": title}}
    yield {"name": "thread_sort_index", "ph": "M", "pid": process, "tid": track, "args": {"sort_index": number}}
    counted_bytes: int | None = None
    for index, instruction in enumerate(lane.instructions):
        placed, kind = drawn.slices[number][index], type(instruction).__name__
        transfers = kind.startswith(("Send", "Recv"))
        yield {
            "name": format_instruction(instruction),
            "cat": "compute" if is_compute(instruction) else "transfer" if transfers else "update",
            "ph": "X",
            "pid": process,
            "tid": track,
            "ts": placed.start_ns / NS_PER_US,
            "dur": (placed.end_ns - placed.start_ns) / NS_PER_US,
            "args": {"kind": kind} | ({"memory_bytes": lane.memory_bytes[index]} if lane.memory_bytes else {}),
        }
        out, into = drawn.sent.get((number, index)), drawn.received.get((number, index))
        if out is not None and out in flows:
            yield _flow("s", process, track, flows[out], placed.leaves_ns, out)
        if into is not None:
            yield _flow("f", process, track, flows[into], placed.arrives_ns, into)
        if not lane.memory_bytes or lane.memory_bytes[index] == counted_bytes:
            continue  # it is unknown, or as before
        counted_bytes = lane.memory_bytes[index]
        yield {
            "name": f"memory of rank {lane.rank}",
            "ph": "C",
            "pid": process,
            "tid": track,
            "ts": placed.end_ns / NS_PER_US,
            "args": {"bytes": counted_bytes},
        }


def _flow(phase: str, process: int, track: int, number: int, at_ns: int, message: Message) -> TraceEvent:
    """One end of an arrow, inside the slice to which it is bound."""
    gradient, microbatch, _ = message
    event: TraceEvent = {
        "name": f"{'gradient' if gradient else 'activation'} {microbatch}",
        "cat": "transfer",
        "ph": phase,
        "id": number,
        "pid": process,
        "tid": track,
        "ts": at_ns / NS_PER_US,
    }
    if phase == "f":
        event["bp"] = "e"
    return event
