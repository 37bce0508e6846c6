"""Choosing a job: how much of the queue a poll looks at, and what it finds in a long one."""

import itertools
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, insert, text

from pipeplan.protocol.agents import Registration
from pipeplan.protocol.jobs import LeaseRequest
from planner_service.agents import needs
from planner_service.agents import service as agents
from planner_service.agents.needs import Needs
from planner_service.jobs import choice
from planner_service.jobs import service as jobs
from planner_service.platform.context import Context
from planner_service.platform.tables import jobs as table
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import PROFILE_TASK

ASKING = LeaseRequest(agent="node-1", instance="instance-1")


def _register(context: Context, name: str = "node-1", allow: tuple[str, ...] = ("hf:*",)) -> None:
    told = Registration(
        name=name,
        instance="instance-1",
        host=name,
        address="10.0.0.1",
        port=29400,
        devices=1,
        device_name="any",
        memory_bytes=1,
        torch_version="2",
        version="1",
        allow=allow,
    )
    agents.register(context, told)


def _queue(context: Context, asked: Sequence[Needs], kind: str = "profile") -> None:
    """Puts a job into the queue for each of these needs, in their order, in one statement."""
    now = context.now()
    ids = itertools.count(1)
    rows = []
    for one in asked:
        needs_id, content = needs.stored(one)
        rows.append(
            {
                "id": f"{next(ids):032x}",
                "kind": kind,
                "task": PROFILE_TASK.model_dump_json(),
                "state": "queued",
                "attempts": 0,
                "needs_id": needs_id,
                "needs": content,
                "created_at": now,
                "updated_at": now,
            }
        )
    with context.database.write() as connection:
        connection.execute(insert(table), rows)


def _others(count: int) -> list[Needs]:
    """Needs that an agent of this name does not meet, all different."""
    return [Needs(agents=(f"other-{index}",)) for index in range(count)]


@contextmanager
def _statements(context: Context) -> Iterator[list[tuple[str, Any, bool]]]:
    """This thread's statements on the jobs, their parameters, and whether a writer's turn was held."""
    mine = threading.get_ident()
    seen: list[tuple[str, Any, bool]] = []

    def see(connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        writes = connection.get_execution_options().get("postgresql_readonly") is None
        if context.database.is_sqlite:
            writes = connection.get_execution_options().get("begin") is not None
        if " jobs" in statement and threading.get_ident() == mine:
            seen.append((statement, parameters, writes))

    event.listen(context.database.engine, "before_cursor_execute", see)
    yield seen
    event.remove(context.database.engine, "before_cursor_execute", see)


@pytest.fixture(autouse=True)
def _looks_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look goes on where one of another test ended."""
    monkeypatch.setattr(choice, "CURSORS", choice.Cursors())


@pytest.mark.parametrize("fits", [False, True])
def test_a_poll_sends_as_many_statements_whatever_the_queue_holds(
    context: Context, clock: Clock, *, fits: bool
) -> None:
    _register(context)
    clock.advance(100)  # past the grace of the service's start, so that every poll looks for leases that ran out
    counts = []
    for count in (choice.JOBS + 50, choice.NEEDS + 500):
        with context.database.write() as connection:
            connection.execute(table.delete())
        clock.advance(100)
        _queue(context, [*_others(count), *([Needs()] if fits else [])])
        with _statements(context) as seen:
            jobs.lease(context, ASKING)
        counts.append((len(seen), sum(writes for _, _, writes in seen)))
    short, long = counts
    assert long[0] <= short[0]
    assert long[1] <= short[1]
    assert short[0] < 12


def test_the_choice_reads_before_it_is_the_writers_turn(context: Context) -> None:
    _register(context)
    _queue(context, [*_others(choice.JOBS), Needs()])
    with _statements(context) as seen:
        assert jobs.lease(context, ASKING) is not None
    looks = [writes for statement, _, writes in seen if "steps" in statement or "UNION ALL" in statement]
    assert looks == [False, False, False]  # the oldest jobs, the needs, the oldest job of the one that fits
    in_turn = [statement for statement, _, writes in seen if writes]
    assert not any("steps" in statement for statement in in_turn)
    assert len(in_turn) <= 6


def test_the_choice_goes_by_indexes(context: Context) -> None:
    """No statement sorts the queue or reads a table from its beginning."""
    _register(context)
    _queue(context, [*_others(2000), Needs()])
    with context.database.write() as connection:
        connection.execute(text("ANALYZE"))
    with _statements(context) as seen:
        jobs.lease(context, ASKING)
    explain = "EXPLAIN QUERY PLAN " if context.database.is_sqlite else "EXPLAIN "
    assert seen
    for statement, parameters, _ in seen:
        if not re.match(r"(SELECT|WITH|UPDATE)", statement):
            continue
        with context.database.write() as connection:
            rows = connection.exec_driver_sql(explain + statement, parameters).all()
        shown = "\n".join(str(row[-1]) for row in rows)
        assert not re.search(r"SCAN jobs\b(?! USING)|Seq Scan on jobs|USE TEMP B-TREE", shown), (statement, shown)


def test_a_job_is_found_past_more_needs_than_one_look_goes_through(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "JOBS", 5)
    monkeypatch.setattr(choice, "NEEDS", 10)
    _register(context)
    _queue(context, [*_others(95), Needs()])
    found = [jobs.lease(context, ASKING) for _ in range(10)]
    assert {lease.job.id for lease in found if lease is not None} == {f"{96:032x}"}


def test_the_oldest_that_an_agent_can_do_is_chosen_past_those_that_it_cannot(context: Context) -> None:
    _register(context)
    mine = Needs(agents=("node-1",))
    _queue(context, [*_others(150), mine, Needs(), mine])
    assert [_taken(context) for _ in range(3)] == [f"{place:032x}" for place in (151, 152, 153)]


def _taken(context: Context) -> str:
    """The job that the agent gets, which ends before it asks again."""
    lease = jobs.lease(context, ASKING)
    assert lease is not None
    jobs.cancel(context, lease.job.id)
    return lease.job.id


def test_jobs_of_other_kinds_are_not_gone_through(context: Context) -> None:
    """The service's own jobs may be many; an agent's poll finds its job past them all."""
    _register(context)
    _queue(context, [Needs()] * 1000, kind="plan")
    job = jobs.enqueue(context, PROFILE_TASK)
    lease = jobs.lease(context, ASKING)
    assert lease is not None
    assert lease.job.id == job.id
