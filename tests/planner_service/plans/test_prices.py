"""Prices that come later: a plan without a play gets one in the background, once, under its id."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from pipeplan.client.client import Client
from pipeplan.documents.files import parse_plan
from pipeplan.documents.identity import content_id
from pipeplan.errors import SolverError
from pipeplan.planners.complete import SIMULATED_INSTRUCTIONS, play_later
from pipeplan.protocol.plans import PlanRequest
from planner_service.plans import prices
from planner_service.plans import service as stored_plans
from planner_service.plans.price_process import priced
from planner_service.plans.prices import CLAIM_S, PriceRunner
from planner_service.plans.questions import Price, PriceQuestion
from planner_service.platform.context import Context
from planner_service.platform.migrations import downgrade, upgrade
from planner_service.platform.tables import plans
from tests.planner_service.answers import halve_unplayed
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import request_document, store_plan
from tests.planner_service.servers import served
from tests.waiting import PATIENCE_S, wait_until

ENOUGH, TOO_FEW = 100_000, 10
"""Instructions: the examples' plan has some two hundred."""


class PlaysHere:
    """A worker that plays in this process, once it may begin; it cannot be ended."""

    def __init__(self, begins: threading.Event | None = None, error: SolverError | None = None) -> None:
        self.alive = True
        self.asked = threading.Event()
        self._begins, self._error = begins, error

    def ask(self, question: PriceQuestion, observe: Callable[[None], None]) -> Price | None:
        """Plays, or fails."""
        self.asked.set()
        if self._begins is not None:
            assert self._begins.wait(PATIENCE_S)
        if self._error is not None:
            raise self._error
        return priced(question, observe)

    def kill(self) -> None:
        """Takes no further questions."""
        self.alive = False
        if self._begins is not None:
            self._begins.set()

    def close(self) -> None:
        """The same."""
        self.kill()


@pytest.fixture
def unplayed(context: Context) -> str:
    """The id of a stored plan without a play."""
    return store_plan(replace(context, solve=halve_unplayed))


@pytest.fixture
def runner(context: Context) -> Iterator[PriceRunner]:
    """Plays in this process."""
    made = PriceRunner(context, PlaysHere, instructions=ENOUGH)
    yield made
    made.close()


def _play(runner: PriceRunner) -> bool:
    return asyncio.run(runner.play_next())


def _tried(context: Context, plan_id: str) -> int | None:
    with context.database.read() as connection:
        found: int | None = connection.execute(
            select(plans.c.tried_instructions).where(plans.c.id == plan_id)
        ).scalar_one()
    return found


def test_a_plan_without_a_play_gets_one_under_its_id(http: TestClient, unplayed: str, runner: PriceRunner) -> None:
    before = parse_plan(http.get(f"/v1/plans/{unplayed}").text)
    (listed,) = http.get("/v1/plans").json()["items"]
    assert (before.simulated, listed["throughput_samples_per_s"], listed["bubble_fraction"]) == (None, None, None)

    assert _play(runner)
    assert not _play(runner)
    document = http.get(f"/v1/plans/{unplayed}").json()
    after = parse_plan(document)
    assert after == replace(before, simulated=play_later(before, instructions=ENOUGH))
    assert document["id"] == content_id(after) == unplayed
    (listed,) = http.get("/v1/plans").json()["items"]
    for name in ("throughput_samples_per_s", "bubble_fraction"):
        assert document[name] == listed[name] == getattr(after.simulated, name) > 0
    (whole,) = http.get("/v1/plans?content=true").json()["items"]
    assert whole == document


def test_lists_sort_and_filter_by_the_price_that_came_later(
    http: TestClient, context: Context, unplayed: str, runner: PriceRunner
) -> None:
    played = store_plan(context, batch_size=32)
    order = [plan["id"] for plan in http.get("/v1/plans?sort=-throughput").json()["items"]]
    assert order == [played, unplayed]
    assert _play(runner)
    rates = {plan["id"]: plan["throughput_samples_per_s"] for plan in http.get("/v1/plans").json()["items"]}
    for sort, reverse in (("throughput", False), ("-throughput", True)):
        order = [plan["id"] for plan in http.get(f"/v1/plans?sort={sort}").json()["items"]]
        assert order == sorted(rates, key=lambda plan_id: rates[plan_id], reverse=reverse)
    passing = http.get("/v1/plans", params={"min_throughput": rates[unplayed]}).json()["items"]
    assert unplayed in [plan["id"] for plan in passing]
    page = http.get(f"/plans/{unplayed}").text
    assert "closed form only" not in page and "played over" in page


