"""Away: what the service does while its database does not answer, and after it stood still itself."""

import os
import signal
import sqlite3
import stat
import subprocess
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from planner_service.access.auth import HONOURED_S
from planner_service.app import create_app
from planner_service.platform.context import CLOCK_STEP_S, STOOD_STILL, Absence
from planner_service.platform.database import Database
from planner_service.platform.migrations import upgrade
from planner_service.platform.settings import Settings
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import PROFILE_TASK
from tests.planner_service.guarded import ORIGIN, context_of, guarding
from tests.planner_service.servers import PIPEPLAN, environment, pipeplan, pipeplan_process, serving
from tests.planner_service.tokens import bearer, made
from tests.waiting import PATIENCE_S

START = datetime(2026, 1, 1, tzinfo=UTC)
LEASE_S = 40.0


def _take_away(database: Database, file: Path) -> None:
    """The file is gone, and a folder is in its place: nothing can be opened any more."""
    database.engine.dispose()
    for left in file.parent.glob(f"{file.name}*"):
        left.rename(left.with_name(f"away-{left.name}"))
    file.mkdir()


def test_metrics_say_that_the_database_is_away_and_strangers_learn_nothing_of_it(
    sqlite_url: str, clock: Clock, tmp_path: Path
) -> None:
    with guarding(sqlite_url, clock) as http:
        token = made(context_of(http), "read", name="scraper")
        assert http.get("/v1/tokens/self", headers=bearer(token)).status_code == 200
        strange = made(context_of(http), "read", name="strange")
        _take_away(context_of(http).database, tmp_path / "service.sqlite3")

        clock.advance(10)
        answer = http.get("/metrics", headers=bearer(token))
        assert answer.status_code == 200
        assert "\npipeplan_database_up 0.0\n" in answer.text

        unknown = http.get("/metrics", headers=bearer(strange))
        assert unknown.status_code == 503
        assert int(unknown.headers["Retry-After"]) > 0
        for word in ("sqlite", "service.sqlite3", str(tmp_path), "database"):
            assert word not in unknown.text.lower()

        clock.advance(HONOURED_S)
        assert http.get("/metrics", headers=bearer(token)).status_code == 503


def test_only_admins_learn_which_database_is_away(sqlite_url: str, clock: Clock, tmp_path: Path) -> None:
    with guarding(sqlite_url, clock) as http:
        tokens = {scope: made(context_of(http), scope, name=scope) for scope in ("read", "agent", "plan", "admin")}
        for token in tokens.values():
            assert http.get("/v1/tokens/self", headers=bearer(token)).status_code == 200
        _take_away(context_of(http).database, tmp_path / "service.sqlite3")
        clock.advance(10)

        def said(scope: str, method: str, path: str) -> str:
            answer = http.request(method, path, headers=bearer(tokens[scope]), json={"token": "x"})
            assert (answer.status_code, int(answer.headers["Retry-After"]) > 0) == (503, True)
            return answer.text

        # A route, the short ways of lists and heartbeats, a short id, a page: each answers errors in its own place.
        for scope, method, path in (
            ("read", "GET", "/readyz"),
            ("read", "GET", "/v1/plans"),
            ("read", "GET", "/v1/plans/0123abcd"),
            ("read", "GET", "/plans"),
            ("plan", "POST", f"/v1/jobs/{'0' * 32}/cancel"),
            ("agent", "POST", f"/v1/jobs/{'0' * 32}/heartbeat"),
        ):
            text = said(scope, method, path)
            assert "service.sqlite3" not in text and "sqlite" not in text and "unable" not in text, path
            assert "database" in text and "log" in text, path
        assert str(tmp_path / "service.sqlite3") in said("admin", "GET", "/v1/plans")


def test_a_stranger_at_the_login_learns_nothing_of_a_database_that_is_away(
    sqlite_url: str, clock: Clock, tmp_path: Path
) -> None:
    with guarding(sqlite_url, clock) as http:
        token = made(context_of(http), "read", name="person")
        _take_away(context_of(http).database, tmp_path / "service.sqlite3")
        answer = http.post("/login", data={"token": token}, headers={"Origin": ORIGIN})
        assert (answer.status_code, int(answer.headers["Retry-After"]) > 0) == (503, True)
        for word in ("sqlite", str(tmp_path), "database"):
            assert word not in answer.text.lower()


def test_a_token_that_is_honoured_must_still_be_proven_and_not_be_over(
    sqlite_url: str, clock: Clock, tmp_path: Path
) -> None:
    with guarding(sqlite_url, clock) as http:
        token = made(context_of(http), "read", name="short", expires_in_s=100)
        assert http.get("/v1/tokens/self", headers=bearer(token)).status_code == 200
        _take_away(context_of(http).database, tmp_path / "service.sqlite3")
        clock.advance(10)
        forged = token[:-1] + ("0" if token[-1] != "0" else "1")
        assert http.get("/metrics", headers=bearer(forged)).status_code == 401
        assert http.get("/metrics", headers=bearer(token)).status_code == 200
        clock.advance(95)
        assert http.get("/metrics", headers=bearer(token)).status_code == 401


