"""Recorder: when each instruction ran and what was held after it. Its result is a lane of a Timeline.

Of a long run every instruction of the first and of the last batches is kept, and of each batch what it came to.
"""

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from platform import node
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from pipeplan.programs.instructions import Instruction, is_compute
from pipeplan.programs.text import format_instruction
from pipeplan.programs.timeline import Lane


class Clock(Protocol):
    """Marks moments cheaply while work goes on; their times are read once it is done."""

    def mark(self) -> None:
        """Notes this moment."""

    def seconds(self) -> Sequence[float]:
        """The noted moments, in seconds since the clock's start."""


class RunClock(Clock, Protocol):
    """A clock for work that goes on for long. `lag`: so many batches later a batch's marks are read without waiting."""

    lag: int

    def take(self, marks: int) -> Sequence[float]:
        """The seconds of so many marks, the oldest, which are then forgotten."""

    def passed(self) -> int:
        """How many marks the device has passed since the clock's start. Waits for nothing; any thread may ask."""


class HostClock:
    """The host's monotonic clock: for devices on which a call returns when its work is done."""

    lag = 0

    def __init__(self, start_s: float | None = None) -> None:
        self._start_s = time.perf_counter() if start_s is None else start_s
        self._marks_s = array("d")
        self._taken = 0

    def mark(self) -> None:
        """Notes this moment."""
        self._marks_s.append(time.perf_counter() - self._start_s)

    def seconds(self) -> Sequence[float]:
        """The noted moments."""
        return self._marks_s

    def take(self, marks: int) -> Sequence[float]:
        """The oldest moments, which are then forgotten."""
        self._taken += marks
        taken_s, self._marks_s = self._marks_s[:marks], self._marks_s[marks:]
        return taken_s

    def passed(self) -> int:
        """All marks that were made; for a moment more while some are taken."""
        return self._taken + len(self._marks_s)


class Event(Protocol):
    """A place in a device's stream, as torch has it."""

    def query(self) -> bool:
        """Whether the device has passed it."""


AnEvent = TypeVar("AnEvent", bound=Event)


class Events(Generic[AnEvent]):
    """Events in the order in which the device comes to them. One thread adds and takes; any may ask how many passed."""

    def __init__(self) -> None:
        self._kept: list[AnEvent] = []
        self._taken = 0
        self._passed = 0
        self._lock = threading.Lock()

    def add(self, event: AnEvent) -> None:
        """A further one, recorded."""
        self._kept.append(event)

    def oldest(self, count: int | None = None) -> Sequence[AnEvent]:
        """So many of those that were not taken, or all."""
        return self._kept[:count]

    def take(self, count: int) -> None:
        """Forgets the oldest, which the device has passed."""
        with self._lock:
            self._kept = self._kept[count:]
            self._taken += count
            self._passed = max(self._passed, self._taken)

    def passed(self) -> int:
        """How many of all that were ever added the device has passed: those before the first that it has not."""
        with self._lock:
            with suppress(RuntimeError):  # of a device that failed: the host hears of it at its own next call
                while self._passed < self._taken + len(self._kept) and self._kept[self._passed - self._taken].query():
                    self._passed += 1
            return self._passed


