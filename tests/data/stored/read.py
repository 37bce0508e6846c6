"""What a release stored, used by the code that is first on the path: `python -m tests.data.stored.read FOLDER URL`.

Everything is listed, shown, compared and found again under its old id.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from pipeplan.documents.calibration import Calibration
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse, parse_plan
from pipeplan.documents.identity import content_id
from pipeplan.documents.profile import Profile
from pipeplan.planners import solve as solvers
from planner_service.app import create_app
from planner_service.platform.settings import Settings
from tests.planner_service.examples import profile_document, request_document

MODEL = {"name": "gpt2-small-4", "spec": "hf:gpt2?n_layer=4&n_embd=256"}
"""What the examples profiled when the releases stored theirs."""


def use_documents(folder: Path) -> None:
    """The files have the ids that the plan and the calibration call them by."""
    profile, cluster = parse(Profile, _text(folder, "profile")), parse(Cluster, _text(folder, "cluster"))
    plan, calibration = _text(folder, "plan"), _text(folder, "calibration")
    assert content_id(parse_plan(plan)) == json.loads(plan)["id"]
    for named in (json.loads(plan), json.loads(calibration)):
        assert (content_id(profile), content_id(cluster)) == (named["profile_id"], named["cluster_id"])
    assert content_id(parse(Calibration, calibration)) == json.loads(_text(folder, "ids"))["calibration"]


def use_database(url: str, ids: Mapping[str, Any]) -> None:
    """A database of the release's, brought to today's tables."""
    first, second = ids["plans"]
    with TestClient(create_app(Settings(database_url=url)), base_url="http://127.0.0.1") as http:

        def got(path: str) -> str:
            answer = http.get(path)
            assert answer.status_code == 200, (path, answer.text)
            return answer.text

        def posted(path: str, body: Mapping[str, Any]) -> str:
            """Its id, of something that was there already."""
            answer = http.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)
            known: str = answer.json()["id"]
            return known

        assert [item["id"] for item in json.loads(got("/v1/plans"))["items"]] == [second, first]
        assert [item["id"] for item in json.loads(got("/v1/plans?content=true"))["items"]] == [second, first]
        assert [plan["id"] for plan in json.loads(got(f"/v1/plans/compare?id={first}&id={second}"))["plans"]] == [
            first,
            second,
        ]
        for name in ("streams", "alternatives", "timeline", "exports/torchrun", "exports/megatron"):
            got(f"/v1/plans/{first}/{name}")
        (run,) = json.loads(got("/v1/runs"))["items"]
        assert run["plan_id"] == first
        pages = (
            "/",
            "/plans",
            f"/plans/{first}",
            f"/compare?plan={first}&plan={second}",
            f"/profiles/{ids['profile']}",
        )
        for page in (*pages, f"/clusters/{ids['cluster']}", "/runs", f"/runs/{run['id']}"):
            assert "Internal Server Error" not in got(page)
        assert posted("/v1/profiles", profile_document(model=MODEL)) == ids["profile"]
        assert posted("/v1/clusters", json.loads(got(f"/v1/clusters/{ids['cluster']}"))) == ids["cluster"]
        named = {"profile_id": ids["profile"]}
        asked = [request_document(planner=planner, **named) for planner in ("pipedream-2bw", "gpipe")]
        if all(solvers.VERSIONS[request["planner"]] == ids["planner_version"] for request in asked):
            assert [posted("/v1/plans", request) for request in asked] == [first, second]
            by_job = http.post("/v1/plans", json=asked[0], headers={"Prefer": "respond-async, wait=60"})
            assert by_job.json()["id"] == first
            return

        # Planners of a later version answer with plans of their own, beside the old ones.
        known = [second, first]
        for request in asked:
            anew = http.post("/v1/plans", json=request)
            assert (anew.status_code, anew.json()["planner_version"]) == (201, solvers.VERSIONS[request["planner"]])
            assert posted("/v1/plans", request) == anew.json()["id"]
            known.insert(0, anew.json()["id"])
        assert [item["id"] for item in json.loads(got("/v1/plans"))["items"]] == known


def _text(folder: Path, name: str) -> str:
    return (folder / f"{name}.json").read_text()


if __name__ == "__main__":
    use_documents(Path(sys.argv[1]))
    use_database(sys.argv[2], json.loads(_text(Path(sys.argv[1]), "ids")))
