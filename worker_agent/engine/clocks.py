"""Clocks: the time that work takes on a device, without the time that other programs take from it where possible."""

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from platform import node
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist


class Clock(Protocol):
    """Marks moments cheaply while work continues; their times are read once it is done."""

    def mark(self) -> None:
        """Notes this moment."""

    def seconds(self) -> Sequence[float]:
        """The noted moments, in seconds since the clock's start."""


class RunClock(Clock, Protocol):
    """A clock for long work. After `lag` further batches a batch's marks can be read without waiting."""

    lag: int

    def take(self, marks: int) -> Sequence[float]:
        """The seconds of the oldest `marks` marks, which are then forgotten."""

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
        self._marks_s.append(time.perf_counter() - self._start_s)

    def seconds(self) -> Sequence[float]:
        return self._marks_s

    def take(self, marks: int) -> Sequence[float]:
        """The oldest moments, which are then forgotten."""
        self._taken += marks
        taken_s, self._marks_s = self._marks_s[:marks], self._marks_s[marks:]
        return taken_s

    def passed(self) -> int:
        """All marks that were made; briefly too many while `take` runs."""
        return self._taken + len(self._marks_s)


class DeviceEvent(Protocol):
    """A position in a device's stream, as torch's events are."""

    def query(self) -> bool:
        """Whether the device has passed it."""


AnEvent = TypeVar("AnEvent", bound=DeviceEvent)


class Events(Generic[AnEvent]):
    """Events in the order in which the device reaches them. One thread adds and takes; any may ask how many passed."""

    def __init__(self) -> None:
        self._kept: list[AnEvent] = []
        self._taken = 0
        self._passed = 0
        self._lock = threading.Lock()

    def add(self, event: AnEvent) -> None:
        self._kept.append(event)

    def oldest(self, count: int | None = None) -> Sequence[AnEvent]:
        """The oldest `count` events that were not taken, or all of them."""
        return self._kept[:count]

    def take(self, count: int) -> None:
        """Forgets the oldest `count` events. The device must have passed them."""
        with self._lock:
            self._kept = self._kept[count:]
            self._taken += count
            self._passed = max(self._passed, self._taken)

    def passed(self) -> int:
        """How many events the device has passed, of all that were ever added."""
        with self._lock:
            with suppress(RuntimeError):  # a device that failed: the host's own next call reports it
                while self._passed < self._taken + len(self._kept) and self._kept[self._passed - self._taken].query():
                    self._passed += 1
            return self._passed


class CudaClock:
    """Events in the device's current stream: the moments at which the device reaches them. Marking never waits."""

    lag = 2

    def __init__(self, start_s: float | None = None) -> None:
        torch.cuda.synchronize()
        self._later_s = 0.0 if start_s is None else time.perf_counter() - start_s
        self._start = self._event()
        self._marks: Events[torch.cuda.Event] = Events()

    def mark(self) -> None:
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
        return self._marks.passed()

    def _since_start(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        return [self._later_s + self._start.elapsed_time(mark) / 1000 for mark in marks]

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def clock_for(device: torch.device, start_s: float | None = None) -> HostClock | CudaClock:
    """The clock that shows when a device did its work. `start_s` is its zero on the host's clock, by default now."""
    return CudaClock(start_s) if device.type == "cuda" else HostClock(start_s)


def common_start_s() -> float:
    """A moment that has just passed, by this node's clock, the same for all ranks of the node.

    With a common zero, no timeline shows a receive that ends before its send on another rank. Between nodes the moments
    differ by as much as the nodes leave a barrier at different times.
    """
    dist.barrier()
    moments: list[tuple[str, float]] = [("", 0.0)] * dist.get_world_size()
    dist.all_gather_object(moments, (here(), time.perf_counter()))
    return min(moment_s for its, moment_s in moments if its == here())


def here() -> str:
    """A text that identifies this node among all nodes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else node()


class ProcessorClock:
    """The processor time of the whole process: another process on the same core does not count.

    It covers the process and not one thread, because autograd chooses the thread that runs a backward. It is right
    only while torch computes with one thread; with several, their times would add up.
    """

    def __init__(self) -> None:
        self._marks_s = array("d")

    def mark(self) -> None:
        self._marks_s.append(time.process_time())

    def seconds(self) -> Sequence[float]:
        return self._marks_s


CLOCK_NAMES: dict[type[Clock], str] = {
    CudaClock: "CUDA events",
    ProcessorClock: "processor time of the process",
    HostClock: "wall clock",
}
"""The values of a profile's `method.clock`."""


def processor_time(device: torch.device) -> Callable[[], float] | None:
    """Reads the processor time of compute on a device; None for a GPU, and if the times of several threads add up."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else None


def choose_clock(name: str, device: torch.device) -> type[Clock]:
    """The class of clock for a device. `name` is "auto", "processor" or "wall"; the last two are for CPUs."""
    if device.type == "cuda":
        return CudaClock
    single = torch.get_num_threads() == 1
    return ProcessorClock if name == "processor" or (name == "auto" and single) else HostClock
