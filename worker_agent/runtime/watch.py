"""Watch: follows the ranks' status files while they run, and reports progress."""

import math
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

from worker_agent.runtime.job import RunJob
from worker_agent.runtime.status import read_status

_INTERVAL_S = 0.2


@contextmanager
def watching(job: RunJob, on_progress: Callable[[int, float], None], here: Container[int]) -> Iterator[None]:
    """Calls `on_progress` with the batches done on the last stage and their newest loss, whenever there are more.

    The first worker of the last stage is followed where it runs: nothing is told on nodes whose ranks are others.
    """
    last_stage = job.plan.depth // job.plan.chunks - 1  # or the rank's stage before, of which it is the last chunk
    rank = next(r for r, worker in enumerate(job.plan.placement) if worker.stage == last_stage)
    if rank not in here:
        yield
        return
    path = job.directory.status(rank)
    stop = threading.Event()

    def report(done: int) -> int:
        status = read_status(path)
        if status is None or status.batches_done <= done or math.isnan(status.loss):
            return done
        on_progress(status.batches_done, status.loss)
        return status.batches_done

    def follow() -> None:
        done = job.first_step
        while not stop.wait(_INTERVAL_S):
            done = report(done)
        report(done)

    thread = threading.Thread(target=follow, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
