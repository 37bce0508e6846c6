"""What was computed from a datasheet says so wherever it is shown: in the API, on the pages, in the terminal."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from pipeplan.cli.plan_tables import show_comparison, show_list, show_plan
from pipeplan.documents.identity import canonical_json, content_id
from pipeplan.documents.plan import Answer, Plan
from pipeplan.planners.problem import PlanningProblem
from pipeplan.protocol.plans import PlanRequest
from planner_service.documents.service import clusters, profiles
from planner_service.documents.store import packed_profile
from planner_service.documents.store import profiles as storage
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from planner_service.platform.database import Database
from planner_service.platform.listing import Cut
from planner_service.platform.migrations import downgrade, upgrade
from planner_service.platform.tables import profiles as table
from tests.planner_service.answers import halve
from tests.planner_service.examples import request_document

ESTIMATED = replace(PROFILE, estimated=True)


def _answer(planner: str, problem: PlanningProblem) -> Answer:
    answer = halve(planner, problem)
    return replace(answer, estimated=problem.profile.estimated) if isinstance(answer, Plan) else answer


def _stored(context: Context) -> tuple[str, str]:
    """A plan from a measured profile, and one from an estimated profile."""
    context = replace(context, solve=_answer)
    clusters.create(context, CLUSTER)
    ids = []
    for profile in (PROFILE, ESTIMATED):
        profiles.create(context, profile)
        request = PlanRequest.model_validate(request_document(profile_id=content_id(profile)))
        ids.append(str(plans.create(context, request).plan_id))
    return ids[0], ids[1]


def test_summaries_of_profiles_and_plans_say_it(http: TestClient, context: Context) -> None:
    _stored(context)
    for kind in ("profiles", "plans"):
        assert [item["estimated"] for item in http.get(f"/v1/{kind}").json()["items"]] == [True, False]


def test_the_pages_say_it_of_the_estimated_plan_alone(http: TestClient, context: Context) -> None:
    measured, estimated = _stored(context)
    marked = "computed from a datasheet, not measured"
    assert http.get("/plans").text.count(marked) == 1
    assert marked in http.get(f"/plans/{estimated}").text
    assert marked not in http.get(f"/plans/{measured}").text


def test_the_terminal_says_it_of_the_estimated_plan_alone(context: Context, capsys: pytest.CaptureFixture[str]) -> None:
    ids = _stored(context)
    measured, estimated = (plans.get(context, plan_id) for plan_id in ids)
    listed = plans.newest(context, Cut(limit=10))
    for plan, count in ((estimated, 1), (measured, 0)):
        show_plan(plan)
        assert capsys.readouterr().out.count("(estimated)") == count
    show_comparison([measured, estimated])
    assert capsys.readouterr().out.count("(estimated)") == 1
    show_list(listed)
    assert capsys.readouterr().out.count("(estimated)") == 1


def test_what_an_older_database_holds_was_measured(database_url: str) -> None:
    database = Database(database_url)
    upgrade(database)
    downgrade(database, "0001")
    columns = [column.name for column in table.c if column.name not in ("sequence", "estimated", "used_at")]
    values = ("old", canonical_json(PROFILE), "gpt2", "core", "float32", 1, "2026-01-02 03:04:05")
    named = ", ".join(f":{name}" for name in columns)
    with database.write() as connection:
        statement = text(f"INSERT INTO profiles ({', '.join(columns)}) VALUES ({named})")
        connection.execute(statement, dict(zip(columns, values, strict=True)))
    upgrade(database)
    with database.write() as connection:
        storage.add(connection, packed_profile(ESTIMATED), datetime(2026, 1, 3, tzinfo=UTC))
        found = (storage.summary(connection, identity) for identity in ("old", content_id(ESTIMATED)))
        assert [summary.estimated for summary in found if summary] == [False, True]
    database.close()
