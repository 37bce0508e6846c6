"""Proxies: whose word on address and scheme is believed, and what health checks may ask."""

from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from pipeplan.errors import InvalidInputError
from planner_service.platform.settings import load_settings
from tests.planner_service.servers import served

FORWARDED = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.9"}


@pytest.mark.each_case
@pytest.mark.parametrize(("trusted", "believed"), [("10.0.0.0/8", False), ("10.0.0.0/8, 127.0.0.0/8", True)])
def test_only_a_trusted_proxy_is_believed(tmp_path: Path, trusted: str, *, believed: bool) -> None:
    settings = {
        "PIPEPLAN_TRUSTED_PROXIES": trusted,
        "PIPEPLAN_REQUESTS_PER_S": "0.01",
        "PIPEPLAN_LEASE_S": "30",
    }
    with served(tmp_path / "proxied.sqlite3", **settings) as url, httpx.Client(base_url=url) as client:
        first = client.get("/v1/jobs", headers=FORWARDED)
        assert first.status_code == 200
        assert ("strict-transport-security" in first.headers) is believed
        another = client.get("/v1/jobs", headers=FORWARDED | {"X-Forwarded-For": "203.0.113.10"})
        assert another.status_code == (200 if believed else 429)


@pytest.mark.parametrize("wrong", ["example.org", "10.0.0.1/8", "*"])
def test_what_is_no_network_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidInputError, match="trusted_proxies"):
        load_settings(trusted_proxies=(wrong,))


def test_health_checks_may_ask_under_any_name(http: TestClient) -> None:
    strange = {"Host": "10.1.2.3:8437"}
    assert http.get("/healthz", headers=strange).status_code == 200
    assert http.get("/readyz", headers=strange).status_code == 200
    assert http.get("/v1/jobs", headers=strange).status_code == 403