@pytest.mark.parametrize(
    ("elapsed_s", "set_by_s", "graced"),
    [
        (LEASE_S / 20, 0.0, False),
        (LEASE_S * STOOD_STILL, 0.0, False),
        (LEASE_S * STOOD_STILL + 0.1, 0.0, True),
        (18.0, 0.0, True),
        (2.0, CLOCK_STEP_S / 2, False),
        (2.0, 3600.0, True),
        (2.0, -3600.0, True),
    ],
)
def test_leases_get_a_grace_after_a_pause_or_a_step_of_the_clock(
    elapsed_s: float, set_by_s: float, *, graced: bool
) -> None:
    absence = Absence()
    absence.beat(START, 100.0, LEASE_S)
    now = START + timedelta(seconds=elapsed_s + set_by_s)
    absence.notice(now, 100.0 + elapsed_s, LEASE_S)
    assert absence.until == (now + timedelta(seconds=LEASE_S) if graced else absence.until)
    assert (now < absence.until) is graced


def test_the_grace_of_a_start_begins_when_the_service_can_answer(sqlite_url: str, clock: Clock) -> None:
    """What precedes it, above all bringing the tables up to date, may take longer than a lease."""
    settings = Settings(database_url=sqlite_url)
    app = create_app(settings, now=clock)
    clock.advance(10 * settings.lease_s)
    with TestClient(app):
        clock.advance(settings.lease_s - 1)
        assert app.state.context.absence.lasts(clock())
        clock.advance(2)
        assert not app.state.context.absence.lasts(clock())


def test_a_clock_that_is_set_back_leaves_no_grace_for_as_long() -> None:
    absence = Absence()
    absence.beat(START, 0.0, LEASE_S)
    absence.back(START, LEASE_S)
    back = START - timedelta(hours=1)
    absence.notice(back, 1.0, LEASE_S)
    assert absence.until == back + timedelta(seconds=LEASE_S)
    assert absence.set_back


def test_a_clock_that_is_set_forward_leaves_nothing_ahead_of_it() -> None:
    absence = Absence()
    absence.beat(START, 0.0, LEASE_S)
    absence.notice(START + timedelta(hours=1), 1.0, LEASE_S)
    assert not absence.set_back


@pytest.mark.parametrize(("waited_s", "graced"), [(LEASE_S * STOOD_STILL, False), (LEASE_S * STOOD_STILL + 0.1, True)])
def test_leases_get_a_grace_after_a_request_waited_long_for_the_database(waited_s: float, *, graced: bool) -> None:
    absence = Absence()
    absence.beat(START, 0.0, LEASE_S)
    absence.waited(START, waited_s, LEASE_S)
    assert (absence.until > START) is graced


def test_without_a_watchdog_nothing_is_noticed() -> None:
    absence = Absence()
    absence.notice(START, 0.0, LEASE_S)
    absence.notice(START + timedelta(days=1), 1e6, LEASE_S)
    assert absence.until < START


@pytest.mark.campaign
def test_a_service_that_is_stopped_and_continued_lets_no_lease_run_out_at_once(tmp_path: Path) -> None:
    lease_s = 2.0
    settings = {"PIPEPLAN_LEASE_S": str(lease_s)}
    with (
        serving(tmp_path / "frozen.sqlite3", **settings) as (url, process),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        time.sleep(1.5 * lease_s)  # past the grace of the start
        client.post("/v1/jobs", json=PROFILE_TASK.model_dump(mode="json")).raise_for_status()
        held = client.post("/v1/jobs/lease", json={"agent": "node-1"}).json()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5 * lease_s)
        os.kill(process.pid, signal.SIGCONT)
        assert client.post("/v1/jobs/lease", json={"agent": "node-2"}).status_code == 204
        job = client.get(f"/v1/jobs/{held['job']['id']}").json()
        assert (job["state"], job["agent"]) == ("leased", "node-1")
        beat = client.post(f"/v1/jobs/{job['id']}/heartbeat", json={"token": held["token"]})
        assert beat.json()["cancelled"] is False


def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "new.sqlite3"
    database = Database(f"sqlite:///{file}")
    upgrade(database)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    database.close()
    assert modes
    assert set(modes.values()) == {0o600}


def test_removing_all_tables_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "kept.sqlite3"
    database = Database(f"sqlite:///{file}")
    upgrade(database)
    database.close()

    def tables() -> int:
        with closing(sqlite3.connect(file)) as opened:
            counted: int = opened.execute("SELECT count(*) FROM sqlite_master WHERE name = 'plans'").fetchone()[0]
            return counted

    refused = pipeplan_process("db", "downgrade", "base", "--database", f"sqlite:///{file}")
    assert refused.returncode != 0
    assert "Remove all tables" in refused.stderr
    command = [*PIPEPLAN, "db", "downgrade", "base", "--database", f"sqlite:///{file}"]
    denied = subprocess.run(command, input="n\n", capture_output=True, text=True, env=environment())
    assert (denied.returncode, denied.stderr.endswith(": nothing is removed\n")) == (1, True)
    assert tables() == 1
    assert pipeplan("db", "downgrade", "base", "--yes", "--database", f"sqlite:///{file}").returncode == 0
    assert tables() == 0
