"""Aliases over HTTP: where they point, who moved them when, and moves that find them elsewhere."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi.testclient import TestClient

from pipeplan.errors import PreconditionFailedError
from pipeplan.protocol.plans import Alias
from planner_service.aliases import service as aliases
from planner_service.aliases.service import Expected
from planner_service.platform.context import Context
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import store_plan
from tests.planner_service.tokens import bearer, made


@pytest.fixture
def two(context: Context) -> tuple[str, str]:
    """The ids of two plans."""
    return store_plan(context), store_plan(context, batch_size=32)


def _put(http: TestClient, plan_id: str, name: str = "gpt-prod", **headers: str) -> int:
    headers = {key.replace("_", "-"): value for key, value in headers.items()}
    return http.put(f"/v1/aliases/{name}", json={"plan_id": plan_id}, headers=headers).status_code


def test_an_alias_leads_to_its_plan_and_its_tag_changes_when_it_moves(http: TestClient, two: tuple[str, str]) -> None:
    assert _put(http, two[0]) == 201
    first = http.get("/v1/aliases/gpt-prod/plan")
    assert first.content == http.get(f"/v1/plans/{two[0]}").content
    assert (first.headers["etag"], first.headers["content-location"]) == (f'"{two[0]}"', f"/v1/plans/{two[0]}")
    known = {"If-None-Match": first.headers["etag"]}
    assert http.get("/v1/aliases/gpt-prod/plan", headers=known).status_code == 304
    assert _put(http, two[1]) == 200
    assert http.get("/v1/aliases/gpt-prod/plan", headers=known).json()["id"] == two[1]


def test_an_alias_stands_for_its_plan_in_addresses(http: TestClient, two: tuple[str, str]) -> None:
    assert _put(http, two[0]) == 201
    for path in ("", "/request", "/streams?batches=2", "/alternatives", "/exports/torchrun", "/timeline", "/trace"):
        named, whole = (http.get(f"/v1/plans/{one}{path}") for one in ("gpt-prod", two[0]))
        assert (named.status_code, named.content) == (200, whole.content), path
        assert named.headers.get("etag") == whole.headers.get("etag")
        assert named.headers["content-location"] == f"/v1/plans/{two[0]}{path}"
        assert "immutable" not in named.headers.get("cache-control", "")
    assert http.head("/v1/plans/gpt-prod").headers["content-location"] == f"/v1/plans/{two[0]}"
    assert two[0] in http.get("/plans/gpt-prod", headers={"Accept": "text/html"}).text


@pytest.mark.parametrize("part", ["", "/exports/torchrun", "/streams", "/charts/stages.csv"])
def test_the_tag_of_an_aliases_plan_changes_when_it_moves(http: TestClient, two: tuple[str, str], part: str) -> None:
    _put(http, two[0])
    known = {"If-None-Match": http.get(f"/v1/plans/gpt-prod{part}").headers["etag"]}
    assert http.get(f"/v1/plans/gpt-prod{part}", headers=known).status_code == 304
    _put(http, two[1])
    moved = http.get(f"/v1/plans/gpt-prod{part}", headers=known)
    assert (moved.status_code, moved.content) == (200, http.get(f"/v1/plans/{two[1]}{part}").content)
    _put(http, two[0])
    again = http.get(f"/v1/plans/gpt-prod{part}", headers=known)
    assert (again.status_code, again.headers["content-location"]) == (304, f"/v1/plans/{two[0]}{part}")
    http.delete("/v1/aliases/gpt-prod")
    gone = http.get(f"/v1/plans/gpt-prod{part}", headers=known)
    assert (gone.status_code, gone.json()["detail"]) == (404, "there is no plan gpt-prod, nor an alias of that name")


def test_every_address_below_a_plan_takes_an_alias(http: TestClient, two: tuple[str, str]) -> None:
    """The addresses are those of the description: a new one is tried here without a change."""
    _put(http, two[0], "team/gpt")
    values = {"format_name": "slurm", "chart": "memory", "kind": "svg"}
    paths = [path for path in http.get("/openapi.json").json()["paths"] if path.startswith("/v1/plans/{plan_id}")]
    assert len(paths) == 9
    for path in paths:
        whole = http.get(path.format(plan_id=two[0], **values))
        for name in ("team/gpt", "team%2Fgpt"):
            named = http.get(path.format(plan_id=name, **values))
            assert (named.status_code, named.content) == (200, whole.content), path


def test_a_name_in_an_address_is_an_alias_before_it_is_the_head_of_an_id(
    http: TestClient, two: tuple[str, str]
) -> None:
    head = two[0][:6]
    _put(http, two[1], head)
    assert http.get(f"/v1/plans/{head}").json()["id"] == two[1]
    _put(http, two[1], "team/streams")  # ends as the address of a part does
    assert http.get("/v1/plans/team/streams").json()["id"] == two[1]
    _put(http, two[0], "team")
    assert http.get("/v1/plans/team/streams").json()["plan_id"] == two[0]
    assert http.get("/v1/plans/team/streams/streams").json()["plan_id"] == two[1]
    _put(http, two[0], "compare")
    assert http.get("/v1/plans/compare", params={"id": two}).json()["plans"][0]["id"] == two[0]


def test_an_agents_token_finds_what_it_may_read_by_an_alias(
    http: TestClient, context: Context, two: tuple[str, str]
) -> None:
    _put(http, two[0])
    agent = bearer(made(context, "agent"))
    assert http.get("/v1/plans/gpt-prod", headers=agent).json()["id"] == two[0]
    assert http.get("/v1/plans/gpt-prod/exports/torchrun", headers=agent).status_code == 403
    assert http.get("/v1/plans/gpt-none", headers=agent).status_code == 404
    assert http.get(f"/v1/plans/{two[0][:8]}", headers=agent).status_code == 404
    assert http.post("/v1/plans/gpt-prod").status_code == 405
    nested = http.get("/v1/plans/team/gpt/exports/torchrun")
    assert (nested.status_code, nested.json()["detail"].partition(",")[0]) == (404, "there is no plan team/gpt")
    assert http.get(f"/v1/plans/{two[0]}/nonsense").json()["detail"].startswith("nothing is at")


def test_the_history_tells_what_it_pointed_at_when_and_who_moved_it(
    http: TestClient, two: tuple[str, str], clock: Clock
) -> None:
    for plan_id in (two[0], two[1], two[1], two[0]):
        _put(http, plan_id)
        clock.advance(60)
    assert http.delete("/v1/aliases/gpt-prod").status_code == 204
    first = http.get("/v1/aliases/gpt-prod/history", params={"limit": 3}).json()
    rest = http.get("/v1/aliases/gpt-prod/history", params={"limit": 3, "cursor": first["next_cursor"]}).json()
    moves = [*first["items"], *rest["items"]]
    assert [move["plan_id"] for move in moves] == [None, two[0], two[1], two[0]]
    assert {move["moved_by"] for move in moves} == {"local"}
    assert [move["moved_at"][11:19] for move in moves] == ["03:08:05", "03:07:05", "03:05:05", "03:04:05"]
    assert http.get("/v1/aliases/gpt-prod").status_code == 404


@pytest.mark.each_case
def test_a_move_may_ask_that_nobody_else_has_moved_it(http: TestClient, two: tuple[str, str]) -> None:
    assert _put(http, two[0], If_Match="*") == 412
    assert _put(http, two[0], If_None_Match="*") == 201
    assert _put(http, two[1], If_None_Match="*") == 412
    tag = http.get("/v1/aliases/gpt-prod").headers["etag"]
    assert _put(http, two[1], If_Match=tag) == 200
    refused = http.put("/v1/aliases/gpt-prod", json={"plan_id": two[0]}, headers={"If-Match": tag})
    assert (refused.status_code, refused.json()["type"]) == (412, "urn:pipeplan:problem:precondition-failed")
    assert two[1] in refused.json()["detail"]
    assert http.delete("/v1/aliases/gpt-prod", headers={"If-Match": tag}).status_code == 412
    assert http.delete("/v1/aliases/gpt-prod", headers={"If-Match": "*"}).status_code == 204


def test_a_name_that_was_deleted_and_made_again_has_a_tag_that_it_never_had(
    http: TestClient, two: tuple[str, str]
) -> None:
    _put(http, two[0])
    tag = http.get("/v1/aliases/gpt-prod").headers["etag"]
    http.delete("/v1/aliases/gpt-prod")
    _put(http, two[0])
    assert http.get("/v1/aliases/gpt-prod").headers["etag"] != tag


@pytest.mark.each_case
@pytest.mark.parametrize(
    "header", [{"If_Match": "7"}, {"If_None_Match": '"7"'}, {"If_Match": "*", "If_None_Match": "*"}]
)
def test_conditions_that_cannot_be_read_are_refused(
    http: TestClient, two: tuple[str, str], header: dict[str, str]
) -> None:
    assert _put(http, two[0], **header) == 422


@pytest.mark.each_case
@pytest.mark.parametrize(
    "name", ["Prod", "a b", "-a", "a//b", "a/", "0" * 32, "team/plan", "x" * 201, "a%00", "%C3%A4", "a%2F..%2Fb"]
)
def test_a_name_that_could_be_mistaken_is_refused(http: TestClient, two: tuple[str, str], name: str) -> None:
    answer = http.put(f"/v1/aliases/{name}", json={"plan_id": two[0]})
    assert answer.status_code in (404, 405, 422), answer.text
    assert http.get("/v1/aliases").json()["items"] == []


@pytest.mark.each_case
@pytest.mark.parametrize("name", ["a", "team/gpt-3.prod", "plan", "history", "v1.2_3"])
def test_names_may_have_parts(http: TestClient, two: tuple[str, str], name: str) -> None:
    assert _put(http, two[0], name) == 201
    assert http.get(f"/v1/aliases/{name}").json()["name"] == name
    assert http.get(f"/v1/aliases/{name}/plan").json()["id"] == two[0]
    assert len(http.get(f"/v1/aliases/{name}/history").json()["items"]) == 1


def test_an_alias_points_at_a_stored_plan_only(http: TestClient, two: tuple[str, str]) -> None:
    answer = http.put("/v1/aliases/gpt-prod", json={"plan_id": "0" * 32})
    assert answer.json()["errors"][0]["field"] == "plan_id"
    assert http.get("/v1/aliases/gpt-prod/history").status_code == 404


def test_aliases_are_listed_by_plan_and_by_name(http: TestClient, two: tuple[str, str]) -> None:
    for index, name in enumerate(("b", "a", "c")):
        _put(http, two[index % 2], name)
    listed = http.get("/v1/aliases", params={"sort": "name", "limit": 2}).json()
    assert [item["name"] for item in listed["items"]] == ["a", "b"]
    rest = http.get("/v1/aliases", params={"limit": 2, "cursor": listed["next_cursor"]}).json()
    assert [item["name"] for item in rest["items"]] == ["c"]
    assert [i["name"] for i in http.get("/v1/aliases", params={"plan_id": two[0]}).json()["items"]] == ["c", "b"]


def test_of_those_who_move_it_from_the_same_place_one_does(context: Context, two: tuple[str, str]) -> None:
    first, _ = aliases.put(context, "gpt-prod", two[0], by="local")
    start = threading.Barrier(4)

    def move(who: int) -> Alias | None:
        start.wait()
        try:
            expected = Expected(versions=(str(first.version),))
            return aliases.put(context, "gpt-prod", two[1], by=f"caller-{who}", expected=expected)[0]
        except PreconditionFailedError:
            return None

    with ThreadPoolExecutor(4) as pool:
        moved = [alias for alias in pool.map(move, range(4)) if alias is not None]
    assert len(moved) == 1
    assert aliases.get(context, "gpt-prod") == moved[0]


def test_of_those_who_make_it_at_once_one_does_and_all_are_told_the_truth(
    context: Context, two: tuple[str, str]
) -> None:
    start = threading.Barrier(4)

    def make(who: int) -> bool:
        start.wait()
        return aliases.put(context, "gpt-prod", two[0], by=f"caller-{who}")[1]

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(make, range(4))) == [False, False, False, True]