class CudaClock:
    """Events in the device's current stream: the moments at which the device gets there, without waiting for it."""

    lag = 2

    def __init__(self, start_s: float | None = None) -> None:
        torch.cuda.synchronize()
        self._later_s = 0.0 if start_s is None else time.perf_counter() - start_s
        self._start = self._event()
        self._marks: Events[torch.cuda.Event] = Events()

    def mark(self) -> None:
        """Notes the moment at which the device has done everything before."""
        self._marks.add(self._event())

    def seconds(self) -> Sequence[float]:
        """The noted moments; waits for the device."""
        torch.cuda.synchronize()
        return self._since_start(self._marks.oldest())

    def take(self, marks: int) -> Sequence[float]:
        """The oldest moments, which are then forgotten; waits for the last of them."""
        taken = self._marks.oldest(marks)
        if taken:
            taken[-1].synchronize()
        self._marks.take(marks)
        return self._since_start(taken)

    def passed(self) -> int:
        """The marks before the first that the device has not come to."""
        return self._marks.passed()

    def _since_start(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        return [self._later_s + self._start.elapsed_time(mark) / 1000 for mark in marks]

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def clock_for(device: torch.device, start_s: float | None = None) -> HostClock | CudaClock:
    """The clock that tells the truth about a device. `start_s`: its zero, on the host's own clock; default now."""
    return CudaClock(start_s) if device.type == "cuda" else HostClock(start_s)


def common_start_s() -> float:
    """A moment just gone on this node's clock, the same for all ranks on the node: what a receive waits for is then
    never sent later on another rank's track. Between nodes the moments differ by as much as they leave a barrier apart.
    """
    dist.barrier()
    boot = Path("/proc/sys/kernel/random/boot_id")
    here = boot.read_text() if boot.exists() else node()
    moments: list[tuple[str, float]] = [("", 0.0)] * dist.get_world_size()
    dist.all_gather_object(moments, (here, time.perf_counter()))
    return min(moment_s for its, moment_s in moments if its == here)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a batch came to: when it was through, seconds of compute in it, and bytes held, at most and in the end."""

    end_s: float
    busy_s: float
    peak_memory_bytes: int
    memory_bytes: int


@dataclass(slots=True)
class _Batch:
    """The instructions of a batch, and what was held after each."""

    instructions: list[Instruction] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A batch whose times are known, in whole nanoseconds: no clock is finer, and digits beyond cost their place."""

    instructions: Sequence[Instruction]
    seconds: Sequence[float]
    memory_bytes: Sequence[int]

    def spent(self) -> Spent:
        spans = zip(self.instructions, self.seconds[0::2], self.seconds[1::2], strict=True)
        return Spent(
            end_s=self.seconds[-1],
            busy_s=sum(end_s - start_s for instruction, start_s, end_s in spans if is_compute(instruction)),
            peak_memory_bytes=max(self.memory_bytes),
            memory_bytes=self.memory_bytes[-1],
        )


class Recorder:
    """Two marks and a memory figure an instruction.

    `closes` says which instruction is a batch's last; `on_batch` hears what each came to, `clock.lag` batches later.
    With `keep` no more than so many batches at the start and at the end are kept.
    """

    def __init__(
        self,
        clock: RunClock,
        *,
        closes: Callable[[Instruction], bool] = lambda _: False,
        on_batch: Callable[[Spent], None] = lambda _: None,
        keep: int | None = None,
    ) -> None:
        self._clock = clock
        self._closes = closes
        self._on_batch = on_batch
        self._keep = keep
        self._open: _Batch = _Batch()
        self._unread: deque[_Batch] = deque()
        self._first: list[_Kept] = []
        self._last: deque[_Kept] = deque(maxlen=keep)

    def begin(self) -> None:
        """The next instruction starts."""
        self._clock.mark()

    def end(self, instruction: Instruction, memory_bytes: int) -> None:
        """It is done, and so much is held now."""
        self._clock.mark()
        batch = self._open
        batch.instructions.append(instruction)
        batch.memory_bytes.append(memory_bytes)
        if self._closes(instruction):
            self._unread.append(batch)
            self._open = _Batch()
            if len(self._unread) > self._clock.lag:
                self._read_oldest()

    def lane(self, *, rank: int, stage: int, replica: int) -> Lane:
        """All that was kept. What comes after the last batch, a checkpoint say, goes with it."""
        while self._unread:
            self._read_oldest()
        batches = [*self._first, *self._last, self._read(self._open)]
        seconds = [moment_s for batch in batches for moment_s in batch.seconds]
        return Lane(
            rank=rank,
            stage=stage,
            replica=replica,
            instructions=tuple(format_instruction(i) for batch in batches for i in batch.instructions),
            start_s=tuple(seconds[0::2]),
            end_s=tuple(seconds[1::2]),
            memory_bytes=tuple(held for batch in batches for held in batch.memory_bytes),
        )

    def finished(self) -> int:
        """How many instructions the device has finished. Any thread may ask."""
        return self._clock.passed() // 2

    @property
    def first_instructions(self) -> int:
        """How many of the lane's instructions are of the batches at the start; 0 where all are kept."""
        return sum(len(batch.instructions) for batch in self._first)

    def _read_oldest(self) -> None:
        kept = self._read(self._unread.popleft())
        if self._keep is not None and len(self._first) < self._keep:
            self._first.append(kept)
        else:
            self._last.append(kept)
        self._on_batch(kept.spent())

    def _read(self, batch: _Batch) -> _Kept:
        seconds = array("d", (round(moment_s, 9) for moment_s in self._clock.take(2 * len(batch.instructions))))
        return _Kept(batch.instructions, seconds, array("q", batch.memory_bytes))
