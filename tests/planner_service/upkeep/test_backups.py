"""Backups on a schedule: whole, verified, so many kept, restored; and refused where other tools do it."""

import sqlite3
import stat
import time
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select

from pipeplan.client.client import Client
from pipeplan.errors import InvalidInputError, ServiceError
from planner_service.app import create_app
from planner_service.platform import tables
from planner_service.platform.context import Context
from planner_service.platform.database import Database
from planner_service.platform.migrations import backup, upgrade
from planner_service.platform.settings import load_settings
from planner_service.upkeep import backups, chores
from planner_service.upkeep.backups import BackupPlan
from tests.planner_service.answers import halve
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import PROFILE_TASK, store_plan
from tests.planner_service.servers import pipeplan, served
from tests.waiting import wait_until


@pytest.fixture
def stored(sqlite_url: str, clock: Clock) -> Context:
    """What the chores are called with, on a SQLite file that holds a plan."""
    context = Context(database=Database(sqlite_url), solve=halve, now=clock)
    store_plan(context)
    return context


def _plan(folder: Path, kept: int = 2) -> BackupPlan:
    return BackupPlan(folder=folder, every_s=3600.0, kept=kept)


def test_a_backup_is_made_when_it_is_due_and_the_newest_are_kept(stored: Context, clock: Clock, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "backups"
    folder.mkdir(parents=True)
    (folder / "letter.sqlite3").write_text("dear to somebody")
    (folder / ".pipeplan-20250101T000000Z.sqlite3.partial").write_text("of a process that died")
    made = []
    for _ in range(4):
        made.append(backups.take_turn(stored, _plan(folder)))
        assert backups.take_turn(stored, _plan(folder)) is None
        clock.advance(3601)
    assert sorted(path.name for path in folder.iterdir()) == [
        "letter.sqlite3",
        "pipeplan-20260102T050407Z.sqlite3",
        "pipeplan-20260102T060408Z.sqlite3",
    ]
    assert made[-1] == folder / "pipeplan-20260102T060408Z.sqlite3"
    assert stat.S_IMODE(made[-1].stat().st_mode) == 0o600
    with closing(sqlite3.connect(made[-1])) as opened:
        assert opened.execute("SELECT count(*) FROM plans").fetchone() == (1,)


def test_a_clock_that_was_ahead_stops_no_backups_and_keeps_none_of_them_out(
    stored: Context, clock: Clock, tmp_path: Path
) -> None:
    folder = tmp_path / "backups"
    clock.advance(30 * 86_400)
    ahead = backups.take_turn(stored, _plan(folder))
    clock.advance(-30 * 86_400)
    made = []
    for _ in range(2):
        made.append(backups.take_turn(stored, _plan(folder)))
        assert backups.take_turn(stored, _plan(folder)) is None
        clock.advance(3601)
    assert None not in (ahead, *made)
    assert sorted(folder.iterdir()) == made


def test_a_shorter_interval_counts_from_the_last_backup_at_once(stored: Context, clock: Clock, tmp_path: Path) -> None:
    monthly = BackupPlan(folder=tmp_path, every_s=30 * 86_400.0, kept=9)
    assert backups.take_turn(stored, monthly) is not None
    clock.advance(60)
    assert backups.take_turn(stored, monthly) is None
    assert backups.take_turn(stored, _plan(tmp_path)) is not None


def test_a_backup_that_fails_is_counted_said_and_tried_again(stored: Context, clock: Clock, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    folder.write_text("no folder")
    assert backups.take_turn(stored, _plan(folder)) is None
    assert 'pipeplan_chores_total{chore="backup",outcome="failed"} 1.0' in stored.metrics.text().decode()
    folder.unlink()
    assert backups.take_turn(stored, _plan(folder)) is None
    clock.advance(backups.AGAIN_S + 1)
    assert backups.take_turn(stored, _plan(folder)) is not None


def test_a_backup_whose_service_died_is_made_by_another_one_soon(stored: Context, clock: Clock, tmp_path: Path) -> None:
    assert chores.claim(stored, backups.CHORE, 3600.0, backups.HELD_S) is not None
    assert backups.take_turn(stored, _plan(tmp_path)) is None
    clock.advance(backups.HELD_S + 1)
    assert backups.take_turn(stored, _plan(tmp_path)) is not None


def test_a_backup_by_hand_goes_where_those_on_a_schedule_go(stored: Context, sqlite_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "backups"
    ended = pipeplan("db", "backup", "--database", sqlite_url, PIPEPLAN_BACKUP_FOLDER=str(folder))
    assert ended.returncode == 0, ended.stderr
    (file,) = folder.iterdir()
    assert backups.NAME.fullmatch(file.name)
    assert f"-> {file} (" in ended.stderr


def test_a_backup_that_takes_long_is_left_to_its_service(
    stored: Context, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = []

    def slowly(context: Context, plan: BackupPlan) -> Path:
        for _ in range(3):
            held = _held_until(context)
            clock.advance(backups.HELD_S - 1)
            wait_until(partial(_renewed, context, held))
            others.append(backups.take_turn(context, plan))
        return tmp_path / "backup"

    (tmp_path / "backup").touch()
    monkeypatch.setattr(backups, "RENEWED_S", 0.01)
    monkeypatch.setattr(backups, "make", slowly)
    assert backups.take_turn(stored, _plan(tmp_path)) == tmp_path / "backup"
    assert others == [None] * 3


def _renewed(context: Context, before: datetime) -> bool:
    return _held_until(context) > before


def _held_until(context: Context) -> datetime:
    with context.database.read() as connection:
        until: datetime = connection.execute(select(tables.chores.c.held_until)).scalar_one()
    return until


def test_a_copy_that_is_not_whole_gets_no_name(stored: Context, tmp_path: Path) -> None:
    with closing(sqlite3.connect(stored.database.url.database or "")) as opened:
        opened.execute("PRAGMA foreign_keys=OFF")
        opened.execute("DELETE FROM clusters")
        opened.commit()
    with pytest.raises(ServiceError, match=r"not whole.*plans refers to a row that is missing"):
        backup(stored.database, tmp_path / "backup.sqlite3")
    assert not list(tmp_path.glob("*backup*"))


def _newer(folder: Path, name: str, client: Client, job_id: str) -> Path:
    """The first backup after one, once it is there."""
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s:
        client.job(job_id)
        newer = sorted(path for path in folder.glob("pipeplan-*.sqlite3") if path.name > name)
        if newer:
            return newer[0]
    raise LookupError(f"no backup came after {name!r}")


@pytest.mark.each_case
def test_a_service_backs_up_and_the_command_restores(tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    settings = {"PIPEPLAN_BACKUP_FOLDER": str(folder), "PIPEPLAN_BACKUP_INTERVAL_S": "1"}
    database = tmp_path / "service.sqlite3"
    with served(database, **settings) as url, Client(url) as client:
        job = client.enqueue_job(PROFILE_TASK)
        first = _newer(folder, "", client, job.id)  # one when it starts
    with served(database, **settings) as url, Client(url) as client:  # it is due again at the next start
        newest = _newer(folder, first.name, client, job.id)
    restored = f"sqlite:///{tmp_path / 'restored.sqlite3'}"
    answer = pipeplan("db", "restore", str(newest), "--database", restored)
    assert answer.returncode == 0, answer.stderr
    with served(tmp_path / "restored.sqlite3") as url, Client(url) as client:
        assert client.job(job.id).id == job.id


def test_for_postgresql_the_setting_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="pg_dump") as caught:
        load_settings(database_url="postgresql://somebody@/pipeplan", backup_folder="backups")
    assert caught.value.field == "backup_folder"


def test_a_folder_that_cannot_be_made_keeps_the_service_from_starting(sqlite_url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = load_settings(database_url=sqlite_url, backup_folder=tmp_path / "file" / "backups")
    with pytest.raises(ServiceError, match="the folder of backups"):
        create_app(settings)


def test_a_restored_database_is_free_to_do_its_own_chores(stored: Context, tmp_path: Path) -> None:
    """Whose turn it was with a chore does not move along, nor does it count as something in a new database."""
    file = backups.take_turn(stored, _plan(tmp_path / "backups"))
    assert file is not None
    url = f"sqlite:///{tmp_path / 'restored.sqlite3'}"
    database = Database(url)
    upgrade(database)
    there = Context(database=database, solve=halve, now=stored.now)
    assert backups.take_turn(there, _plan(tmp_path / "others")) is not None
    assert pipeplan("db", "restore", str(file), "--database", url).returncode == 0
    database.close()
