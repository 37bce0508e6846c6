"""Runs a job's ranks as real processes over gloo, from a fork server that has torch loaded: a run takes a second."""

import os
import traceback
from multiprocessing.connection import wait

import torch.distributed as dist

from tests.forked import fork_server
from worker_agent.engine.results import RankResult, read_result
from worker_agent.runtime.job import RunJob, write_job
from worker_agent.runtime.rank import run_rank
from worker_agent.runtime.status import StatusWriter


def run_ranks(job: RunJob) -> tuple[RankResult, ...]:
    """Every rank's result. Fails with the first failing rank's traceback."""
    write_job(job)
    world_size = job.plan.workers
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch re-exports it at run time only
        "127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False
    )
    context = fork_server()
    processes = [
        context.Process(target=_run, args=(job, rank, world_size, store.port), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    going = {process.sentinel: process for process in processes}
    while going and all(process.exitcode in (None, 0) for process in processes):
        for sentinel in wait(list(going)):
            del going[sentinel]  # type: ignore[arg-type]
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    for process in processes:
        process.kill()
    tracebacks = [job.directory.root / f"traceback-{rank}.txt" for rank in failed]
    assert not failed, "\n".join(file.read_text() if file.exists() else "not ended" for file in tracebacks)
    found = [read_result(job.directory.result(rank)) for rank in range(world_size)]
    return tuple(result for result in found if result is not None)


def _run(job: RunJob, rank: int, world_size: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    try:
        run_rank(job, rank, rank, StatusWriter(job.directory.status(rank)))
    except BaseException:
        (job.directory.root / f"traceback-{rank}.txt").write_text(traceback.format_exc())
        raise
