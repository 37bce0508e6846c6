"""Agents' names: each belongs to the token that registered it, for as long as that is valid."""

from typing import Any

import pytest

from pipeplan.protocol.agents import Registration
from planner_service.access import service as tokens
from planner_service.agents import store
from tests.planner_service.conftest import Clock
from tests.planner_service.guarded import context_of, guarding
from tests.planner_service.tokens import bearer, made

TOLD: dict[str, Any] = {
    "name": "node-1",
    "instance": "instance-1",
    "host": "node-1",
    "address": "10.0.0.1",
    "port": 29400,
    "devices": 1,
    "device_name": "any",
    "memory_bytes": 1,
    "torch_version": "2",
    "version": "1",
}
LEASE = {"agent": "node-1", "instance": "instance-1"}


@pytest.mark.parametrize("ends", ["revoked", "expired"])
def test_a_name_belongs_to_its_token_until_that_is_over(database_url: str, clock: Clock, ends: str) -> None:
    with guarding(database_url, clock) as http:
        context = context_of(http)
        own = bearer(made(context, "agent", name="own", expires_in_s=100))
        other = bearer(made(context, "agent", name="other"))
        stolen = TOLD | {"instance": "instance-2"}
        requests = (
            ("/v1/agents", stolen),
            ("/v1/agents/node-1/heartbeat", {"instance": "instance-1", "draining": True}),
            ("/v1/jobs/lease", LEASE),
            ("/v1/jobs/lease", {"agent": "node-1"}),
        )
        assert http.post("/v1/agents", json=TOLD, headers=own).status_code == 201
        for path, body in requests:
            refused = http.post(path, json=body, headers=other)
            assert refused.status_code == 403, path
            assert "'own'" in refused.json()["detail"]
        assert http.post("/v1/jobs/lease", json=LEASE, headers=own).status_code == 204
        assert http.get("/v1/agents/node-1", headers=own).json()["state"] == "alive"
        assert http.post("/v1/agents", json=TOLD | {"name": "node-2"}, headers=other).status_code == 201

        if ends == "revoked":
            tokens.revoke(context, tokens.id_of(context, "own"))
        else:
            clock.advance(101)
        assert http.post("/v1/agents", json=stolen, headers=other).status_code == 200
        assert http.post("/v1/jobs/lease", json=LEASE, headers=other).status_code == 409


def test_an_admin_may_act_for_every_agent(sqlite_url: str, clock: Clock) -> None:
    with guarding(sqlite_url, clock) as http:
        context = context_of(http)
        assert http.post("/v1/agents", json=TOLD, headers=bearer(made(context, "agent", name="own"))).status_code == 201
        admin = bearer(made(context, "admin", name="root"))
        assert http.post("/v1/agents", json=TOLD, headers=admin).status_code == 200


def test_an_agent_named_like_anothers_id_does_not_silence_it(database_url: str, clock: Clock) -> None:
    """Look-ups went by name first: the heartbeats of the agent with this id were refused."""
    with guarding(database_url, clock) as http:
        context = context_of(http)
        own, other = (bearer(made(context, "agent", name=name)) for name in ("own", "other"))
        agent_id = http.post("/v1/agents", json=TOLD, headers=own).json()["id"]
        for name in (agent_id, agent_id.upper()):
            stolen = TOLD | {"name": name, "instance": "instance-2"}
            for path, body in (("/v1/agents", stolen), ("/v1/jobs/lease", {"agent": name})):
                refused = http.post(path, json=body, headers=other)
                assert (refused.status_code, "look like an id" in refused.json()["detail"]) == (422, True)

        with context.database.write() as connection:  # as an earlier release accepted it
            told = Registration.model_validate(TOLD | {"name": agent_id, "instance": "instance-2"})
            store.register(connection, "0" * 32, told, clock(), None)
        beat = http.post(f"/v1/agents/{agent_id}/heartbeat", json={"instance": "instance-1"}, headers=own)
        assert (beat.status_code, beat.json()["name"]) == (200, "node-1")
        assert http.get(f"/v1/agents/{agent_id}", headers=own).json()["name"] == "node-1"
        assert http.post("/v1/jobs/lease", json=LEASE, headers=own).status_code == 204


LOOK_ALIKES = (
    *("node-1 ", " node-1", "node  1", "node\u00a01", "node-1\n"),
    *("node-1\u200b", "\u2060node-1", "node-1\u00ad", "node-1\ufe0f", "node-1\u034f", "node-1\u3164", "\u202enode-1"),
    *("\uff4eode-1", "node-\uff11", "e\u0301", "\ue000"),
)
"""Spaces, characters that show nothing, and forms other than NFKC."""


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_name_that_looks_like_another_is_refused(sqlite_url: str, clock: Clock, name: str) -> None:
    with guarding(sqlite_url, clock) as http:
        agent = bearer(made(context_of(http), "agent", name="own"))
        admin = bearer(made(context_of(http), "admin", name="root"))
        for path, field, body, holder in (
            ("/v1/agents", "name", TOLD | {"name": name}, agent),
            ("/v1/jobs/lease", "agent", {"agent": name}, agent),
            ("/v1/tokens", "name", {"name": name, "scopes": ["plan"]}, admin),
        ):
            refused = http.post(path, json=body, headers=holder)
            assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, field), path


@pytest.mark.parametrize("name", ["node-1", "Knoten für Zwölf", "узел-1", "节点", "a b", "cafe", "0" * 31])
def test_names_of_every_script_are_names(sqlite_url: str, clock: Clock, name: str) -> None:
    with guarding(sqlite_url, clock) as http:
        agent = bearer(made(context_of(http), "agent", name="own"))
        assert http.post("/v1/agents", json=TOLD | {"name": name}, headers=agent).status_code == 201


def test_a_token_is_not_named_like_an_id(sqlite_url: str, clock: Clock) -> None:
    with guarding(sqlite_url, clock) as http:
        admin = bearer(made(context_of(http), "admin", name="root"))
        refused = http.post("/v1/tokens", json={"name": "a" * 32, "scopes": ["plan"]}, headers=admin)
        assert (refused.status_code, "look like an id" in refused.json()["detail"]) == (422, True)
