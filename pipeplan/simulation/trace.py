"""Chrome trace: timelines for chrome://tracing and Perfetto, in the Trace Event Format.

A process a timeline, a track a rank, on it a slice an instruction, named by its text. A transfer is a flow, an arrow
from the slice of the send to that of the receive. What a rank holds is a counter.

Times are whole nanoseconds, which is what Perfetto counts in. No slice is shorter than one, none begins before the one
before it has ended, and a receive ends after its send began, so that nothing is dropped and every arrow is drawn: where
work costs nothing, as in the papers' pictures, slices are moved by as many nanoseconds as that takes.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypedDict

from pipeplan.programs.instructions import (
    Instruction,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    is_compute,
)
from pipeplan.programs.text import parse_instruction
from pipeplan.programs.timeline import Lane, Timeline

NS_PER_S = 1_000_000_000
NS_PER_US = 1000

FIRST_TRACK = 1000
"""The track of rank 0. Perfetto puts a track 0, and one with its process's number, on the same line."""

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
    """An instruction's place on its track, in whole nanoseconds."""

    start_ns: int
    end_ns: int

    @property
    def leaves_ns(self) -> int:
        """Where an arrow begins: within the slice, behind its start where there is room for it."""
        return min(self.start_ns + 1, self.end_ns - 1)

    @property
    def arrives_ns(self) -> int:
        """Where an arrow ends: the last instant within the slice."""
        return self.end_ns - 1


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """The JSON text of the trace; the names head the processes, in their order."""
    events: list[TraceEvent] = []
    flows = 0
    for process, (name, timeline) in enumerate(timelines.items(), start=1):
        drawn = _Drawn(timeline)
        events += _process(process, name, drawn, flows)
        flows += len(drawn.received)
    document = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": _NOTES}
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


_NOTES = {
    "memory, predicted": "bytes that the simulator counts after each instruction",
    "memory, measured": "bytes of tensors that the runtime counts after each instruction: weight versions, gradients, "
    "optimizer states, and what microbatches keep",
}


class _Drawn:
    """A timeline's slices, lane by lane, and which of them receive what other ones send."""

    def __init__(self, timeline: Timeline) -> None:
        self.lanes = timeline.lanes
        self.instructions = [tuple(map(parse_instruction, lane.instructions)) for lane in timeline.lanes]
        self._span = 1 + max(lane.stage for lane in timeline.lanes)
        self.sent = self._places(SendActivation, SendGradient)
        messages = set(self.sent.values())
        received = self._places(RecvActivation, RecvGradient)
        self.received = {place: message for place, message in received.items() if message in messages}
        self.slices: list[list[_Slice]] = [[] for _ in timeline.lanes]
        self._lay_out()

    def _places(self, *kinds: type[Instruction]) -> dict[tuple[int, int], Message]:
        """By lane and index, what is sent or received there."""
        return {
            (number, index): self._message(lane, instruction)
            for number, (lane, instructions) in enumerate(zip(self.lanes, self.instructions, strict=True))
            for index, instruction in enumerate(instructions)
            if isinstance(instruction, kinds)
        }

    def _message(self, lane: Lane, instruction: Instruction) -> Message:
        stage = lane.stage + instruction.chunk * self._span
        match instruction:
            case SendActivation(microbatch=k):
                return False, k, stage
            case RecvActivation(microbatch=k):
                return False, k, stage - 1
            case SendGradient(microbatch=k):
                return True, k, stage
            case RecvGradient(microbatch=k):
                return True, k, stage + 1
            case _:
                raise ValueError(instruction)

    def _lay_out(self) -> None:
        """Lane by lane, as far as what they receive has been laid out where it is sent."""
        left_ns: dict[Message, int] = {}
        waiting: dict[Message, int] = {}
        ready = deque(range(len(self.lanes)))
        while ready:
            number = ready.popleft()
            missing = self._advance(number, left_ns, waiting, ready)
            if missing is not None:
                waiting[missing] = number
            if not ready and waiting:  # lanes that all wait for each other are of no run: they get no arrow there
                self.received = {place: message for place, message in self.received.items() if message not in waiting}
                ready.extend(waiting.values())
                waiting.clear()

    def _advance(
        self, number: int, left_ns: dict[Message, int], waiting: dict[Message, int], ready: deque[int]
    ) -> Message | None:
        """One lane as far as it can go; what it waits for there."""
        for index in range(len(self.slices[number]), len(self.instructions[number])):
            message, sent = self.received.get((number, index)), self.sent.get((number, index))
            if message is not None and message not in left_ns:
                return message
            placed = self._place(number, index, -1 if message is None else left_ns[message])
            self.slices[number].append(placed)
            if sent is not None:
                left_ns[sent] = placed.leaves_ns
            if sent in waiting:
                ready.append(waiting.pop(sent))
        return None

    def _place(self, number: int, index: int, left_ns: int) -> _Slice:
        lane, before = self.lanes[number], self.slices[number]
        start_ns = max(round(lane.start_s[index] * NS_PER_S), before[-1].end_ns if before else 0)
        return _Slice(start_ns, max(round(lane.end_s[index] * NS_PER_S), start_ns + 1, left_ns + 2))


