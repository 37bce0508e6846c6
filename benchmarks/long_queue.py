"""Polls for work while the queue is long: what one takes, and what an enqueue takes beside six agents that poll.

    python -m benchmarks.long_queue [--jobs 100000]

Every queue has so many jobs: all with the same needs, with 2,500 different ones, or each with its own. One agent that
polls can do none of them, the other those of every hundredth need. What it takes it ends before it polls again, beside
the clock. Processor time is that of the thread that polls, and of all processes of PostgreSQL.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import TypeVar

from sqlalchemy import delete, insert

from pipeplan.protocol.agents import Registration
from pipeplan.protocol.jobs import Failure, LeaseRequest, LinksTask
from planner_service.agents import needs
from planner_service.agents import service as agents
from planner_service.agents.needs import Needs
from planner_service.jobs import service as jobs
from planner_service.jobs.kinds import register
from planner_service.jobs.measurements import LINKS
from planner_service.plans.solver import solve_here
from planner_service.platform.context import Context
from planner_service.platform.database import Database
from planner_service.platform.migrations import upgrade
from planner_service.platform.tables import jobs as table
from tests.planner_service.postgresql import PostgreSQL, running

POLLS = range(100)
POLLERS = 6
ENQUEUES = 50
ABLE = "able"
ABLE_OF = 100
"""The agent that some jobs name, and how many needs there are for each of them."""
AT_ONCE = 2000


T = TypeVar("T")


@contextmanager
def _contexts() -> Iterator[tuple[dict[str, Context], PostgreSQL]]:
    with tempfile.TemporaryDirectory() as folder, running(durable=True) as server:
        urls = {
            "SQLite": f"sqlite:///{Path(folder) / 'queue.sqlite3'}",
            "PostgreSQL": server.url(server.new_database()),
        }
        made = {name: Context(database=Database(url), solve=solve_here) for name, url in urls.items()}
        for context in made.values():
            upgrade(context.database)
        yield made, server
        for context in made.values():
            context.database.close()


def _fill(context: Context, count: int, distinct: int) -> None:
    """A queue of so many jobs, none of which names an agent that polls here."""
    now = datetime.now(UTC)
    task = LinksTask(devices=1).model_dump_json()
    with context.database.write() as connection:
        connection.execute(delete(table))
    for first in range(0, count, AT_ONCE):
        rows = []
        for index in range(first, min(first + AT_ONCE, count)):
            need = index % distinct
            named = (f"other-{need}", ABLE) if need % ABLE_OF == 0 else (f"other-{need}",)
            needs_id, text = needs.stored(Needs(agents=named))
            row = {"id": f"{index:032x}", "kind": "links", "task": task, "state": "queued", "attempts": 0}
            rows.append(row | {"needs_id": needs_id, "needs": text, "created_at": now, "updated_at": now})
        with context.database.write() as connection:
            connection.execute(insert(table), rows)


def _ask(context: Context, name: str) -> LeaseRequest:
    told = Registration(
        name=name,
        instance=f"instance-{name}",
        host=name,
        address="127.0.0.1",
        port=1,
        devices=1,
        device_name="any",
        memory_bytes=1,
        torch_version="2",
        version="1",
    )
    agents.register(context, told)
    return LeaseRequest(agent=name, instance=told.instance)


@dataclass(frozen=True, slots=True)
class Spent:
    """Milliseconds of one action: this thread's processor time, that of PostgreSQL's processes, and on the clock."""

    thread_ms: float
    server_ms: float
    clock_ms: float


def _timed(server: PostgreSQL, act: Callable[[], T]) -> tuple[T, Spent]:
    start = _server_s(server), time.thread_time(), time.perf_counter()
    answer = act()
    clock_s, thread_s = time.perf_counter() - start[2], time.thread_time() - start[1]
    spent_s = thread_s, _server_s(server) - start[0], clock_s
    return answer, Spent(*(1e3 * each_s for each_s in spent_s))


def _server_s(server: PostgreSQL) -> float:
    """Processor seconds of all processes of the server that run."""
    postmaster = (server.folder / "data" / "postmaster.pid").read_text().split()[0]
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    return 1e-9 * sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in (postmaster, *children))


def _print(name: str, acts: Sequence[Spent]) -> None:
    both = quantiles((act.thread_ms + act.server_ms for act in acts), n=100)
    clock = quantiles((act.clock_ms for act in acts), n=100)
    parts = median(act.thread_ms for act in acts), median(act.server_ms for act in acts)
    cells = (*parts, both[49], both[98], clock[49], clock[98])
    print(f"| {name} | {len(acts)} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)


def _measure(server: PostgreSQL, context: Context, queue: str, count: int, distinct: int) -> None:
    _fill(context, count, distinct)
    none = _ask(context, "none")
    _print(f"{queue}: a poll that can find none", [_timed(server, lambda: jobs.lease(context, none))[1] for _ in POLLS])

    able = _ask(context, ABLE)
    found: dict[bool, list[Spent]] = {True: [], False: []}
    while len(found[True]) < len(POLLS):
        lease, spent = _timed(server, lambda: jobs.lease(context, able))
        found[lease is not None].append(spent)
        if lease is not None:
            jobs.fail(context, lease.job.id, Failure(token=lease.token, error="not wanted"))
    _print(f"{queue}: a poll that finds one", found[True])
    if len(found[False]) > 1:
        _print(f"{queue}: a poll that will find one later", found[False])

    over = threading.Event()

    def poll(request: LeaseRequest) -> None:
        while not over.wait(0.2):
            jobs.lease(context, request)

    pollers = [threading.Thread(target=poll, args=(_ask(context, f"poller-{index}"),)) for index in range(POLLERS)]
    for poller in pollers:
        poller.start()
    task = LinksTask(devices=1, agents=("nobody",))
    enqueued = [_timed(server, lambda: jobs.enqueue(context, task))[1] for _ in range(ENQUEUES)]
    _print(f"{queue}: an enqueue beside {POLLERS} polling, whom the second figure holds too", enqueued)
    over.set()
    for poller in pollers:
        poller.join()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=100_000)
    count = parser.parse_args().jobs
    register(LINKS)
    print("| | acts | CPU ms, p50 | PostgreSQL | both | p99 | ms, p50 | p99 |\n|---|---|---|---|---|---|---|---|")
    with _contexts() as (contexts, server):
        for name, context in contexts.items():
            for distinct in (1, 2500, count):
                _measure(server, context, f"{name}, {count:,} jobs, {distinct:,} needs", count, distinct)


if __name__ == "__main__":
    main()
