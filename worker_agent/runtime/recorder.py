"""Recorder: the time of each instruction, and the memory after it. Its result is a lane of a Timeline.

Of a long run it keeps every instruction of the first and of the last batches, and reports the figures of each batch.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeplan.programs.instructions import Checkpoint, Instruction, is_compute
from pipeplan.programs.timeline import Lane
from worker_agent.engine.clocks import RunClock
from worker_agent.runtime.status import UNKNOWN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A batch's figures: its end, its seconds of compute, its peak bytes, and the bytes at its end.

    Bytes that cannot be counted are UNKNOWN_BYTES, here and in all figures of batches.
    """

    end_s: float
    busy_s: float
    peak_memory_bytes: int
    memory_bytes: int


@dataclass(slots=True)
class _Batch:
    """The instructions of a batch, and the bytes after each."""

    instructions: list[Instruction] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A batch whose times are known."""

    instructions: Sequence[Instruction]
    seconds: Sequence[float]
    memory_bytes: Sequence[int]

    def spent(self) -> Spent:
        spans = zip(self.instructions, self.seconds[0::2], self.seconds[1::2], strict=True)
        return Spent(
            end_s=self.seconds[-1],
            busy_s=sum(end_s - start_s for instruction, start_s, end_s in spans if is_compute(instruction)),
            peak_memory_bytes=UNKNOWN_BYTES if UNKNOWN_BYTES in self.memory_bytes else max(self.memory_bytes),
            memory_bytes=self.memory_bytes[-1],
        )


PROCESSOR_BATCHES = 1000
"""The number of batches at the start whose processor times are kept one by one."""


@dataclass(eq=False)
class Recorder:
    """Records two marks and a memory figure for every instruction.

    `closes` answers whether an instruction is its batch's last. `on_batch` receives the figures of each batch,
    `clock.lag` batches later. With `keep` at most that many batches are kept at the start, and as many at the end.
    `processor` reads the processor time of the process, where that is the time of its compute.
    """

    clock: RunClock
    closes: Callable[[Instruction], bool] = lambda _: False
    on_batch: Callable[[Spent], None] = lambda _: None
    keep: int | None = None
    processor: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        self._began_s = self._processor_s = 0.0
        self._by_batch_s = array("d")
        self._open: _Batch = _Batch()
        self._unread: deque[_Batch] = deque()
        self._first: list[_Kept] = []
        self._last: deque[_Kept] = deque(maxlen=self.keep)

    def begin(self) -> None:
        """The next instruction starts."""
        if self.processor is not None:
            self._began_s = self.processor()
        self.clock.mark()

    def end(self, instruction: Instruction, memory_bytes: int | None) -> None:
        """Records the instruction's end and the bytes after it; None: they cannot be counted."""
        self.clock.mark()
        if self.processor is not None and is_compute(instruction):
            self._processor_s += self.processor() - self._began_s
        batch = self._open
        batch.instructions.append(instruction)
        batch.memory_bytes.append(UNKNOWN_BYTES if memory_bytes is None else memory_bytes)
        if self.closes(instruction):
            if len(self._by_batch_s) < PROCESSOR_BATCHES:
                self._by_batch_s.append(self._processor_s)
            self._unread.append(batch)
            self._open = _Batch()
        # a run may resume from a checkpoint: all batches before it must be reported first
        allowed = 0 if isinstance(instruction, Checkpoint) else self.clock.lag
        while len(self._unread) > allowed:
            self._read_oldest()

    def lane(self, *, rank: int, stage: int, replica: int) -> Lane:
        """Everything recorded. What comes after the last batch, such as a checkpoint, counts as part of it.

        It has bytes only if they could be counted after every instruction.
        Times are in whole nanoseconds, as no clock is finer.
        """
        while self._unread:
            self._read_oldest()
        batches = [*self._first, *self._last, self._read(self._open)]
        seconds = [round(moment_s, 9) for batch in batches for moment_s in batch.seconds]
        memory_bytes = tuple(held for batch in batches for held in batch.memory_bytes)
        return Lane(
            rank=rank,
            stage=stage,
            replica=replica,
            instructions=tuple(one for batch in batches for one in batch.instructions),
            start_s=tuple(seconds[0::2]),
            end_s=tuple(seconds[1::2]),
            memory_bytes=() if UNKNOWN_BYTES in memory_bytes else memory_bytes,
        )

    def finished(self) -> int:
        """How many instructions the device has finished. Any thread may ask."""
        return self.clock.passed() // 2

    @property
    def processor_s(self) -> float | None:
        """Processor time of all compute, kept or not; None where it is not measured."""
        return None if self.processor is None else self._processor_s

    @property
    def first_processor_s(self) -> tuple[float, ...]:
        """Processor time of all compute until each of the first batches was through; empty where it is not measured."""
        return () if self.processor is None else tuple(self._by_batch_s)

    @property
    def first_instructions(self) -> int:
        """How many of the lane's instructions are of the batches at the start; 0 where all are kept."""
        return sum(len(batch.instructions) for batch in self._first)

    def _read_oldest(self) -> None:
        kept = self._read(self._unread.popleft())
        if self.keep is not None and len(self._first) < self.keep:
            self._first.append(kept)
        else:
            self._last.append(kept)
        self.on_batch(kept.spent())

    def _read(self, batch: _Batch) -> _Kept:
        seconds = array("d", self.clock.take(2 * len(batch.instructions)))
        return _Kept(batch.instructions, seconds, array("q", batch.memory_bytes))