@pytest.mark.each_case
@pytest.mark.parametrize("alias", [False, True], ids=["by id", "by alias"])
def test_whoever_has_the_plan_without_its_play_hears_of_it(
    http: TestClient, unplayed: str, runner: PriceRunner, alias: bool
) -> None:
    http.put("/v1/aliases/newest", json={"plan_id": unplayed})
    path = "/v1/aliases/newest/plan" if alias else f"/v1/plans/{unplayed}"
    for _ in range(2):  # as it is read, and as it would lie ready
        before = http.get(path)
        assert before.headers["cache-control"] == "private, no-cache"
        known = {"If-None-Match": before.headers["etag"]}
        assert http.get(path, headers=known).status_code == 304
    assert http.get("/v1/plans?content=true").json()["items"][0]["simulated"] is None
    assert _play(runner)
    for _ in range(2):
        after = http.get(path, headers=known)
        assert after.status_code == 200 and after.json()["simulated"] is not None
        assert http.get(path, headers={"If-None-Match": after.headers["etag"]}).status_code == 304
    assert after.headers["cache-control"] == f"private, {'no-cache' if alias else 'max-age=31536000, immutable'}"


def test_the_same_request_is_answered_with_the_play(context: Context, unplayed: str, runner: PriceRunner) -> None:
    """The planner answers without one again; the reply once was without it, beside a stored plan that had it."""
    again = replace(context, solve=halve_unplayed)
    request = PlanRequest.model_validate(request_document())
    assert _play(runner)
    created = stored_plans.create(again, request)
    assert (created.plan_id, created.new) == (unplayed, False)
    assert created.answer == stored_plans.get(context, unplayed)
    assert getattr(created.answer, "simulated", None) is not None


def test_a_plan_of_the_first_release_gets_one_and_goes_back_without_it(
    http: TestClient, context: Context, unplayed: str, runner: PriceRunner
) -> None:
    database = context.database
    downgrade(database, "0004")
    with database.read() as connection:
        as_first = json.loads(connection.execute(select(plans.c.content)).scalar_one())
    assert "closed_form" not in as_first and as_first["simulated"] is None
    upgrade(database)
    assert _play(runner)
    played = http.get(f"/v1/plans/{unplayed}").json()
    assert content_id(parse_plan(played)) == unplayed
    assert played["closed_form"]["throughput_samples_per_s"] == as_first["throughput_samples_per_s"]
    assert played["throughput_samples_per_s"] == played["simulated"]["throughput_samples_per_s"]

    downgrade(database, "0005")
    with database.read() as connection:
        row = connection.execute(select(plans.c.content, plans.c.throughput_samples_per_s)).one()
    assert row.throughput_samples_per_s is None and "added_within" not in row.content
    downgrade(database, "0004")
    with database.read() as connection:
        assert json.loads(connection.execute(select(plans.c.content)).scalar_one()) == as_first
    upgrade(database)
    assert _play(runner)
    assert http.get(f"/v1/plans/{unplayed}").json() == played


@pytest.mark.each_case
def test_a_plan_too_long_to_play_is_tried_again_only_under_a_larger_limit(context: Context, unplayed: str) -> None:
    small, large = (PriceRunner(context, PlaysHere, instructions=limit) for limit in (TOO_FEW, ENOUGH))
    assert _tried(context, unplayed) is None
    assert _play(small)
    assert _tried(context, unplayed) == TOO_FEW
    assert not _play(small)
    with context.database.read() as connection:
        assert connection.execute(select(plans.c.throughput_samples_per_s)).scalar_one() is None
    assert _play(large)
    with context.database.read() as connection:
        assert connection.execute(select(plans.c.throughput_samples_per_s)).scalar_one() is not None
    small.close()
    large.close()


@pytest.mark.each_case
def test_a_play_that_ends_its_process_is_not_tried_again(context: Context, unplayed: str) -> None:
    runner = PriceRunner(context, lambda: PlaysHere(error=SolverError("out of memory")), instructions=ENOUGH)
    assert _play(runner)
    assert _tried(context, unplayed) == ENOUGH
    assert not _play(runner)
    runner.close()


