"""Clocks that suit profiling: the time that the work took, not the time that others took from it."""

import time
from array import array
from collections.abc import Sequence

import torch

from worker_agent.runtime.recorder import Clock, CudaClock, HostClock


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
