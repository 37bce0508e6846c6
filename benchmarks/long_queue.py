"""Polls for work while the queue is long: what one takes, and what an enqueue takes beside six agents that poll.

    python -m benchmarks.long_queue [--jobs 100000]

Every queue has so many jobs: all with the same needs, with 2,500 different ones, or each with its own. One agent that
polls can do none of them, the other some.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles

from sqlalchemy import delete, insert

from pipeplan.protocol.agents import Registration
from pipeplan.protocol.jobs import LeaseRequest, LinksTask
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
from tests.planner_service.postgresql import running

POLLS = 100
POLLERS = 6
ENQUEUES = 50
AT_ONCE = 2000


@contextmanager
def _contexts() -> Iterator[dict[str, Context]]:
    with tempfile.TemporaryDirectory() as folder, running(durable=True) as server:
        urls = {
            "SQLite": f"sqlite:///{Path(folder) / 'queue.sqlite3'}",
            "PostgreSQL": server.url(server.new_database()),
        }
        made = {name: Context(database=Database(url), solve=solve_here) for name, url in urls.items()}
        for context in made.values():
            upgrade(context.database)
        yield made
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
            needs_id, text = needs.stored(Needs(agents=(f"other-{index % distinct}",)))
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


def _row(name: str, act: Callable[[], object], count: int) -> None:
    """Acts so often, and prints how long it took, and how much of this thread's processor time."""
    times, cpu = [], []
    for _ in range(count):
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        act()
        times.append(1e3 * (time.perf_counter() - start_s))
        cpu.append(1e3 * (time.thread_time() - start_cpu_s))
    hundredths, cells = quantiles(times, n=100), quantiles(cpu, n=100)
    figures = (cells[49], cells[98], hundredths[49], hundredths[98], max(times))
    print(f"| {name} | {' | '.join(f'{figure:.1f}' for figure in figures)} |", flush=True)


def _measure(name: str, context: Context, count: int, distinct: int) -> None:
    _fill(context, count, distinct)
    what = f"{name}, {count:,} jobs, {distinct:,} needs"
    none = _ask(context, "none")
    _row(f"{what}: a poll that finds none", lambda: jobs.lease(context, none), POLLS)
    able = _ask(context, "other-0")
    _row(f"{what}: a poll that finds one", lambda: _take(context, able), POLLS)

    over = threading.Event()

    def poll(request: LeaseRequest) -> None:
        while not over.wait(0.2):
            jobs.lease(context, request)

    pollers = [threading.Thread(target=poll, args=(_ask(context, f"poller-{index}"),)) for index in range(POLLERS)]
    for poller in pollers:
        poller.start()
    task = LinksTask(devices=1, agents=("nobody",))
    _row(f"{what}: an enqueue beside {POLLERS} polling", lambda: jobs.enqueue(context, task), ENQUEUES)
    over.set()
    for poller in pollers:
        poller.join()


def _take(context: Context, request: LeaseRequest) -> None:
    lease = jobs.lease(context, request)
    if lease is None:
        raise LookupError("the queue holds a job for this agent")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=100_000)
    count = parser.parse_args().jobs
    register(LINKS)
    print("| | CPU ms, p50 | p99 | ms, p50 | p99 | longest |\n|---|---|---|---|---|---|")
    with _contexts() as contexts:
        for name, context in contexts.items():
            for distinct in (1, 2500, count):
                _measure(name, context, count, distinct)


if __name__ == "__main__":
    main()
