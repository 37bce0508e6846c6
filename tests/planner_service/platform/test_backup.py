"""Backups: one state of the database while real processes write, and back into an empty one of either kind."""

import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from pipeplan.client.client import Client
from pipeplan.errors import ConflictError, InvalidInputError, ServiceError
from pipeplan.protocol.jobs import Completion
from planner_service.jobs import service as jobs
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from planner_service.platform.database import Database
from planner_service.platform.migrations import backup, restore, upgrade
from planner_service.platform.tables import metadata
from planner_service.runs import service as runs
from tests.planner_service.examples import ANY_WORK, PROFILE_TASK, run_result, run_task, store_plan
from tests.planner_service.servers import pipeplan, served
from tests.waiting import PATIENCE_S, wait_until

WRITERS = 4


@contextmanager
def _writing(url: str, plan_id: str) -> Iterator[list[str]]:
    """Clients that enqueue runs, a job and a run each time, until the block ends; those that were acknowledged."""
    acknowledged: list[str] = []
    many, end = threading.Event(), threading.Event()

    def write() -> None:
        with Client(url) as client:
            while not end.is_set():
                acknowledged.append(client.enqueue_job(run_task(plan_id)).id)
                if len(acknowledged) >= 10 * WRITERS:
                    many.set()

    threads = [threading.Thread(target=write) for _ in range(WRITERS)]
    for thread in threads:
        thread.start()
    try:
        assert many.wait(timeout=PATIENCE_S)
        yield acknowledged
    finally:
        end.set()
        for thread in threads:
            thread.join()


@pytest.mark.each_case
def test_a_backup_is_one_state_while_a_service_writes(context: Context, database_url: str, tmp_path: Path) -> None:
    plan_id = store_plan(context)
    file = tmp_path / "backup.sqlite3"
    with served(database_url) as url, _writing(url, plan_id) as acknowledged:
        before = set(acknowledged)
        answer = pipeplan("db", "backup", str(file), "--database", database_url)
        assert answer.returncode == 0, answer.stderr
        wait_until(lambda: len(acknowledged) > len(before))  # they write on; a busy machine lets them wait
    with closing(sqlite3.connect(file)) as opened:
        assert opened.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert opened.execute("PRAGMA foreign_key_check").fetchall() == []
        kept = {job_id for (job_id,) in opened.execute("SELECT id FROM jobs")}
        with_run = {job_id for (job_id,) in opened.execute("SELECT job_id FROM runs")}
    assert before <= kept
    assert kept == with_run
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def _content(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    with database.read() as connection:
        return {
            table.name: [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key))]
            for table in metadata.sorted_tables
        }


def _fill(context: Context) -> str:
    plan_id = store_plan(context)
    job = jobs.enqueue(context, run_task(plan_id))
    lease = jobs.lease(context, ANY_WORK)
    assert lease is not None
    jobs.complete(context, job.id, Completion(token=lease.token, result=run_result(plans.get(context, plan_id))))
    jobs.enqueue(context, PROFILE_TASK)
    assert job.run_id is not None
    return job.run_id


@pytest.mark.each_case
@pytest.mark.parametrize("to", ["sqlite", "postgresql"])
def test_a_backup_goes_into_an_empty_database_of_either_kind(
    context: Context, database_url: str, tmp_path: Path, request: pytest.FixtureRequest, to: str
) -> None:
    run_id = _fill(context)
    expected = _content(context.database)
    assert expected["run_chunks"]
    file = tmp_path / "backup.sqlite3"
    backup(context.database, file)
    new = "empty_database_url" if database_url.startswith(to) else f"{to}_url"
    restored = Database(request.getfixturevalue(new))
    restore(restored, file)
    assert _content(restored) == expected
    there = Context(database=restored, solve=context.solve, now=context.now)
    assert runs.timeline(there, run_id) == runs.timeline(context, run_id)
    jobs.enqueue(there, PROFILE_TASK)  # counting goes on behind what was restored
    with pytest.raises(ConflictError, match="must be empty"):
        restore(restored, file)
    restored.close()


def test_a_backup_never_overwrites(context: Context, tmp_path: Path) -> None:
    file = tmp_path / "backup.sqlite3"
    file.write_text("dear to somebody")
    with pytest.raises(InvalidInputError, match="must not be there yet"):
        backup(context.database, file)
    assert file.read_text() == "dear to somebody"


def test_a_backup_that_cannot_be_written_is_a_sentence(context: Context, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="cannot be written"):
        backup(context.database, tmp_path / "nowhere" / "backup.sqlite3")


def test_other_tables_than_this_versions_are_not_backed_up(empty_database_url: str, tmp_path: Path) -> None:
    database = Database(empty_database_url)
    with pytest.raises(ServiceError, match="pipeplan db upgrade"):
        backup(database, tmp_path / "backup.sqlite3")
    assert not (tmp_path / "backup.sqlite3").exists()
    database.close()


def test_what_is_no_backup_is_not_restored(empty_database_url: str, tmp_path: Path) -> None:
    database = Database(empty_database_url)
    upgrade(database)
    with pytest.raises(InvalidInputError, match="pipeplan db backup"):
        restore(database, tmp_path / "missing.sqlite3")
    letter = tmp_path / "letter.sqlite3"
    letter.write_text("Dear all, this is no database, but it is long enough to be taken for one. " * 20)
    with pytest.raises(InvalidInputError, match="not a database"):
        restore(database, letter)
    database.close()


def test_what_is_damaged_or_somebody_elses_is_not_restored(
    context: Context, empty_database_url: str, tmp_path: Path
) -> None:
    """An empty file, and another program's database, were restored as nothing, with success."""
    _fill(context)
    whole = tmp_path / "whole.sqlite3"
    backup(context.database, whole)
    content = whole.read_bytes()
    database = Database(empty_database_url)

    def refused(name: str, change: Callable[[Path], object]) -> str:
        file = tmp_path / name
        shutil.copyfile(whole, file)
        change(file)
        with pytest.raises(InvalidInputError) as caught:
            restore(database, file)
        assert caught.value.value == str(file)
        return caught.value.rule

    assert "no such table" in refused("empty", lambda file: file.write_bytes(b""))
    assert "malformed" in refused("cut", lambda file: file.write_bytes(content[: len(content) // 2]))
    torn = bytearray(content)
    torn[len(content) // 2 : len(content) // 2 + 8192] = bytes(8192)
    assert "whole file" in refused("torn", lambda file: file.write_bytes(torn))
    assert "no such table" in refused("other", lambda file: _run_sql(file, "DROP TABLE alembic_version"))
    assert "is at none" in refused("none", lambda file: _run_sql(file, "DELETE FROM alembic_version"))
    newer = "UPDATE alembic_version SET version_num = '9999'"
    assert "is at 9999" in refused("newer", lambda file: _run_sql(file, newer))
    gone = "PRAGMA foreign_keys = off; DELETE FROM plans"
    assert "a row that is missing" in refused("rows", lambda file: _run_sql(file, gone))
    restore(database, whole)
    assert _content(database) == _content(context.database)
    database.close()


def _run_sql(file: Path, script: str) -> None:
    with closing(sqlite3.connect(file)) as opened:
        opened.executescript(script)


@pytest.mark.each_case
def test_the_command_goes_down_and_up(context: Context, database_url: str) -> None:
    _fill(context)
    down = pipeplan("db", "downgrade", "0001", "--database", database_url)
    assert down.stderr.endswith("-> 0001\n"), down.stderr
    assert "0001 -> " in pipeplan("db", "upgrade", "--database", database_url).stderr
