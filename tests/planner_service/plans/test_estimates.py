"""Plans of models without a profile: one job, which an agent begins and a solver ends."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipeplan.documents.cluster import Cluster, DeviceGroup, Level
from pipeplan.documents.identity import content_id
from pipeplan.documents.named_clusters import named_cluster
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Device
from pipeplan.errors import InvalidInputError, LeaseLostError
from pipeplan.protocol.estimates import EstimateResult, EstimateTask, FormsAsked, ModelPlanRequest
from pipeplan.protocol.jobs import Completion, Failure, Job, Lease, LeaseRequest, PlanTask
from pipeplan.protocol.plans import PlanQuery
from planner_service.documents.service import clusters
from planner_service.jobs import service as jobs
from planner_service.overview.openapi import PROFILE
from planner_service.plans import estimates
from planner_service.plans import jobs as plan_jobs
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from tests.planner_service.examples import ANY_WORK

DOCUMENT: dict[str, Any] = {
    "model": "hf:gpt2?n_layer=2",
    "cluster_id": "dgx-a100:2",
    "planner": "pipedream-2bw",
    "batch_size": 16,
    "sequence_length": 1024,
    "dtype": "bfloat16",
    "options": {"as_if": True},
}
REQUEST = ModelPlanRequest.model_validate(DOCUMENT)
RESULT = EstimateResult(profile=PROFILE)


def _lease(context: Context, request: LeaseRequest = ANY_WORK) -> Lease:
    lease = jobs.lease(context, request)
    assert lease is not None
    return lease


def _estimated(context: Context) -> tuple[Job, Lease, Completion]:
    """A job whose estimate is done, the agent's lease and its report."""
    job = estimates.enqueue(context, REQUEST)
    lease = _lease(context)
    report = Completion(token=lease.token, report_id="report-1234", result=RESULT)
    return jobs.complete(context, job.id, report), lease, report


def _ended(http: TestClient, context: Context, job: Job) -> Job:
    """The job once the service's own solver has ended it."""
    http.get(f"/v1/jobs/{job.id}/events")
    return jobs.get(context, job.id)


def test_the_agent_is_told_the_datasheet_and_the_microbatches(context: Context) -> None:
    estimates.enqueue(context, REQUEST)
    task = _lease(context).job.task
    assert isinstance(task, EstimateTask)
    assert (task.analytic, task.microbatch_sizes, task.model) == ("a100-80gb", (1, 2, 4, 8, 16), DOCUMENT["model"])
    assert task.request == REQUEST


def test_the_job_goes_on_as_the_plan_and_ends_with_it(http: TestClient, context: Context) -> None:
    job, _, _ = _estimated(context)
    assert (job.state, job.attempts, job.agent) == ("queued", 0, None)
    assert job.profile_id == content_id(PROFILE)
    assert isinstance(job.task, PlanTask)
    assert job.task.request == REQUEST.with_profile(content_id(PROFILE))
    assert jobs.lease(context, ANY_WORK) is None  # what is left is no agent's

    ended = _ended(http, context, job)
    assert ended.state == "succeeded", ended.error
    plan = plans.get(context, str(ended.plan_id))
    assert isinstance(plan, Plan)
    assert (plan.profile_id, plan.cluster_id) == (content_id(PROFILE), content_id(named_cluster("dgx-a100:2")))
    assert [item.id for item in plans.page(context, PlanQuery()).items] == [ended.plan_id]


@pytest.mark.each_case
def test_a_report_that_is_repeated_is_taken_again_and_the_lease_is_over(http: TestClient, context: Context) -> None:
    job, lease, report = _estimated(context)
    assert jobs.complete(context, job.id, report).task == job.task
    with pytest.raises(LeaseLostError):
        jobs.fail(context, job.id, Failure(token=lease.token, error="too late"))
    with pytest.raises(LeaseLostError):
        jobs.complete(context, job.id, Completion(token=lease.token, result=RESULT))
    ended = _ended(http, context, job)
    assert ended.state == "succeeded"
    assert jobs.complete(context, job.id, report) == ended


@pytest.mark.each_case
def test_what_fails_is_tried_again_where_it_failed(http: TestClient, context: Context) -> None:
    """The agent reports a profile of another device, with which no planner plans."""
    job = estimates.enqueue(context, ModelPlanRequest.model_validate(DOCUMENT | {"options": {}}))
    jobs.fail(context, job.id, Failure(token=_lease(context).token, error="dtype: must be ..."))
    again = jobs.retry(context, job.id)
    assert (again.state, again.task.kind) == ("queued", "estimate")
    report = Completion(token=_lease(context).token, result=RESULT)
    assert jobs.complete(context, job.id, report).task.kind == "plan"
    for _ in range(2):
        failed = _ended(http, context, job)
        assert failed.state == "failed"
        assert str(failed.error).startswith("profile.device.name: must be the cluster's type of device")
        assert jobs.retry(context, job.id).task.kind == "plan"


def test_a_cancelled_job_takes_no_estimate(context: Context) -> None:
    job = estimates.enqueue(context, REQUEST)
    lease = _lease(context)
    assert jobs.cancel(context, job.id).state == "cancelled"
    with pytest.raises(LeaseLostError):
        jobs.complete(context, job.id, Completion(token=lease.token, result=RESULT))
    assert plan_jobs.take(context, "service") is None


