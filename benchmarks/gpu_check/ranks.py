"""Ranks: processes that execute one job after another, and so start torch and its device only once.

They are spawned, not forked: a process that has asked for the number of GPUs has no child that can use one.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Self

import torch.distributed as dist

from worker_agent.engine.results import RankResult, read_result
from worker_agent.runtime.job import RunJob, write_job
from worker_agent.runtime.rank import run_rank
from worker_agent.runtime.status import StatusWriter

LAST_WORDS_S = 3.0
"""How long the other ranks may run after one has failed, because they may wait for it."""


@dataclass(frozen=True, slots=True)
class _Worker:
    process: SpawnProcess
    jobs: Connection


class Ranks:
    """As many processes as the largest job so far has ranks. After a job that fails they are started anew."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def run(self, job: RunJob, *, within_s: float) -> tuple[RankResult, ...]:
        """Every rank's result. Raises RuntimeError with the failing ranks' tracebacks, or if they take longer."""
        write_job(job)
        world_size = job.plan.workers
        store = dist.TCPStore(  # type: ignore[attr-defined]  # torch re-exports it at run time only
            "127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False
        )
        self._workers += [_started() for _ in range(world_size - len(self._workers))]
        for rank, worker in enumerate(self._workers[:world_size]):
            worker.jobs.send((job, rank, world_size, store.port))
        failed = _answers(self._workers[:world_size], within_s)
        if failed:
            self._end()
            raise RuntimeError("\n".join(failed))
        found = [read_result(job.directory.result(rank)) for rank in range(world_size)]
        return tuple(result for result in found if result is not None)

    def _end(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.jobs.close()
        self._workers = []


def _started() -> _Worker:
    context = multiprocessing.get_context("spawn")
    jobs, there = context.Pipe()
    process = context.Process(target=_work, args=(there,), daemon=True)
    process.start()
    there.close()
    return _Worker(process, jobs)


def _answers(workers: Sequence[_Worker], within_s: float) -> list[str]:
    """Waits for all; returns why ranks failed, those first that failed first."""
    running = {worker.jobs: rank for rank, worker in enumerate(workers)}
    failed: list[str] = []
    end_s = time.monotonic() + within_s
    while running and (left_s := end_s - time.monotonic()) > 0:
        for jobs in connection.wait(list(running), left_s):
            rank = running.pop(jobs)  # type: ignore[call-overload]  # nothing else is waited for
            answer = _answer(workers[rank])
            if answer:
                failed.append(f"rank {rank}: {answer}")
                end_s = min(end_s, time.monotonic() + LAST_WORDS_S)
    return failed + [f"rank {rank} did not end, and was killed" for rank in running.values()]


def _answer(worker: _Worker) -> str | None:
    try:
        answer: str | None = worker.jobs.recv()
    except EOFError:
        worker.process.join()
        return f"its process ended with status {worker.process.exitcode}"
    return answer


def _work(jobs: Connection) -> None:
    """A process: executes what comes, and answers None, or with a traceback."""
    while True:
        try:
            job, rank, world_size, port = jobs.recv()
        except EOFError:
            return
        try:
            run_as(job, rank, world_size, port)
        except BaseException:  # the launcher learns of whatever ends a rank
            jobs.send(traceback.format_exc())
            return
        jobs.send(None)


def run_as(job: RunJob, rank: int, world_size: int, port: int) -> None:
    """Executes a rank of a job in this process; the ranks meet in the store at a port of this machine."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    run_rank(job, rank, rank, StatusWriter(job.directory.status(rank)))
