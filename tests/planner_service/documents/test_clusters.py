"""Clusters over HTTP."""

import re
from dataclasses import asdict

from fastapi.testclient import TestClient

from pipeplan.documents.identity import canonical_json, content_id
from planner_service.overview.openapi import CLUSTER


def test_a_cluster_comes_back_as_it_was_stored(http: TestClient) -> None:
    created = http.post("/v1/clusters", json=asdict(CLUSTER))
    assert created.status_code == 201
    assert created.json()["id"] == content_id(CLUSTER)
    assert http.get(created.headers["location"]).text == canonical_json(CLUSTER)
    assert http.post("/v1/clusters", json=asdict(CLUSTER)).status_code == 200
    (listed,) = http.get("/v1/clusters").json()["items"]
    assert listed["devices"] == 2


def test_a_wrong_cluster_is_refused_and_not_stored(http: TestClient) -> None:
    levels = [{"size": 0, "bandwidth_bytes_per_s": 1.0}]
    answer = http.post("/v1/clusters", json=asdict(CLUSTER) | {"levels": levels})
    (rule,) = answer.json()["errors"]
    assert rule == {"field": "levels.0.size", "rule": "must be a whole number of at least 1", "value": 0}
    assert http.get("/v1/clusters").json()["items"] == []


def test_the_list_names_every_type_of_a_mixed_cluster(http: TestClient) -> None:
    """It named the first one only."""
    cluster = asdict(CLUSTER)
    device = cluster.pop("device")
    levels = [{"size": 6, "bandwidth_bytes_per_s": 1e9}]
    for types in (2, 6):
        groups = [{"device": device | {"name": f"type-{types}-{i}"}, "count": 6 // types} for i in range(types)]
        http.post("/v1/clusters", json={"groups": groups, "levels": levels}).raise_for_status()
    page = http.get("/clusters", headers={"Accept": "text/html"}).text
    cells = re.findall(r'data-label="Device types"[^>]*>(.*?)</td>', page)
    shown = [re.sub(r"<[^>]+>", "", cell) for cell in cells]
    assert shown == [" + ".join(f"1 x type-6-{i}" for i in range(6)), "3 x type-2-0 + 3 x type-2-1"]