def _process(process: int, name: str, drawn: _Drawn, first_flow: int) -> Iterator[TraceEvent]:
    yield {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
    flows = {message: first_flow + n for n, message in enumerate(sorted(drawn.received.values()), start=1)}
    for number, lane in enumerate(drawn.lanes):
        yield from _track(process, number, lane)
        for index, (text, instruction) in enumerate(zip(lane.instructions, drawn.instructions[number], strict=True)):
            placed = drawn.slices[number][index]
            yield _slice(process, lane, text, instruction, placed, lane.memory_bytes[index])
            out, into = drawn.sent.get((number, index)), drawn.received.get((number, index))
            if out is not None and out in flows:
                yield _flow("s", process, lane.rank, flows[out], placed.leaves_ns, out)
            if into is not None:
                yield _flow("f", process, lane.rank, flows[into], placed.arrives_ns, into)
            yield _held(process, lane.rank, placed.end_ns, lane.memory_bytes[index])


def _track(process: int, number: int, lane: Lane) -> Iterator[TraceEvent]:
    title = f"rank {lane.rank} (stage {lane.stage}, replica {lane.replica})"
    yield {"name": "thread_name", "ph": "M", "pid": process, "tid": FIRST_TRACK + lane.rank, "args": {"name": title}}
    yield {
        "name": "thread_sort_index",
        "ph": "M",
        "pid": process,
        "tid": FIRST_TRACK + lane.rank,
        "args": {"sort_index": number},
    }


def _slice(
    process: int, lane: Lane, text: str, instruction: Instruction, placed: _Slice, memory_bytes: int
) -> TraceEvent:
    return {
        "name": text,
        "cat": _category(instruction),
        "ph": "X",
        "pid": process,
        "tid": FIRST_TRACK + lane.rank,
        "ts": placed.start_ns / NS_PER_US,
        "dur": (placed.end_ns - placed.start_ns) / NS_PER_US,
        "args": {"kind": type(instruction).__name__, "memory_bytes": memory_bytes},
    }


def _flow(phase: str, process: int, rank: int, number: int, at_ns: int, message: Message) -> TraceEvent:
    """One end of an arrow, within the slice that it is to be bound to."""
    gradient, microbatch, _ = message
    event: TraceEvent = {
        "name": f"{'gradient' if gradient else 'activation'} {microbatch}",
        "cat": "transfer",
        "ph": phase,
        "id": number,
        "pid": process,
        "tid": FIRST_TRACK + rank,
        "ts": at_ns / NS_PER_US,
    }
    if phase == "f":
        event["bp"] = "e"
    return event


def _held(process: int, rank: int, at_ns: int, memory_bytes: int) -> TraceEvent:
    return {
        "name": f"memory of rank {rank}",
        "ph": "C",
        "pid": process,
        "tid": FIRST_TRACK + rank,
        "ts": at_ns / NS_PER_US,
        "args": {"bytes": memory_bytes},
    }


def _category(instruction: Instruction) -> str:
    if is_compute(instruction):
        return "compute"
    return "transfer" if type(instruction).__name__.startswith(("Send", "Recv")) else "update"
