"""Charts of profiles and clusters as files: they hold what the documents hold."""

import csv
import io
from xml.etree import ElementTree

import pytest
from fastapi.testclient import TestClient

from pipeplan.documents.identity import content_id
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.platform.context import Context
from tests.planner_service.examples import store_plan


@pytest.fixture(autouse=True)
def stored(context: Context) -> None:
    """The examples."""
    store_plan(context)


def _rows(http: TestClient, address: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(http.get(address).raise_for_status().text)))


def test_a_profiles_tables_have_every_block_at_the_size_asked_for(http: TestClient) -> None:
    charts = f"/v1/profiles/{content_id(PROFILE)}/charts"
    size = PROFILE.blocks[0].measurements[0].microbatch_size
    times = _rows(http, f"{charts}/times.csv?microbatch_size={size}")
    memory = _rows(http, f"{charts}/memory.csv?microbatch_size={size}")
    for block, took, held in zip(PROFILE.blocks, times, memory, strict=True):
        assert (took["name"], float(took["forward_s"])) == (block.name, block.at(size).forward_s)
        assert float(took["backward_s"]) == block.at(size).backward_s
        assert float(held["weights_bytes"]) == block.weight_bytes
    assert http.get(f"{charts}/times.csv?microbatch_size=999").status_code == 422


def test_a_clusters_table_has_its_levels(http: TestClient) -> None:
    rows = _rows(http, f"/v1/clusters/{content_id(CLUSTER)}/charts/levels.csv")
    assert [float(row["bandwidth_bytes_per_s"]) for row in rows] == [
        level.bandwidth_bytes_per_s for level in CLUSTER.levels
    ]


def test_every_page_names_its_pictures_and_they_stand_by_themselves(http: TestClient) -> None:
    addresses = {
        f"/profiles/{content_id(PROFILE)}": ("times", "memory"),
        f"/clusters/{content_id(CLUSTER)}": ("levels",),
    }
    for address, charts in addresses.items():
        page = http.get(address).raise_for_status().text
        for chart in charts:
            picture = f"/v1{address}/charts/{chart}.svg"
            assert f'href="{picture}' in page
            root = ElementTree.fromstring(http.get(picture).raise_for_status().text)
            assert root.find("{http://www.w3.org/2000/svg}style") is not None
