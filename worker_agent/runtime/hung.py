"""Hung: detects ranks that neither end nor make progress, and ends them. A run that hangs fails, and reports why.

A rank gives a sign of life twice a second, even while it waits. If the signs cease, the process is stopped, or holds
the interpreter. If they continue without progress in work that waits for no other rank, the model hangs. The device
shows a rank's progress: a host runs ahead of a GPU, and then waits for it (`holdup`). Data and checkpoints may take as
long as the other ranks wait for them. A rank that waits for another one is not at fault, however long it waits.

Only time in which this monitor ran counts: after a suspended machine or a paused container, all ranks get their full
time again.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeplan.documents.stage_costs import StageCosts
from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Recompute,
    Update,
    microbatches_of,
)
from pipeplan.programs.program import Program, Stream
from pipeplan.programs.text import format_instruction
from worker_agent.engine.processes import polling
from worker_agent.engine.results import RankFailure, write
from worker_agent.runtime.job import RunJob, read_job
from worker_agent.runtime.status import ENDING, STARTING, Activity, Holdup, Status, holdup, read_status

SILENT_S = 10.0
"""After this time without a sign of life, a rank counts as hung."""

STARTING_S = 60.0
"""How long a rank may be silent before its first instruction, unless it is stopped: imports, on a busy disk."""

PREDICTED_TIMES = 100.0
"""A rank counts as hung if it finishes no instruction for longer than both `SILENT_S` and this many times the predicted
time of its unfinished instructions."""

_INTERVAL_S, _LONGEST_LOOK_S = 0.25, 1.0


@dataclass(slots=True)
class Seen:
    """A rank's newest change of state, and its time on the monitor's clock.

    `place` is its instruction, the start of that, its host's activity, and the instructions its device has finished.
    """

    pulse_s: float
    pulse_since_s: float
    place: tuple[int, float, int, int]
    place_since_s: float
    stopped_since_s: float | None = None


class Hunter:
    """Checks the ranks of this node, one check at a time."""

    def __init__(self, job: RunJob, here: Sequence[int], now_s: float) -> None:
        self._job = job
        self._here = tuple(here)
        self._begun_s = now_s
        self._last_s = now_s
        self._clock_s = 0.0
        self._seen: dict[int, Seen] = {}
        self._ended: set[int] = set()
        self._read: tuple[int, tuple[RunJob, Program]] | None = None
        self._first_batch: dict[int, int] = {}  # how many instructions a rank's first batch has

    @property
    def _begun(self) -> tuple[RunJob, Program]:
        """The job as its ranks have it: of several nodes only the first knows beforehand where it begins, and where a
        signal ends the run is known last.
        """
        changed_ns = self._job.directory.job.stat().st_mtime_ns
        if self._read is None or self._read[0] != changed_ns:
            begun = replace(read_job(self._job.directory.job), out=self._job.out)
            self._read = changed_ns, (begun, begun.program())
        return self._read[1]

    def look(self, now_s: float) -> None:
        """Ends hung ranks by a signal that cannot be ignored; before that, it writes their error for them."""
        self._clock_s += min(now_s - self._last_s, _LONGEST_LOOK_S)
        self._last_s = now_s
        for rank in self._here:
            if rank in self._ended or self._job.directory.result(rank).exists():
                continue
            status = read_status(self._job.directory.status(rank))
            if status is not None and status.pulse_s < self._begun_s:
                status = None  # of an earlier attempt
            process = status.process if status else _starting(rank)
            if process is None:
                continue
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                continue  # torchrun handles a rank that has ended

            place = (STARTING, 0.0, 0, 0)
            if status:
                place = (status.instruction, status.started_s, status.activity, status.finished)
            pulse_s = status.pulse_s if status else 0.0
            seen = self._seen.setdefault(rank, Seen(pulse_s, self._clock_s, place, self._clock_s))
            if seen.pulse_s != pulse_s:
                seen.pulse_s, seen.pulse_since_s = pulse_s, self._clock_s
            if seen.place != place:
                seen.place, seen.place_since_s = place, self._clock_s

            reason = self._reason(rank, status, seen, process)
            if reason is not None:
                self._ended.add(rank)
                write(self._job.directory.failure(rank), RankFailure(kind="hung", message=reason))
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def _reason(self, rank: int, status: Status | None, seen: Seen, process: int) -> str | None:
        """Why a rank is hung; None if it is not."""
        instruction = status.instruction if status else STARTING
        silent_s = self._clock_s - seen.pulse_since_s
        if instruction >= 0 and silent_s > SILENT_S:
            return f"hung: no sign of life for {silent_s:.0f} s"
        if instruction < 0:
            reason = self._reason_beside_stream(seen, silent_s, process)
            if reason is not None or status is None or instruction != ENDING:
                return reason

        busy_s = self._clock_s - seen.place_since_s
        if status is None or busy_s <= min(SILENT_S, self._job.timeout_s):
            return None
        stream = self._begun[1].streams[rank]
        held = holdup(status, stream.instructions)
        limit_s = self._limit_s(stream, held)
        if limit_s is None or busy_s <= limit_s:
            return None

        if held.activity is Activity.DATA:
            return f"hung: {busy_s:.0f} s at its data"
        if held.activity is Activity.CHECKPOINT:
            return f"hung: {busy_s:.0f} s at its checkpoint"
        if held.on_device:
            at = format_instruction(stream.instructions[held.unfinished.start])
            return f"hung: {busy_s:.0f} s in one instruction of its device, {at}, with its host"
        return f"hung: {busy_s:.0f} s in one instruction"

    def _reason_beside_stream(self, seen: Seen, silent_s: float, process: int) -> str | None:
        """Why a rank that is at no instruction is hung; None if it is not."""
        stopped = False  # by a signal, or a debugger
        with suppress(OSError):
            stopped = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"

        # A process that imports a large library gives no sign of life either. A stopped process is found sooner.
        if not stopped:
            seen.stopped_since_s = None
            is_silent = silent_s > STARTING_S
        else:
            if seen.stopped_since_s is None:
                seen.stopped_since_s = self._clock_s
            is_silent = self._clock_s - max(seen.stopped_since_s, seen.pulse_since_s) > SILENT_S
        if is_silent:
            return f"hung: no sign of life for {silent_s:.0f} s"

        # The others wait for it before its first instruction, but no longer than this.
        busy_s = self._clock_s - seen.place_since_s
        late = seen.place[0] == STARTING and busy_s > self._job.timeout_s
        where = "at its data" if seen.place[2] == Activity.DATA else "before its first instruction"
        return f"hung: {busy_s:.0f} s {where}" if late else None

    def _limit_s(self, stream: Stream, held: Holdup) -> float | None:
        """How long a rank may make no progress with its present work; None where it waits for others.

        The first batch may take as long as the others wait for it, because a model may be compiled in it.
        """
        if held.activity is Activity.PEER:
            return None
        if held.activity is not Activity.OWN:
            return self._job.timeout_s

        if stream.rank not in self._first_batch:
            begun, program = self._begun
            version = (begun.first_step + 1) * program.schedule.updates_a_batch(program.pipeline, stream.stage)
            numbered = enumerate(stream.instructions, 1)
            ends = (i for i, each in numbered if isinstance(each, Update) and each.version == version)
            self._first_batch[stream.rank] = next(ends, len(stream.instructions))
        if held.unfinished.start < self._first_batch[stream.rank]:
            return self._job.timeout_s

        unfinished = stream.instructions[held.unfinished.start : held.unfinished.stop]
        pipeline = self._begun[1].pipeline
        stages = [pipeline.stage_of(stream.stage, each.chunk) for each in unfinished]
        costs = [self._job.plan.costs[stage] for stage in stages]
        again_s = sum(
            own.recompute_s
            for own, stage, each in zip(costs, stages, unfinished, strict=True)
            if isinstance(each, Backward) and pipeline.recomputes_by_block(stage)
        )
        microbatch_s = costs[0].forward_s + costs[0].backward_s + costs[0].recompute_s
        predicted_s = max(sum(map(_predicted_s, costs, unfinished)) + again_s, microbatch_s)
        return min(max(SILENT_S, PREDICTED_TIMES * predicted_s), self._job.timeout_s)


@contextmanager
def hunting(job: RunJob, here: Sequence[int]) -> Iterator[None]:
    """While it is active, ranks that hang are ended."""
    hunter = Hunter(job, here, time.monotonic())
    with polling(lambda: hunter.look(time.monotonic()), _INTERVAL_S, name="hunter"):
        yield


def _predicted_s(costs: StageCosts, instruction: Instruction) -> float:
    """An upper bound of an instruction's predicted time: any part of a backward counts as the whole."""
    match instruction:
        case Forward():
            return costs.forward_s
        case Recompute():
            return costs.recompute_s
        case Backward() | BackwardInput() | BackwardWeight():
            return costs.backward_s * len(microbatches_of(instruction))
        case Update():
            return costs.update_s
        case _:
            return 0.0


def _starting(rank: int) -> int | None:
    """The process of a rank that has not reported yet: the child of this process with the rank's number."""
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            with suppress(OSError):
                if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
                    return int(child)
    return None
