"""Comparisons and exports over HTTP, and why one plan is faster than another."""

import re
from dataclasses import replace
from math import prod

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.cluster import Level
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Answer, Plan, Worker
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.protocol.plans import Factor
from planner_service.overview.openapi import CLUSTER, PLAN_REQUEST, PROFILE
from planner_service.plans import service as plans
from planner_service.plans.comparisons import comparison
from planner_service.platform.context import Context
from tests.planner_service.answers import halve, halve_unplayed
from tests.planner_service.examples import store_plan


def _solved(devices: int, **options: object) -> Plan:
    cluster = replace(CLUSTER, levels=(Level(size=devices, bandwidth_bytes_per_s=3e11),))
    chosen = Options(**options)  # type: ignore[arg-type]
    answer = solve("pipedream-2bw", PlanningProblem(profile=PROFILE, cluster=cluster, batch_size=16, options=chosen))
    assert isinstance(answer, Plan)
    return answer


def test_the_factors_of_a_speed_multiply_to_the_ratio() -> None:
    solved = (_solved(2), _solved(4), _solved(2, stages=2, recompute=True))
    compared = comparison([(content_id(plan), plan) for plan in solved])
    for speed, facts in zip(compared.speeds, compared.plans, strict=True):
        assert speed.ratio is not None
        assert prod(factor.ratio for factor in speed.because) == pytest.approx(speed.ratio)
        assert 0 < facts.busy_fraction <= 1 + 1e-9
    assert compared.speeds[0].because == ()
    assert compared.fastest == compared.plans[1].id
    assert "workers" in [factor.name for factor in compared.speeds[1].because]
    recomputing = {factor.name: factor for factor in compared.speeds[2].because}
    assert recomputing["compute"].ratio < 1
    assert "recomputing on 2 stages against" in recomputing["compute"].text


SHARES = st.floats(0.05, 1.0)
TIMES = st.floats(1e-4, 1.0)


@st.composite
def _priced(draw: st.DrawFn) -> tuple[Plan, float]:
    """A plan of two stages with any costs and replicas, and the share of the time in which its slowest stage works."""
    plan = _solved(2, stages=2)
    assert plan.simulated is not None
    replicas = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    costs = [
        replace(cost, forward_s=draw(TIMES), backward_s=draw(TIMES), reduce_s=draw(TIMES), reduce_tail_s=None)
        for cost in plan.costs
    ]
    slowest_s = max(
        (cost.forward_s + cost.backward_s) / cost.microbatch_size / count
        for cost, count in zip(costs, replicas, strict=True)
    )
    share = draw(SHARES)
    placement = tuple(Worker(stage=i, replica=r) for i, count in enumerate(replicas) for r in range(count))
    stages = [replace(stage, replicas=count) for stage, count in zip(plan.stages, replicas, strict=True)]
    simulated = replace(plan.simulated, throughput_samples_per_s=share / slowest_s)
    priced = replace(
        plan, stages=tuple(stages), costs=tuple(costs), placement=placement, simulated=simulated, schedule="pipedream"
    )
    return priced, share


@given(_priced(), _priced())
def test_a_speed_is_explained_by_what_its_slowest_stage_does(
    one: tuple[Plan, float], other: tuple[Plan, float]
) -> None:
    (plan, share), (first, first_share) = one, other
    compared = comparison([("first", first), ("plan", plan)])
    speed, its = compared.speeds[1], compared.plans[1]
    ratios = {factor.name: factor.ratio for factor in speed.because}
    assert prod(ratios.values()) == pytest.approx(speed.ratio)
    assert ratios.get("exchange", 1.0) * ratios.get("waiting", 1.0) == pytest.approx(share / first_share)
    assert its.slowest_s_per_sample >= its.device_s_per_sample / its.workers * (1 - 1e-9)
    assert ratios.get("workers", 1.0) == pytest.approx(plan.workers / first.workers)


