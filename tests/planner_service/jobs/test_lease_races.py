"""Many agents at once on one real database: every job has one owner, none is lost, and it is never locked."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.leases import race
from pipeplan.protocol.jobs import Completion, Heartbeat, LeaseRequest, Progress
from planner_service.jobs import service as jobs
from planner_service.platform.context import Context
from planner_service.platform.database import Database
from planner_service.platform.listing import Cut
from tests.planner_service.answers import halve
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import PROFILE_RESULT, PROFILE_TASK

AGENTS = 8
JOBS = 50


def _work(context: Context, agent: str, start: threading.Barrier) -> list[str]:
    """Takes and completes jobs until there are none; returns those that it owned."""
    start.wait()
    owned = []
    while lease := jobs.lease(context, LeaseRequest(agent=agent)):
        owned.append(lease.job.id)
        progress = Progress(done=1, total=1)
        jobs.heartbeat(context, lease.job.id, Heartbeat(token=lease.token, progress=progress))
        jobs.complete(context, lease.job.id, Completion(token=lease.token, result=PROFILE_RESULT))
    return owned


def _run_agents(contexts: list[Context]) -> Counter[str]:
    start = threading.Barrier(AGENTS)
    with ThreadPoolExecutor(AGENTS) as pool:
        workers = [pool.submit(_work, contexts[i % len(contexts)], f"agent-{i}", start) for i in range(AGENTS)]
        return Counter(job_id for worker in workers for job_id in worker.result())


@pytest.mark.each_case
def test_every_job_has_one_owner_among_threads(context: Context) -> None:
    expected = {jobs.enqueue(context, PROFILE_TASK).id for _ in range(JOBS)}
    owners = _run_agents([context])
    assert set(owners) == expected
    assert set(owners.values()) == {1}
    assert {job.state for job in jobs.newest(context, Cut(limit=200)).items} == {"succeeded"}


@pytest.mark.each_case
def test_every_job_has_one_owner_among_services_on_one_database(
    context: Context, database_url: str, clock: Clock
) -> None:
    """Two databases have a lock each, as two processes would: only the database's own are between them."""
    other = Context(database=Database(database_url), solve=halve, now=clock)
    expected = {jobs.enqueue(context, PROFILE_TASK).id for _ in range(JOBS)}
    owners = _run_agents([context, other])
    other.database.close()
    assert set(owners) == expected
    assert set(owners.values()) == {1}


@pytest.mark.each_case
def test_processes_that_are_killed_at_any_moment_lose_no_job_and_none_has_two_owners(
    database_url: str, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    outcome = race(database_url, logs, count=200, processes=4, kills=4)
    assert outcome.kills > 0
    found = (outcome.succeeded, outcome.lost, outcome.double, outcome.locked, outcome.errors)
    assert found == (200, 0, 0, 0, 0)
