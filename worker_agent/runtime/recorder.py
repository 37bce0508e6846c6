"""Recorder: when each instruction ran and what was held after it. Its result is a lane of a Timeline."""

import time
from array import array
from collections.abc import Sequence
from typing import Protocol

import torch

from planner_service.core.schedule.instructions import Instruction
from planner_service.core.schedule.text import format_instruction
from planner_service.core.timeline import Lane


class Clock(Protocol):
    """Marks moments cheaply while work goes on; their times are read once it is done."""

    def mark(self) -> None:
        """Notes this moment."""

    def seconds(self) -> Sequence[float]:
        """The noted moments, in seconds since the clock's start."""


class HostClock:
    """The host's monotonic clock: for devices on which a call returns when its work is done."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._marks_s = array("d")

    def mark(self) -> None:
        """Notes this moment."""
        self._marks_s.append(time.perf_counter() - self._start_s)

    def seconds(self) -> Sequence[float]:
        """The noted moments."""
        return self._marks_s


class CudaClock:
    """Events in the device's current stream: the moments at which the device gets there, without waiting for it."""

    def __init__(self) -> None:
        self._start = self._event()
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Notes the moment at which the device has done everything before."""
        self._marks.append(self._event())

    def seconds(self) -> Sequence[float]:
        """The noted moments; waits for the device."""
        torch.cuda.synchronize()
        return [self._start.elapsed_time(mark) / 1000 for mark in self._marks]

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def clock_for(device: torch.device) -> Clock:
    """The clock that tells the truth about a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


class Recorder:
    """Two marks and a memory figure an instruction."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._instructions: list[Instruction] = []
        self._memory_bytes = array("q")

    def begin(self) -> None:
        """The next instruction starts."""
        self._clock.mark()

    def end(self, instruction: Instruction, memory_bytes: int) -> None:
        """It is done, and so much is held now."""
        self._clock.mark()
        self._instructions.append(instruction)
        self._memory_bytes.append(memory_bytes)

    def lane(self, *, rank: int, stage: int, replica: int) -> Lane:
        """All that was recorded, in whole nanoseconds: no clock is finer, and digits beyond cost their place."""
        seconds = [round(moment_s, 9) for moment_s in self._clock.seconds()]
        return Lane(
            rank=rank,
            stage=stage,
            replica=replica,
            instructions=tuple(format_instruction(i) for i in self._instructions),
            start_s=tuple(seconds[0::2]),
            end_s=tuple(seconds[1::2]),
            memory_bytes=tuple(self._memory_bytes),
        )
