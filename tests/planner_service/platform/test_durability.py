"""Services that are killed under load: what was acknowledged is there, and nothing twice, on both databases."""

import pytest

from tests.planner_service.chaos import CLIENTS, Findings, compare, endure

REQUESTS = 300
KILLS = 3


@pytest.mark.each_case
def test_what_was_acknowledged_is_there_once_however_often_services_are_killed(database_url: str) -> None:
    """On PostgreSQL two services behave as one: clients ask now the one, now the other."""
    services = 2 if database_url.startswith("postgresql") else 1
    told = endure(database_url, requests=REQUESTS, kills=KILLS, services=services)
    assert compare(database_url, told) == Findings(lost=(), twice=(), unfinished=())
    assert (told.requests, told.kills) == (REQUESTS, KILLS)
    assert len(told.profiles) + len(told.runs) + len(told.cancelled) > REQUESTS // 2
    assert sum(told.repetitions.values()) > CLIENTS // 2