def test_each_cause_alone_is_named_alone() -> None:
    plan = _solved(2, stages=2, schedule="1f1b")
    assert plan.simulated is not None
    rate = plan.simulated.throughput_samples_per_s
    pace_s = comparison([("plan", plan)] * 2).plans[0].slowest_s_per_sample

    # Half as fast for nothing but waiting.
    waiting = replace(plan, simulated=replace(plan.simulated, throughput_samples_per_s=rate / 2))
    # Half as fast because every exchange takes what all else does.
    exchange_s = plan.batch_size * (2 / rate - pace_s)
    costs = tuple(replace(cost, reduce_s=exchange_s - cost.update_s, reduce_tail_s=None) for cost in plan.costs)
    exchanging = replace(waiting, costs=costs)
    # Twice the compute on every stage, and twice the time.
    doubled = replace(
        waiting,
        costs=tuple(replace(c, forward_s=2 * c.forward_s, backward_s=2 * c.backward_s) for c in plan.costs),
    )
    for changed, name in ((waiting, "waiting"), (exchanging, "exchange"), (doubled, "compute")):
        (factor,) = _strong(comparison([("plan", plan), ("changed", changed)]).speeds[1].because)
        assert factor.name == name
        assert factor.ratio == pytest.approx(0.5, rel=0.2)


def _strong(factors: tuple[Factor, ...]) -> list[Factor]:
    return [factor for factor in factors if abs(factor.ratio - 1) > 0.1]


def test_what_makes_plans_incomparable_is_said(http: TestClient, context: Context) -> None:
    plan = _solved(2)
    assert comparison([("one", plan), ("same", plan)]).caveats == ()
    other = replace(plan, model=replace(plan.model, name="another"), batch_size=32, cluster_id="elsewhere")
    caveats = comparison([("one", plan), ("other", other)]).caveats
    assert [sentence.split(" differ")[0] for sentence in caveats] == ["The models", "The clusters", "The batches"]
    assert "16 and 32" in caveats[2]
    stored = store_plan(context), store_plan(context, batch_size=32)
    assert "The batches differ (16 and 32)" in http.get("/compare", params={"plan": stored}).text


def test_an_unplayed_plan_is_compared_by_closed_forms_and_is_never_the_fastest() -> None:
    two, four = _solved(2), _solved(4)
    assert two.simulated is not None
    unplayed = replace(four, simulated=None)
    compared = comparison([("two", two), ("four", unplayed)])
    facts, speed = compared.plans[1], compared.speeds[1]
    assert (facts.throughput_samples_per_s, facts.bubble_fraction) == (None, None)
    form = two.closed_form.throughput_samples_per_s
    assert (facts.closed_form_samples_per_s, compared.plans[0].closed_form_samples_per_s) == (
        four.closed_form.throughput_samples_per_s,
        form,
    )
    assert (speed.price, speed.ratio) == ("closed form", facts.closed_form_samples_per_s / form)
    assert facts.closed_form_samples_per_s > form
    assert prod(factor.ratio for factor in speed.because) == pytest.approx(speed.ratio)
    assert compared.fastest == "two"
    assert comparison([("two", replace(two, simulated=None)), ("four", unplayed)]).fastest == "four"


def test_played_plans_are_compared_by_their_plays_alone() -> None:
    two = _solved(2)
    assert two.simulated is not None
    doubled = replace(two.simulated, throughput_samples_per_s=2 * two.simulated.throughput_samples_per_s)
    halved = replace(two.closed_form, throughput_samples_per_s=two.closed_form.throughput_samples_per_s / 2)
    compared = comparison([("one", two), ("other", replace(two, simulated=doubled, closed_form=halved))])
    assert compared.speeds[1].price == "played"
    assert compared.speeds[1].ratio == pytest.approx(2.0)
    assert compared.fastest == "other"
    named = {difference.field for difference in compared.differences}
    assert named == {"throughput_samples_per_s", "closed_form_samples_per_s", "busy_fraction"}


def test_the_page_of_a_comparison_names_both_figures(http: TestClient, context: Context) -> None:
    first, second = store_plan(context), store_plan(replace(context, solve=halve_unplayed), batch_size=32)
    page = http.get("/compare", params={"plan": [first, second]}).text
    for text in ("Throughput", "60 samples/s", "closed form only", "Throughput in closed form", "80 samples/s"):
        assert text in page
    assert re.search(r"as fast as .*</a> in closed form[.,]", page) and "when both are played" not in page


