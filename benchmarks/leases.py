"""Leases raced: processes that take and complete jobs on one database, killed at random, until all jobs have ended.

    python -m benchmarks.leases [--jobs 10000] [--processes 8] [--kills 40]

Every process writes down what it was given and what the service acknowledged. In the end every job must have succeeded
(none lost), have been acknowledged to no more than one owner, and no two leases may have had the same number (none
double); and the database must never have said that it is locked.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import func, select

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.plan import Answer
from pipeplan.documents.profile import Device
from pipeplan.errors import LeaseLostError, ServiceError
from pipeplan.planners.problem import PlanningProblem
from pipeplan.protocol.jobs import Completion, LeaseRequest, LinksResult, LinksTask
from planner_service.jobs import service as jobs
from planner_service.jobs import store as storage
from planner_service.jobs.kinds import register
from planner_service.jobs.measurements import LINKS
from planner_service.platform import tables
from planner_service.platform.context import Context
from planner_service.platform.database import Database
from planner_service.platform.migrations import upgrade
from tests.planner_service.postgresql import running

LEASE_S = 2.0
SEED = 7
RESULT = LinksResult(
    cluster=Cluster(device=Device(name="any", memory_bytes=1), levels=(Level(size=1, bandwidth_bytes_per_s=1.0),))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a race. `kills` are killed processes, `again` leases on a job after its first."""

    jobs: int
    succeeded: int
    lost: int
    double: int
    locked: int
    errors: int
    kills: int
    again: int
    elapsed_s: float
    longest_lease_s: float


def race(url: str, folder: Path, *, count: int, processes: int, kills: int) -> Outcome:
    """Enqueues so many jobs and races for them; the processes that are killed are replaced."""
    database = Database(url)
    upgrade(database)
    _enqueue(database, count)
    started_s = time.perf_counter()
    killed = _run(url, folder, database, processes=processes, kills=kills)
    elapsed_s = time.perf_counter() - started_s
    outcome = _judge(database, folder, count=count, kills=killed, elapsed_s=elapsed_s)
    database.close()
    return outcome


def _enqueue(database: Database, count: int) -> None:
    now = datetime.now(UTC)
    with database.write() as connection:
        for number in range(count):
            storage.add(
                connection,
                job_id=f"{number:032x}",
                task=LinksTask(devices=1),
                now=now,
            )


def _run(url: str, folder: Path, database: Database, *, processes: int, kills: int) -> int:
    """Keeps a number of processes at work until no job is left; returns how many it killed."""
    chance = random.Random(SEED)
    workers: list[subprocess.Popen[bytes]] = []
    started = killed = 0
    while True:
        workers = [worker for worker in workers if worker.poll() is None]
        left = _left(database)
        if not left and not workers:
            return killed
        while left and len(workers) < processes:
            command = [sys.executable, "-m", "benchmarks.leases", "--work", url, str(folder / f"{started}.log")]
            workers.append(subprocess.Popen(command))
            started += 1
        time.sleep(chance.uniform(0.1, 0.5))
        alive = [worker for worker in workers if worker.poll() is None]
        if alive and killed < kills and left and started > processes // 2:
            victim = chance.choice(alive)
            if (folder / f"{started - 1}.log").exists():
                victim.send_signal(signal.SIGKILL)
                victim.wait()
                killed += 1


def _left(database: Database) -> int:
    query = select(func.count()).where(tables.jobs.c.state.in_(("queued", "leased")))
    with database.read() as connection:
        return connection.execute(query).scalar_one()


def _judge(database: Database, folder: Path, *, count: int, kills: int, elapsed_s: float) -> Outcome:
    lines = [line.split() for path in folder.glob("*.log") for line in path.read_text().splitlines()]
    leases = Counter((line[1], line[2]) for line in lines if line[0] == "leased" and len(line) == 4)
    acknowledged = Counter(line[1] for line in lines if line[0] == "done")
    waits_s = [float(line[3]) for line in lines if line[0] == "leased" and len(line) == 4]
    with database.read() as connection:
        query = select(func.count()).where(tables.jobs.c.state == "succeeded")
        succeeded = connection.execute(query).scalar_one()
        ended = select(tables.jobs.c.id).where(tables.jobs.c.state == "succeeded")
        known = set(connection.execute(ended).scalars())
        again = connection.execute(select(func.sum(tables.jobs.c.fence - 1))).scalar_one()
    return Outcome(
        jobs=count,
        succeeded=succeeded,
        lost=count - succeeded + sum(job_id not in known for job_id in acknowledged),
        double=sum(n > 1 for n in leases.values()) + sum(n > 1 for n in acknowledged.values()),
        locked=sum(line[0] == "error" and "locked" in line for line in lines),
        errors=sum(line[0] == "error" for line in lines),
        kills=kills,
        again=int(again),
        elapsed_s=elapsed_s,
        longest_lease_s=max(waits_s, default=0.0),
    )


def work(url: str, log: Path) -> None:
    """One process: takes and completes jobs until none is left, also with other processes."""
    register(LINKS)
    context = Context(database=Database(url), solve=_no_planner, lease_s=LEASE_S, max_attempts=1000)
    with log.open("a", buffering=1, encoding="utf-8") as said:
        while _left(context.database):
            try:
                _one(context, said.write, log.stem)
            except LeaseLostError:
                said.write("late\n")
            except ServiceError as error:
                said.write(f"error {' '.join(str(error).split())}\n")
    context.database.close()


def _one(context: Context, say: Callable[[str], object], name: str) -> None:
    asked_s = time.perf_counter()
    lease = jobs.lease(context, LeaseRequest(agent=f"process-{name}"))
    if lease is None:
        time.sleep(0.05)
        return
    waited_s = time.perf_counter() - asked_s
    say(f"leased {lease.job.id} {lease.job.fence} {waited_s:.6f}\n")
    jobs.complete(context, lease.job.id, Completion(token=lease.token, result=RESULT))
    say(f"done {lease.job.id}\n")


def _no_planner(planner: str, problem: PlanningProblem) -> Answer:
    raise LookupError("nothing is planned here")


@contextmanager
def databases(folder: Path) -> Iterator[dict[str, str]]:
    """The URL of a new database of each kind."""
    with ExitStack() as stack:
        server = stack.enter_context(running())
        name = server.empty_database()
        yield {"SQLite": f"sqlite:///{folder / 'leases.sqlite3'}", "PostgreSQL": server.url(name)}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--work", nargs=2, metavar=("URL", "LOG"))
    asked = parser.parse_args()
    if asked.work:
        work(asked.work[0], Path(asked.work[1]))
        return
    print(f"{asked.jobs} jobs, {asked.processes} processes, {os.cpu_count()} cores")
    print("database    succeeded  lost  double  locked  errors  kills  again  seconds  leases/s  longest lease, s")
    with tempfile.TemporaryDirectory() as folder, databases(Path(folder)) as urls:
        for name, url in urls.items():
            logs = Path(folder) / name
            logs.mkdir()
            o = race(url, logs, count=asked.jobs, processes=asked.processes, kills=asked.kills)
            print(
                f"{name:10}  {o.succeeded:9}  {o.lost:4}  {o.double:6}  {o.locked:6}  {o.errors:6}  {o.kills:5}  "
                f"{o.again:5}  {o.elapsed_s:7.1f}  {o.jobs / o.elapsed_s:8.0f}  {o.longest_lease_s:8.3f}"
            )


if __name__ == "__main__":
    main()
