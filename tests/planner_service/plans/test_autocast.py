"""A profile that was measured under autocast, through the service: its plan says so, and its runs do so."""

from dataclasses import asdict, replace
from typing import Any

from fastapi.testclient import TestClient

from pipeplan.planners.solve import solve
from planner_service.app import create_app
from planner_service.platform.settings import Settings
from tests.pipeplan.builders import Cell, cluster, profile

PROFILE = replace(
    profile([Cell(weight_bytes=40, activation_bytes=8, output_bytes=4)] * 4),
    autocast="bfloat16",
)


def _asked(http: TestClient, **options: Any) -> Any:
    profile_id = http.post("/v1/profiles", json=asdict(PROFILE)).json()["id"]
    cluster_id = http.post("/v1/clusters", json=asdict(cluster((2, 1e9)))).json()["id"]
    asked = {"profile_id": profile_id, "cluster_id": cluster_id, "planner": "auto", "batch_size": 4}
    return http.post("/v1/plans", json=asked | {"options": options})


def test_its_plan_says_so_and_no_other_engine_takes_it(database_url: str) -> None:
    app = create_app(Settings(database_url=database_url), solve=solve)
    with TestClient(app, base_url="http://127.0.0.1") as http:
        plan = _asked(http).raise_for_status().json()
        assert (plan["dtype"], plan["autocast"]) == ("float32", "bfloat16")
        page = http.get(f"/plans/{plan['id']}", headers={"Accept": "text/html"}).text
        assert "float32, computing in bfloat16" in page
        refused = http.get(f"/v1/plans/{plan['id']}/exports/megatron")
        assert refused.status_code == 422 and "under autocast" in refused.text
        other = _asked(http, engine="megatron")
        assert other.status_code == 422
        assert other.json()["errors"][0]["field"].endswith("autocast")


def test_a_run_under_another_autocast_is_refused_before_it_waits(database_url: str) -> None:
    app = create_app(Settings(database_url=database_url), solve=solve)
    with TestClient(app, base_url="http://127.0.0.1") as http:
        plan_id = _asked(http).json()["id"]
        task = {"kind": "run", "plan_id": plan_id, "model": "preset:mlp", "data": "preset:gaussian", "steps": 1}
        refused = http.post("/v1/jobs", json=task | {"autocast": "float16"})
        assert refused.status_code == 422, refused.text
        (error,) = refused.json()["errors"]
        assert (error["field"], error["value"]) == ("autocast", "float16")
        assert error["rule"].startswith("must be the plan's, bfloat16")
        for taken in (task, task | {"autocast": "bfloat16"}):
            assert http.post("/v1/jobs", json=taken).status_code in (200, 201, 202)