def test_of_many_processes_one_plays_a_plan(context: Context) -> None:
    stored = {store_plan(replace(context, solve=halve_unplayed), batch_size=16 * count) for count in range(1, 5)}
    asking = 8
    start = threading.Barrier(asking)

    def claims() -> list[str]:
        start.wait()
        return [claimed.question.plan_id for claimed in iter(lambda: prices.claim(context, ENOUGH), None)]

    with ThreadPoolExecutor(asking) as pool:
        claimed = [plan_id for own in [pool.submit(claims) for _ in range(asking)] for plan_id in own.result()]
    assert sorted(claimed) == sorted(stored)


def test_while_one_plays_another_finds_nothing_to_do(context: Context, unplayed: str) -> None:
    begins = threading.Event()
    worker = PlaysHere(begins)
    first = PriceRunner(context, lambda: worker, instructions=ENOUGH)
    second = PriceRunner(context, PlaysHere, instructions=ENOUGH)

    async def both() -> tuple[bool, bool]:
        playing = asyncio.create_task(first.play_next())
        assert await asyncio.to_thread(worker.asked.wait, PATIENCE_S)
        found = await second.play_next()
        begins.set()
        return await playing, found

    assert asyncio.run(both()) == (True, False)
    first.close()
    second.close()


def test_a_claim_that_ran_out_is_anothers_and_the_play_is_added_once(
    context: Context, clock: Clock, unplayed: str
) -> None:
    late = prices.claim(context, ENOUGH)
    assert late is not None and prices.claim(context, ENOUGH) is None
    clock.advance(CLAIM_S + 1)
    other = prices.claim(context, ENOUGH)
    assert other is not None and other.until - late.until == timedelta(seconds=CLAIM_S + 1)
    prices.end(context, late, tried=True)  # this claim is over: its word counts no more
    assert _tried(context, unplayed) is None and prices.claim(context, ENOUGH) is None
    price = priced(other.question, lambda _: None)
    assert price is not None
    assert prices.add(context, other, price)
    assert not prices.add(context, late, replace(price, throughput_samples_per_s=1.0))
    with context.database.read() as connection:
        stored = connection.execute(select(plans.c.throughput_samples_per_s)).scalar_one()
    assert stored == price.throughput_samples_per_s


def test_a_play_that_is_stopped_leaves_the_plan_to_others(context: Context, unplayed: str) -> None:
    worker = PlaysHere(threading.Event())
    runner = PriceRunner(context, lambda: worker, instructions=ENOUGH)

    async def stop() -> None:
        playing = asyncio.create_task(runner.play_next())
        assert await asyncio.to_thread(worker.asked.wait, PATIENCE_S)
        playing.cancel()
        await asyncio.wait({playing})
        assert playing.cancelled()

    asyncio.run(stop())
    runner.close()
    assert _tried(context, unplayed) is None
    again = prices.claim(context, ENOUGH)
    assert again is not None and again.question.plan_id == unplayed


def test_nothing_is_played_where_the_operator_wants_none(context: Context, unplayed: str) -> None:
    runner = PriceRunner(context, PlaysHere, instructions=0)
    asyncio.run(asyncio.wait_for(runner.run(), PATIENCE_S))
    assert _tried(context, unplayed) is None
    with context.database.read() as connection:
        assert connection.execute(select(plans.c.throughput_samples_per_s)).scalar_one() is None


@pytest.mark.each_case
def test_a_service_that_starts_plays_what_has_no_price_in_a_process(
    context: Context, unplayed: str, database_url: str
) -> None:
    with served(database_url) as url, Client(url) as service:
        wait_until(lambda: service.plan(unplayed).simulated)
        plan = service.plan(unplayed)
    assert plan.simulated is not None and plan.simulated.added_within == SIMULATED_INSTRUCTIONS
    assert replace(plan, simulated=None) == parse_plan(_content_without_play(context, unplayed))


def _content_without_play(context: Context, plan_id: str) -> str:
    """The document as it was stored: the play is all that differs."""
    with context.database.read() as connection:
        document = json.loads(connection.execute(select(plans.c.content).where(plans.c.id == plan_id)).scalar_one())
    return json.dumps(document | {"simulated": None})