def test_only_an_agent_that_knows_estimates_is_asked(context: Context) -> None:
    """An agent of an earlier release names the kinds that it knows."""
    estimates.enqueue(context, REQUEST)
    assert jobs.lease(context, LeaseRequest(agent="old", kinds=("profile", "links", "run"))) is None
    assert jobs.lease(context, LeaseRequest(agent="new")) is not None


def test_a_stored_cluster_is_taken_by_its_id(context: Context) -> None:
    stored = clusters.create(context, named_cluster("dgx-h100"))[0].id
    job = estimates.enqueue(context, REQUEST.model_copy(update={"cluster_id": stored}))
    assert isinstance(job.task, EstimateTask) and job.task.analytic == "h100-sxm"


@pytest.mark.parametrize(
    ("devices", "field", "rule"),
    [
        (("cpu",), "cluster.device.name", "must be a device with a datasheet"),
        (("A100",), "cluster.device.name", "must say which of a100-40gb, a100-80gb it is"),
        (("L4", "T4"), "cluster_id", "must have devices of one type where the profile is estimated"),
    ],
)
def test_a_cluster_without_one_datasheet_is_refused(
    context: Context, devices: tuple[str, ...], field: str, rule: str
) -> None:
    groups = tuple(DeviceGroup(device=Device(name=name, memory_bytes=2**34), count=1) for name in devices)
    levels = (Level(size=len(devices), bandwidth_bytes_per_s=1e9),)
    stored = clusters.create(context, Cluster(levels=levels, groups=groups))[0].id
    with pytest.raises(InvalidInputError, match=rule) as caught:
        estimates.enqueue(context, REQUEST.model_copy(update={"cluster_id": stored}))
    assert caught.value.field == field


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("engine", "options", "forms"),
    [
        ("pipeplan", {}, None),
        ("megatron", {}, FormsAsked(most_tensor=8, most_context=4, most_expert=16, most_devices=16)),
        (
            "megatron",
            {"tensor": 4, "sequence_parallel": False},
            FormsAsked(
                tensor=4, most_tensor=8, most_context=4, most_expert=16, sequence_parallel=False, most_devices=16
            ),
        ),
        (
            "megatron",
            {"stages": 2, "expert_tensor": 1},
            FormsAsked(most_tensor=8, most_context=4, most_expert=16, expert_tensor=1, most_devices=8),
        ),
        ("deepspeed", {}, FormsAsked(most_tensor=8, most_expert=16, sequence_parallel=False, most_devices=16)),
        ("fsdp", {"context": 2}, FormsAsked(context=2, most_tensor=8, most_context=4, most_expert=16, most_devices=16)),
    ],
)
def test_forms_are_asked_for_that_the_engine_and_the_options_allow(
    context: Context, engine: str, options: dict[str, Any], forms: FormsAsked | None
) -> None:
    asked = {"planner": "auto", "sequence_length": 8192, "options": {"engine": engine, **options}}
    job = estimates.enqueue(context, ModelPlanRequest.model_validate(DOCUMENT | asked))
    assert isinstance(job.task, EstimateTask)
    assert job.task.forms == forms
    leased = _lease(context).job.task
    assert isinstance(leased, EstimateTask) and leased.forms == forms


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": "nonsense"}, "model"),
        ({"model": ""}, "model"),
        ({"dtype": "int8"}, "dtype"),
        ({"sequence_length": 0}, "sequence_length"),
        ({"cluster_id": "dgx-h10"}, "cluster_id"),
        ({"cluster_id": "0" * 32}, "cluster_id"),
        ({"batch_size": 0}, "batch_size"),
        ({"profile_id": "0" * 32}, "profile_id"),
        ({"options": {"time_limit_s": 1e9}}, "options.time_limit_s"),
        ({"options": {"recompute_factor": 0.5}}, "recompute_factor"),
        ({"planner": "auto", "options": {"tensor": 2}}, "tensor"),
        ({"planner": "auto", "options": {"engine": "megatron", "tensor": 3}}, "tensor"),
        ({"planner": "auto", "options": {"engine": "deepspeed", "context": 2}}, "context"),
        ({"planner": "auto", "options": {"expert": 2}}, "expert"),
        ({"precision": "int4"}, "precision"),
        ({"precision": "fp8", "dtype": "float32"}, "precision"),
        ({"precision": "fp8", "dtype": "bfloat16", "options": {"engine": "deepspeed"}}, "precision"),
    ],
)
def test_a_wrong_request_is_refused_and_enqueues_nothing(http: TestClient, changes: dict[str, Any], field: str) -> None:
    answer = http.post("/v1/plans", json=DOCUMENT | changes)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field
    assert http.get("/v1/jobs").json()["items"] == []


def test_the_answer_is_a_job_and_the_same_key_gives_the_same(http: TestClient) -> None:
    once = {"Idempotency-Key": "one-plan"}
    answer = http.post("/v1/plans", json=DOCUMENT, headers=once)
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
    assert "preference-applied" not in answer.headers
    assert http.post("/v1/plans", json=DOCUMENT, headers=once).json()["id"] == answer.json()["id"]
    waiting = http.get(answer.headers["location"]).json()
    assert (waiting["state"], waiting["waiting_for"]) == ("queued", "no agent is alive")
    assert http.get(f"/jobs/{answer.json()['id']}").status_code == 200  # its page
    assert [item["id"] for item in http.get("/v1/jobs", params={"kind": "estimate"}).json()["items"]] == [waiting["id"]]
