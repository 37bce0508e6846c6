"""Status: where each rank is, in a small file that outlives it. A rank writes it, the launcher reads it.

`holdup` derives a rank's position from its status: the first instruction that its device has not finished. On a GPU
the host launches instructions and runs ahead. While the device has unfinished ones, the first of these is the rank's
position, and the host's does not matter. On a CPU, host and device finish each instruction together.

Nothing here imports torch: a rank gives its first sign of life before that import (`start`).
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from enum import IntEnum
from pathlib import Path
from typing import assert_never

from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Checkpoint,
    Forward,
    Instruction,
    Recompute,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    ReduceNorm,
    ReduceTied,
    SendActivation,
    SendGradient,
    StartReduce,
    Update,
)

_FORMAT = struct.Struct("<qdqdqdqddqqqq")
"""A Status, field by field."""

_PLACE, _BATCH, _LOSS, _PULSE, _MEASURED, _ACTIVITY, _FINISHED = 0, 16, 24, 40, 48, 88, 96
"""The offsets in the file of the instruction, the batch, its loss, the pulse, the measurements, the activity, and the
number of finished instructions."""

PULSE_S = 0.5
"""How often a rank gives a sign of life."""

STARTING, MEETING, ENDING = -1, -2, -3
"""The states of a rank that is at no instruction: before the first one, at work of its own (`STARTING`) or waiting for
all others (`MEETING`); after the last one (`ENDING`)."""

EVERYTHING = 2**63 - 1
"""The number of finished instructions of a device that finishes its work at once."""

UNKNOWN_BYTES = -1
"""Stands for bytes of which not all can be counted."""


class Activity(IntEnum):
    """A rank's activity at an instruction: its own work, or a wait."""

    OWN = 0
    DATA = 1
    CHECKPOINT = 2
    PEER = 3


def stop_path(folder: Path) -> Path:
    """The file with the number of the signal that asks the ranks to stop."""
    return folder / "stop"


def status_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.status"


@dataclass(frozen=True, slots=True)
class Status:
    """Where a rank is, and what its process has measured. Moments are on the node's monotonic clock.

    `instruction` is the index of the rank's instruction (below 0: none), which began at `started_s`. `batches_done`
    counts those of the whole run, and the newest has this `loss`. `pulse_s` is the last sign of life. The process has
    measured `measured_batches`, the last of which ended `end_s` after the start; `busy_s` are seconds of compute in
    them. Bytes are those at the end of the last one, and the peak (UNKNOWN_BYTES where not all can be counted).
    `activity` is the host's work at its instruction, `OWN` for the instruction itself (`holdup`), and `finished` the
    number of instructions that the device has finished.
    """

    instruction: int
    started_s: float
    batches_done: int
    loss: float
    process: int
    pulse_s: float
    measured_batches: int = 0
    end_s: float = 0.0
    busy_s: float = 0.0
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    activity: int = Activity.OWN
    finished: int = EVERYTHING

    def packed(self) -> bytes:
        return _FORMAT.pack(*astuple(self))


class StatusWriter:
    """A rank's own status, in memory shared with the file: a write costs about a microsecond and survives a kill.

    A thread gives signs of life. A process that is stopped, or holds the interpreter, gives none; one that computes or
    waits for long does. The same thread notes how far the device is.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        now_s = time.monotonic()
        aside = path.with_suffix(".part")
        status = Status(STARTING, now_s, 0, float("nan"), os.getpid(), now_s)
        aside.write_bytes(status.packed())
        with aside.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)
        aside.replace(path)
        self._finished: Callable[[], int] = lambda: EVERYTHING
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()

    def at(self, instruction: int) -> None:
        """The rank starts this instruction of its stream, or comes to `STARTING`, `MEETING` or `ENDING`."""
        struct.pack_into("<qd", self._memory, _PLACE, instruction, time.monotonic())

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """While it is active, the status reports this activity of the host."""
        struct.pack_into("<q", self._memory, _ACTIVITY, activity)
        try:
            yield
        finally:
            struct.pack_into("<q", self._memory, _ACTIVITY, Activity.OWN)

    def follow(self, finished: Callable[[], int]) -> None:
        """From now on, `finished` says how many instructions the device has finished. Another thread calls it."""
        self._finished = finished

    def updated(self, batches_done: int) -> None:
        struct.pack_into("<q", self._memory, _BATCH, batches_done)

    def note_loss(self, loss: float) -> None:
        struct.pack_into("<d", self._memory, _LOSS, loss)

    def measured(self, batches: int, *, end_s: float, busy_s: float, memory_bytes: int, peak_memory_bytes: int) -> None:
        struct.pack_into("<qddqq", self._memory, _MEASURED, batches, end_s, busy_s, memory_bytes, peak_memory_bytes)

    def _pulse(self) -> None:
        pause = threading.Event()
        while True:
            struct.pack_into("<q", self._memory, _FINISHED, self._finished())
            struct.pack_into("<d", self._memory, _PULSE, time.monotonic())
            pause.wait(PULSE_S)


def read_status(path: Path) -> Status | None:
    """A rank's last status; None if it has not started."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < _FORMAT.size:
        return None
    return Status(*_FORMAT.unpack_from(content))


@dataclass(frozen=True, slots=True)
class Holdup:
    """What a rank is at: its unfinished instructions, by their places in the stream, and what it does.

    `unfinished` is empty before the first instruction. `on_device`: the host has gone on to a later instruction.
    """

    unfinished: range
    activity: Activity
    on_device: bool = False


def holdup(status: Status, instructions: Sequence[Instruction]) -> Holdup:
    """A rank's current instruction."""
    host = len(instructions) if status.instruction == ENDING else status.instruction
    if status.finished < host:
        unfinished = range(status.finished, min(host + 1, len(instructions)))
        return Holdup(unfinished, activity_of(instructions[status.finished]), on_device=True)
    if status.instruction < 0:
        usual = Activity.OWN if status.instruction == STARTING else Activity.PEER
        return Holdup(range(0), Activity(status.activity) or usual)
    return Holdup(range(host, host + 1), Activity(status.activity) or activity_of(instructions[host]))


def activity_of(instruction: Instruction) -> Activity:
    """What a rank does at an instruction; the data that a forward reads is left aside."""
    match instruction:
        case Forward() | Backward() | Recompute() | BackwardInput() | BackwardWeight() | Update():
            return Activity.OWN
        case SendActivation() | RecvActivation() | SendGradient() | RecvGradient():
            return Activity.PEER
        case StartReduce() | ReduceGradients() | ReduceTied() | ReduceNorm():
            return Activity.PEER
        case Checkpoint():
            return Activity.CHECKPOINT
        case _:
            assert_never(instruction)
