"""Plans for other engines through the service: asked for by options, stored, shown and exported."""

from dataclasses import asdict, replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipeplan.documents.cluster import Cluster, Host, Level
from pipeplan.planners.solve import solve
from planner_service.app import create_app
from planner_service.platform.settings import Settings
from tests.pipeplan.model_forms import transformer

PROFILE = transformer(layers=4, hidden=512, heads=8, sequence=256, vocabulary=1024, tensors=(1, 2), sizes=(1, 2))
CLUSTER = Cluster(device=PROFILE.device, levels=(Level(size=4, bandwidth_bytes_per_s=200e9),))


def _asked(http: TestClient, cluster: Cluster = CLUSTER, **options: Any) -> Any:
    profile_id = http.post("/v1/profiles", json=asdict(PROFILE)).json()["id"]
    cluster_id = http.post("/v1/clusters", json=asdict(cluster)).json()["id"]
    return http.post(
        "/v1/plans",
        json={
            "profile_id": profile_id,
            "cluster_id": cluster_id,
            "planner": "auto",
            "batch_size": 8,
            "options": {"optimizer": "adam", **options},
        },
    )


def test_a_plan_for_another_engine_is_stored_shown_and_exported(database_url: str) -> None:
    app = create_app(Settings(database_url=database_url), solve=solve)
    with TestClient(app, base_url="http://127.0.0.1") as http:
        answer = _asked(http, engine="megatron", tensor=2)
        assert answer.status_code in (200, 201), answer.text
        plan = answer.json()
        assert (plan["engine"], plan["tensor"], plan["sequence_parallel"]) == ("megatron", 2, True)
        assert plan["choices"]

        page = http.get(f"/plans/{plan['id']}", headers={"Accept": "text/html"}).text
        assert "rank 0 is in the groups tensor 0, 1" in page
        assert "For megatron" in page and "Why these degrees" in page
        assert f"pipeplan plan export {plan['id']} --format megatron --url http://127.0.0.1" in page
        assert "pipeplan-agent run" not in page
        exported = http.get(f"/v1/plans/{plan['id']}/exports/megatron")
        assert "--tensor-model-parallel-size 2" in exported.text and "--sequence-parallel" in exported.text
        assert http.get(f"/v1/plans/{plan['id']}/exports/torchrun").status_code == 422


@pytest.mark.each_case
def test_what_a_plan_offloads_is_shown(database_url: str) -> None:
    app = create_app(Settings(database_url=database_url), solve=solve)
    host = Host(memory_bytes=10**11, bandwidth_bytes_per_s=1e10, update_bytes_per_s=1e10)
    with TestClient(app, base_url="http://127.0.0.1") as http:
        plan = _asked(http, replace(CLUSTER, host=host), engine="megatron", offload="optimizer").json()
        assert plan["offload"] == "optimizer" and plan["stages"][0]["host_bytes"] > 0
        page = http.get(f"/plans/{plan['id']}", headers={"Accept": "text/html"}).text
        assert "to the host: " in page
        assert _asked(http, engine="megatron", offload="optimizer").status_code == 422


def test_what_an_engine_cannot_have_is_refused_by_its_field(database_url: str) -> None:
    app = create_app(Settings(database_url=database_url), solve=solve)
    with TestClient(app, base_url="http://127.0.0.1") as http:
        for field, options in (
            ("tensor", {"engine": "megatron", "tensor": 3}),
            ("tensor", {"tensor": 2}),
            ("options.engine", {"engine": "horovod"}),
            ("data", {"engine": "megatron", "tensor": 2, "data": 4}),
            ("chunks", {"engine": "deepspeed", "chunks": 2}),
            ("stages", {"engine": "megatron", "schedule": "1f1b", "stages": 1}),
            ("sharding", {"engine": "deepspeed", "stages": 2, "sharding": "weights"}),
            ("microbatch_size", {"engine": "fsdp", "microbatch_size": 8}),
        ):
            refused = _asked(http, **options)
            assert refused.status_code == 422, options
            assert refused.json()["errors"][0]["field"] == field
            assert refused.json()["errors"][0]["rule"].startswith("must ")


def test_a_profile_keeps_its_forms(database_url: str) -> None:
    app = create_app(Settings(database_url=database_url))
    with TestClient(app, base_url="http://127.0.0.1") as http:
        profile_id = http.post("/v1/profiles", json=asdict(PROFILE)).json()["id"]
        held = http.get(f"/v1/profiles/{profile_id}").json()
        assert len(held["forms"]) == 2
        plain = http.post("/v1/profiles", json=asdict(replace(PROFILE, forms=()))).json()["id"]
        assert plain != profile_id


def test_a_run_of_a_plan_for_another_engine_is_refused_before_it_waits(database_url: str) -> None:
    app = create_app(Settings(database_url=database_url), solve=solve)
    with TestClient(app, base_url="http://127.0.0.1") as http:
        plan_id = _asked(http, engine="megatron", tensor=2).json()["id"]
        task = {"kind": "run", "plan_id": plan_id, "model": "preset:mlp", "data": "preset:gaussian", "steps": 1}
        refused = http.post("/v1/jobs", json=task)
        assert refused.status_code == 422, refused.text
        (error,) = refused.json()["errors"]
        assert (error["field"], error["value"]) == ("plan.engine", "megatron")
        assert error["rule"].startswith("must be pipeplan to be run here")
        assert http.get("/v1/jobs").json()["items"] == []
        assert http.get("/v1/runs").json()["items"] == []
