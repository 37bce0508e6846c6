"""Agents' names: each belongs to the token that registered it, for as long as that is valid."""

from typing import Any

import pytest

from planner_service.access import service as tokens
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
