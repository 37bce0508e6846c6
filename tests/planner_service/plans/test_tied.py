"""A model with tied weights, through the service and the command: its plans say which stages share them."""

from dataclasses import asdict, replace
from pathlib import Path

from fastapi.testclient import TestClient

from pipeplan.documents.files import dump
from pipeplan.documents.tied import TiedWeights
from pipeplan.planners.solve import solve
from planner_service.app import create_app
from planner_service.platform.settings import Settings
from tests.pipeplan.builders import Cell, cluster, profile
from tests.pipeplan.cli.commands import pipeplan

PROFILE = replace(
    profile([Cell(weight_bytes=40, activation_bytes=8, output_bytes=4)] * 4),
    tied=(TiedWeights(block=0, also=(3,), weight_bytes=40),),
)
CLUSTER = cluster((2, 1e3))
OPTIONS = {"schedule": "1f1b", "stages": 2}


def test_a_plans_page_and_its_comparison_say_which_stages_share_weights(database_url: str) -> None:
    app = create_app(Settings(database_url=database_url), solve=solve)
    with TestClient(app, base_url="http://127.0.0.1") as http:
        profile_id = http.post("/v1/profiles", json=asdict(PROFILE)).raise_for_status().json()["id"]
        assert http.get(f"/v1/profiles/{profile_id}").json()["tied"] == [{"block": 0, "also": [3], "weight_bytes": 40}]
        cluster_id = http.post("/v1/clusters", json=asdict(CLUSTER)).raise_for_status().json()["id"]
        asked = {"profile_id": profile_id, "cluster_id": cluster_id, "planner": "auto", "batch_size": 8}
        made = [
            http.post("/v1/plans", json=asked | {"options": OPTIONS | more}) for more in ({}, {"optimizer": "adam"})
        ]
        first, second = (answer.raise_for_status().json() for answer in made)
        assert first["tied"] == [{"stages": [0, 1], "seconds": 0.04}]
        shown = "0, 1 in 40 ms"
        for address in (f"/plans/{first['id']}", f"/compare?plan={first['id']}&plan={second['id']}"):
            assert shown in http.get(address, headers={"Accept": "text/html"}).raise_for_status().text
        checked = http.post(
            "/v1/profiles", json=asdict(PROFILE) | {"tied": [{"block": 0, "also": [4], "weight_bytes": 1}]}
        )
        assert checked.status_code == 422
        assert checked.json()["errors"][0]["field"].endswith("tied.0")


def test_the_command_says_so_too(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(dump(PROFILE))
    (tmp_path / "cluster.json").write_text(dump(CLUSTER))
    files = ("--profile", str(tmp_path / "profile.json"), "--cluster", str(tmp_path / "cluster.json"))
    ended = pipeplan("solve", *files, "--batch-size", "8", "--schedule", "1f1b", "--stages", "2")
    assert ended.status == 0
    assert "stages that share weights, and sum their gradients before each update: 0, 1 in 40 ms" in ended.out