def test_what_differs_is_named_with_every_plans_value(http: TestClient, context: Context) -> None:
    first, second = store_plan(context), store_plan(context, batch_size=32)
    answer = http.get("/v1/plans/compare", params={"id": [first, second]}).json()
    assert [plan["id"] for plan in answer["plans"]] == [first, second]
    differences = {difference["field"]: difference["values"] for difference in answer["differences"]}
    assert differences == {"batch_size": [16, 32], "microbatches": [8, 16]}
    assert [speed["ratio"] for speed in answer["speeds"]] == [1.0, 1.0]


def test_a_comparison_takes_two_to_ten_plans_that_exist(http: TestClient, context: Context) -> None:
    first = store_plan(context)
    assert http.get("/v1/plans/compare", params={"id": [first]}).status_code == 422
    assert http.get("/v1/plans/compare", params={"id": [first] * 11}).status_code == 422
    assert http.get("/v1/plans/compare").json()["errors"][0]["field"] == "id"
    assert http.get("/v1/plans/compare", params={"id": [first, "0" * 32]}).status_code == 404


def test_alternatives_come_with_the_reason_that_each_lost(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context)
    answer = http.get(f"/v1/plans/{plan_id}/alternatives").json()
    assert answer["plan_id"] == plan_id
    assert [item["reason"] for item in answer["alternatives"]] == ["slower: 50 samples/s"]


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("torchrun", "text/x-shellscript"),
        ("slurm", "text/x-shellscript"),
        ("kubernetes", "application/yaml"),
        ("megatron", "text/x-shellscript"),
        ("deepspeed", "application/json"),
        ("chrome-trace", "application/json"),
    ],
)
def test_a_plan_is_exported_in_every_format(http: TestClient, context: Context, name: str, media_type: str) -> None:
    plan_id = store_plan(context)
    answer = http.get(f"/v1/plans/{plan_id}/exports/{name}")
    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, media_type)
    assert answer.headers["content-disposition"].startswith(f'attachment; filename="{plan_id[:8]}-{name}.')
    again = http.get(f"/v1/plans/{plan_id}/exports/{name}", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304


def test_a_target_version_chooses_what_torchtitan_reads(http: TestClient, context: Context) -> None:
    def with_adam(planner: str, problem: PlanningProblem) -> Answer:
        answer = halve(planner, problem)
        return replace(answer, optimizer="adam") if isinstance(answer, Plan) else answer

    plan_id = store_plan(replace(context, solve=with_adam))
    path = f"/v1/plans/{plan_id}/exports/torchtitan"
    usual, toml, python = (http.get(path + query) for query in ("", "?target_version=0.2", "?target_version=2026-08"))
    assert usual.text == toml.text and "local_batch_size" in toml.text
    assert (toml.headers["content-type"].partition(";")[0], python.headers["content-type"].partition(";")[0]) == (
        "application/toml",
        "text/x-python",
    )
    assert python.headers["content-disposition"].endswith('-torchtitan.py"')
    assert "lm_head" in python.text and python.headers["etag"] != toml.headers["etag"]
    (error,) = http.get(f"{path}?target_version=0.3").json()["errors"]
    assert (error["field"], error["rule"]) == ("target_version", "must be one of 0.2, 2026-08 for torchtitan")
    assert http.get(f"/v1/plans/{plan_id}/exports/slurm?target_version=0.2").status_code == 422


def test_a_format_that_cannot_hold_the_plan_says_why(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context)
    refused = http.get(f"/v1/plans/{plan_id}/exports/torchtitan")
    assert refused.status_code == 422
    assert "Adam and AdamW only" in refused.json()["detail"]
    assert http.get(f"/v1/plans/{plan_id}/exports/horovod").json()["errors"][0]["field"] == "format"
    assert http.get(f"/v1/plans/{'0' * 32}/exports/slurm").status_code == 404


def test_a_comparison_calls_plans_by_the_ids_under_which_they_are_stored(context: Context) -> None:
    plan_id = store_plan(context)
    plan = plans.get(context, plan_id)
    assert [facts.id for facts in comparison([(plan_id, plan), ("another", plan)]).plans] == [plan_id, "another"]
    assert PLAN_REQUEST.batch_size == plan.batch_size
