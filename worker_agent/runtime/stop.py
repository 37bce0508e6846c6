"""Stop: a signal ends a run with a checkpoint after a whole batch, the same batch on all ranks.

The launcher of any node notes the first SIGTERM or SIGINT in a file of the run's folder. The ranks look for it four
times a second, and tell each other through torch's store.

No rank may begin work that belongs to a later batch than the last one. The first stage decides which one that is,
because all batches begin there. It waits until every rank is known to ask, before each batch, whether it has decided.
The last batch is so far ahead that no rank has begun what only a longer run does. From then on all ranks execute the
streams of the shorter run.

    rank 0 asks before batch   5     6     7 (decides: 8 batches)    last: the eighth
    rank 1 asks before batch     5     6     7 (not yet)         ends after it, as a run of 8 batches does

A second signal ends the run at once.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it at run time only

from pipeplan.errors import EndedBySignalError, RunFailedError
from pipeplan.programs.instructions import Update
from pipeplan.programs.pipeline import pipeline_of
from pipeplan.programs.program import Program, Stream, short_batches
from pipeplan.simulation.predict import program_of
from worker_agent.engine.processes import polling
from worker_agent.runtime.job import RunDirectory, RunJob

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ASK = signal.SIGUSR1
"""Asks a run to stop as a first SIGTERM does, but never ends it at once: an agent may not be the only one who asks."""

_LOOK_S = 0.25
_ASKED, _READY, _STEP = "pipeplan/stop/asked", "pipeplan/stop/ready", "pipeplan/stop/step"


@contextmanager
def heeding_signals(directory: RunDirectory, tell: Callable[[str], None]) -> Iterator[None]:
    """While it is active, the first signal asks the ranks to stop, which `tell` receives, and the second ends the work.

    Raises EndedBySignalError at the second one. Outside of the main thread, which alone gets signals, it does nothing.
    """
    signals = 0

    def heed(number: int, _frame: FrameType | None) -> None:
        nonlocal signals
        asks = number == ASK
        if asks and directory.stop.exists():
            return
        signals += not asks
        number = signal.SIGTERM if asks else number
        name = signal.Signals(number).name
        if signals > 1:
            raise EndedBySignalError(f"ended at once by a second signal, {name}", number)
        directory.stop.write_text(str(number), encoding="utf-8")
        with suppress(RuntimeError):  # the signal came while a line was printed
            tell(f"{name}: the run ends with a checkpoint after the batch at hand; a second signal ends it at once")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, heed) for each in (*SIGNALS, ASK)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def require_not_stopped(directory: RunDirectory, stop_step: int | None, steps: int) -> None:
    """Raises EndedBySignalError if a signal has ended a run before its last step."""
    if stop_step is None:
        return
    number = int(directory.stop.read_text(encoding="utf-8"))
    name = signal.Signals(number).name
    raise EndedBySignalError(f"ended by {name} after step {stop_step} of {steps}, with a checkpoint", number)


def batches_ahead(job: RunJob) -> int:
    """How many batches before its end a run's streams begin to differ from those of a longer run.

    That is 0 with a flush. Without one, the stages no longer begin later batches while they complete the last ones.
    """
    few = short_batches(pipeline_of(job.plan, batches=1))
    short, longer = (
        program_of(job.plan, batches=batches, first_batch=job.first_step, among_stages=job.among_stages)
        for batches in (few, few + 1)
    )
    return few - min(_same_batches(short, one, other) for one, other in zip(short.streams, longer.streams, strict=True))


def _same_batches(program: Program, stream: Stream, other: Stream) -> int:
    """How many whole batches two streams have in common, from the first on."""
    batches = 0
    updates = program.schedule.updates_a_batch(program.pipeline, stream.stage)
    for one, two in zip(stream.instructions, other.instructions, strict=False):
        if one != two:
            break
        batches += closes_batch(one, updates, program.pipeline.chunks)
    return batches


def closes_batch(instruction: object, updates: int, chunks: int) -> bool:
    """Whether it is the last of a batch's `updates`, on the last of a rank's stages."""
    return isinstance(instruction, Update) and instruction.version % updates == 0 and instruction.chunk == chunks - 1


class StopWatch:
    """One rank's part in stopping. `decides` is true of the first replica of the first stage."""

    def __init__(self, job: RunJob, store: Store, *, decides: bool) -> None:
        self._job = job
        self._store = store
        self._decides = decides
        self._asks = self._decided = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it is active, this rank learns of a signal that any node has got."""
        with polling(self._look, _LOOK_S, name="stop"):
            yield

    def _look(self) -> None:
        if self._asks:
            return
        with suppress(RuntimeError):  # the store is gone: the run ends for another reason
            if self._job.directory.stop.exists():
                self._store.set(_ASKED, "")
            elif not self._store.check([_ASKED]):
                return
            self._asks = True  # before the others learn that it is
            self._store.add(_READY, 1)

    def last_batch(self, batch: int) -> int | None:
        """How many batches the run has, now that it stops early, once that is decided; None: as many as before.

        The rank asks before it begins what comes after `batch` batches. It is answered once.
        """
        if not self._asks or self._decided:
            return None
        ahead = batches_ahead(self._job)
        if not self._decides:
            if not self._store.check([_STEP]):
                return None
            last = int(self._store.get(_STEP))
        elif self._store.add(_READY, 0) < self._job.plan.workers:
            return None
        else:
            # The others are at most `ahead` batches ahead of this rank, and asked before those batches.
            last = min(batch + 2 * ahead + 1, self._job.steps)
            self._store.set(_STEP, str(last))
        self._decided = True
        if last == self._job.steps:
            return None
        if batch > last - ahead:
            raise RunFailedError(f"cannot stop after step {last}: this rank is at step {batch} already")
        return last
