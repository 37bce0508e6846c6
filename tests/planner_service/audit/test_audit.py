"""The audit log: every write leaves an entry in its own transaction, refused attempts too, and no entry a secret."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import func, select, update
from sqlalchemy.exc import DatabaseError

from pipeplan.client.client import Client
from pipeplan.errors import PipeplanError
from pipeplan.protocol.audit import ACTIONS, AuditEntry, AuditQuery
from planner_service.access import service as tokens
from planner_service.app import create_app
from planner_service.audit import middleware
from planner_service.audit import service as audit
from planner_service.jobs import service as jobs
from planner_service.platform.context import Context
from planner_service.platform.database import Database
from planner_service.platform.rules import parse_rules
from planner_service.platform.settings import Settings
from planner_service.platform.tables import audit as rows
from planner_service.upkeep import service as retention
from tests.planner_service.answers import halve
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import ANY_WORK, PROFILE_TASK, request_document, store_plan
from tests.planner_service.guarded import context_of, guarding
from tests.planner_service.servers import pipeplan, served
from tests.planner_service.tokens import bearer, made

OWN = {"Origin": "http://127.0.0.1"}
DAY_S = 86_400
AGENT: dict[str, Any] = {
    "name": "node-1",
    "instance": "0" * 32,
    "host": "node-1",
    "address": "127.0.0.1",
    "port": 1,
    "devices": 1,
    "device_name": "cpu",
    "memory_bytes": 1,
    "torch_version": "2",
    "version": "1",
    "allow": ["preset:mlp"],
}


def _entries(context: Context, **asked: Any) -> list[AuditEntry]:
    """The entries, the oldest first."""
    return list(audit.page(context, AuditQuery(limit=200, sort="created_at", **asked)).items)


def _told(context: Context, **asked: Any) -> list[tuple[str, str, str | None]]:
    return [(entry.action, entry.outcome, entry.object_id) for entry in _entries(context, **asked)]


def test_what_is_done_leaves_who_did_it_to_what(context: Context, http: TestClient) -> None:
    plan_id = store_plan(context)  # no request, so no attempt: what the service does of itself leaves no entry
    assert _entries(context) == []
    job_id = http.post("/v1/jobs", json=PROFILE_TASK.model_dump(mode="json")).json()["id"]
    http.post(f"/v1/jobs/{job_id}/cancel").raise_for_status()
    http.post(f"/v1/jobs/{job_id}/retry").raise_for_status()
    http.put("/v1/aliases/gpt/prod", json={"plan_id": plan_id}).raise_for_status()
    http.post("/v1/plans", json=request_document()).raise_for_status()
    http.delete("/v1/aliases/gpt/prod").raise_for_status()
    http.post(f"/jobs/{job_id}/cancel", headers=OWN, follow_redirects=False)
    token = http.post("/v1/tokens", json={"name": "ci", "scopes": ["plan"]}).json()
    http.post(f"/v1/tokens/{token['id']}/revoke").raise_for_status()
    assert _told(context) == [
        ("job.enqueue", "done", job_id),
        ("job.cancel", "done", job_id),
        ("job.retry", "done", job_id),
        ("alias.put", "done", "gpt/prod"),
        ("plan.store", "done", plan_id),
        ("alias.delete", "done", "gpt/prod"),
        ("job.cancel", "done", job_id),
        ("token.create", "done", token["id"]),
        ("token.revoke", "done", token["id"]),
    ]
    assert {entry.actor for entry in _entries(context)} == {"local"}
    assert [entry.via for entry in _entries(context, action="job.cancel")] == ["api", "dashboard"]
    text = json.dumps([entry.model_dump(mode="json") for entry in _entries(context)])
    assert token["token"] not in text
    assert token["token"].split("_")[2] not in text


def test_what_agents_do_is_in_their_name_and_signs_of_life_are_not_kept(context: Context, http: TestClient) -> None:
    http.post("/v1/agents", json=AGENT).raise_for_status()
    job_id = jobs.enqueue(context, PROFILE_TASK).id
    asked = ANY_WORK.model_copy(update={"agent": "node-1"})
    lease = http.post("/v1/jobs/lease", json=asked.model_dump(mode="json")).json()
    for _ in range(3):
        http.post(f"/v1/jobs/{job_id}/heartbeat", json={"token": lease["token"]}).raise_for_status()
    http.post(f"/v1/jobs/{job_id}/release", json={"token": lease["token"], "report_id": "r" * 32}).raise_for_status()
    told = [(entry.action, entry.agent) for entry in _entries(context)]
    assert told == [("agent.register", "node-1"), ("job.lease", "node-1"), ("job.release", "node-1")]
    http.post(f"/v1/jobs/{job_id}/heartbeat", json={"token": "wrong"})
    (refused,) = _entries(context, outcome="refused")
    assert (refused.action, refused.object_id, refused.status) == ("job.renew", job_id, 409)
    assert lease["token"] not in json.dumps([entry.model_dump(mode="json") for entry in _entries(context)])


def test_what_is_refused_is_kept_before_it_is_answered(database_url: str, clock: Clock) -> None:
    with guarding(database_url, clock) as guarded:
        context = context_of(guarded)
        reader = made(context, "read", name="reader")
        guarded.post("/v1/jobs/some/cancel")
        guarded.post("/v1/jobs/some/cancel", headers=bearer(reader))
        guarded.post("/v1/tokens", headers=bearer("ppl_wrong"), json={})
        guarded.post(f"/v1/tokens/{reader}/revoke", headers=bearer(reader))  # a secret where an id should be
        guarded.post("/v1/nothing", headers=bearer(reader))
        guarded.get("/v1/tokens", headers=bearer(reader))
        told = [(e.actor, e.action, e.outcome, e.status) for e in _entries(context)]
        assert told == [
            ("nobody", "job.cancel", "refused", 401),
            ("reader", "job.cancel", "refused", 403),
            ("nobody", "token.create", "refused", 401),
            ("reader", "token.revoke", "refused", 403),
        ]
        text = json.dumps([entry.model_dump(mode="json") for entry in _entries(context)])
        assert reader not in text
        assert reader.split("_")[2][:16] not in text


def test_an_entry_is_stored_with_its_write_or_neither_is(context: Context, http: TestClient) -> None:
    answer = http.post(
        "/v1/jobs", json=PROFILE_TASK.model_dump(mode="json"), headers={"Idempotency-Key": "one"}
    ).raise_for_status()
    again = http.post("/v1/jobs", json=PROFILE_TASK.model_dump(mode="json"), headers={"Idempotency-Key": "one"})
    assert again.json() == answer.json()
    assert _told(context) == [("job.enqueue", "done", answer.json()["id"])]  # a repetition writes nothing
    assert http.post("/v1/jobs", json={"kind": "run", "plan_id": "no", "model": "m", "data": "d", "steps": 1}).is_error
    assert _told(context)[1:] == [("job.enqueue", "refused", None)]


def test_an_entry_cannot_be_changed(context: Context, http: TestClient) -> None:
    http.post("/v1/jobs", json=PROFILE_TASK.model_dump(mode="json")).raise_for_status()
    with pytest.raises((PipeplanError, DatabaseError), match="append only"), context.database.write() as connection:
        connection.execute(update(rows).values(actor="somebody else"))
    assert [entry.actor for entry in _entries(context)] == ["local"]


def test_strangers_cannot_fill_the_log(database_url: str, clock: Clock) -> None:
    with guarding(database_url, clock) as guarded:
        for _ in range(round(middleware.REFUSALS_AT_ONCE) + 40):
            assert guarded.post("/v1/jobs/some/cancel").status_code == 401
        context = context_of(guarded)
        kept = len(_entries(context))
        assert middleware.REFUSALS_AT_ONCE <= kept < middleware.REFUSALS_AT_ONCE + 40
        left_out = middleware.REFUSALS_AT_ONCE + 40 - kept
        assert f"pipeplan_audit_left_out_total {left_out}" in context.metrics.text().decode()


def test_filters_and_cursors_are_those_of_every_list(context: Context, http: TestClient, clock: Clock) -> None:
    ids = []
    for _ in range(5):
        ids.append(http.post("/v1/jobs", json=PROFILE_TASK.model_dump(mode="json")).json()["id"])
        clock.advance(1)
    first = http.get("/v1/audit", params={"limit": 2}).json()
    assert [entry["object_id"] for entry in first["items"]] == [ids[4], ids[3]]
    rest = http.get("/v1/audit", params={"limit": 200, "cursor": first["next_cursor"]}).json()
    assert [entry["object_id"] for entry in rest["items"]] == ids[2::-1]
    only = http.get("/v1/audit", params={"object_id": ids[1], "actor": "local", "action": "job.enqueue"}).json()
    assert [entry["object_id"] for entry in only["items"]] == [ids[1]]
    assert http.get("/v1/audit", params={"actor": "somebody"}).json()["items"] == []
    assert http.get("/v1/audit", params={"action": "job"}).status_code == 422
    assert http.get("/v1/audit", params={"who": "me"}).status_code == 422
    page = http.get("/audit", params={"action": "job.enqueue"})
    assert page.status_code == 200
    assert ids[0] in page.text


def test_retention_removes_entries_by_the_logs_own_rule_only(context: Context, http: TestClient, clock: Clock) -> None:
    http.post("/v1/jobs", json=PROFILE_TASK.model_dump(mode="json")).raise_for_status()
    clock.advance(400 * DAY_S)
    retention.prune(context, parse_rules(["jobs=90d"]))
    assert len(_entries(context)) == 1
    assert retention.prune(context, parse_rules(["audit=1y"])) == {"audit": 1}


def test_every_route_that_changes_something_says_what_it_is_an_attempt_at(app: FastAPI) -> None:
    found = {place.action for place in middleware.places(app)}
    assert found | {action for action in ACTIONS if action.startswith("database.")} == set(ACTIONS)

    @app.post("/v1/something")
    def something() -> None:
        """A route that nobody thought of."""

    with pytest.raises(PipeplanError, match="POST /v1/something does not declare"):
        middleware.places(app)


def test_a_failure_of_the_service_is_kept_once_it_can_be(sqlite_url: str, clock: Clock) -> None:
    app = create_app(Settings(database_url=sqlite_url), now=clock, solve=halve)
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as http:
        context: Context = app.state.context
        with context.database.write() as connection:
            connection.exec_driver_sql("ALTER TABLE jobs RENAME TO moved")
        assert http.post("/v1/jobs", json=PROFILE_TASK.model_dump(mode="json")).status_code == 503
        assert [(e.action, e.outcome, e.status) for e in _entries(context)] == [("job.enqueue", "failed", 503)]


def _with(database_url: str, do: Callable[[Context], None]) -> None:
    database = Database(database_url)
    do(Context(database=database, solve=halve))
    database.close()


@pytest.mark.each_case
def test_commands_on_the_database_are_the_consoles(database_url: str) -> None:
    at = ("--database", database_url)
    made = json.loads(pipeplan("token", "create", "--name", "ci", "--scope", "read", "--json", *at).stdout)
    assert pipeplan("token", "revoke", "ci", *at).returncode == 0
    assert pipeplan("db", "prune", "--older-than", "90d", "--dry-run", *at).returncode == 0
    assert pipeplan("db", "prune", "--older-than", "90d", *at).returncode == 0

    def look(context: Context) -> None:
        entries = _entries(context)
        assert {(entry.actor, entry.via) for entry in entries} == {("console", "command")}
        assert [(entry.action, entry.outcome) for entry in entries] == [
            ("token.create", "done"),
            ("token.revoke", "done"),
            ("database.prune", "begun"),
            ("database.prune", "done"),
        ]
        assert entries[0].object_id == made["id"]
        with context.database.read() as connection:
            assert connection.execute(select(func.count()).select_from(rows)).scalar_one() == 4

    _with(database_url, look)


@pytest.mark.each_case
def test_the_command_shows_it_to_admins(tmp_path: Any) -> None:
    database = tmp_path / "service.sqlite3"
    at = ("--database", f"sqlite:///{database}")
    admin, reader = (
        pipeplan("token", "create", "--name", scope, "--scope", scope, *at).stdout.strip()
        for scope in ("admin", "read")
    )
    with served(database, PIPEPLAN_REQUIRE_TOKENS="true") as url:
        said = pipeplan("audit", "--url", url, "--token", admin, "--action", "token.create")
        assert said.returncode == 0, said.stderr
        assert "console" in said.stdout
        assert pipeplan("audit", "--url", url, "--token", reader).returncode == 5
        wrong = pipeplan("audit", "--url", url, "--token", admin, "--action", "nothing")
        assert wrong.returncode == 2
        with Client(url, token=admin) as client:
            assert [entry.action for entry in client.audit(AuditQuery(outcome="done"), limit=1)] == ["token.create"]
            assert tokens.NAME not in [entry.actor for entry in client.audit()]
