"""Clocks that suit profiling: the time that the work took, not the time that others took from it."""

import threading
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from platform import node
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist


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


class DeviceEvent(Protocol):
    """A place in a device's stream, as torch has it."""

    def query(self) -> bool:
        """Whether the device has passed it."""


AnEvent = TypeVar("AnEvent", bound=DeviceEvent)


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


class ProcessorClock:
    """The processor time of the whole process: another process on the same core does not show in it.

    Of the process and not of the thread: autograd chooses which thread runs a backward. That is right while torch
    computes with one thread; with more, their times would add up.
    """

    def __init__(self) -> None:
        self._marks_s = array("d")

    def mark(self) -> None:
        """Notes this moment."""
        self._marks_s.append(time.process_time())

    def seconds(self) -> Sequence[float]:
        """The noted moments."""
        return self._marks_s


CLOCK_NAMES: dict[type[Clock], str] = {
    CudaClock: "CUDA events",
    ProcessorClock: "processor time of the process",
    HostClock: "wall clock",
}
"""What a profile's `method.clock` says."""


def choose_clock(name: str, device: torch.device) -> type[Clock]:
    """What makes the clocks for a device: `name` is "auto", "processor" or "wall" (the last two are for CPUs)."""
    if device.type == "cuda":
        return CudaClock
    single = torch.get_num_threads() == 1
    return ProcessorClock if name == "processor" or (name == "auto" and single) else HostClock
