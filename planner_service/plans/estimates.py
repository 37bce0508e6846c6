"""Estimates: plans of models without a profile. One job with two owners: an agent estimates, then a solver plans.

enqueue ──▶ queued, estimate ──agent──▶ profile stored, queued, plan ──solver──▶ succeeded with a plan
"""

from collections.abc import Mapping

from sqlalchemy import Connection

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse
from pipeplan.documents.names import parse_spec
from pipeplan.errors import require
from pipeplan.protocol.estimates import (
    EstimateResult,
    EstimateTask,
    ModelPlanRequest,
    datasheet_of,
    forms_asked,
    microbatch_sizes,
)
from pipeplan.protocol.jobs import Job, PlanTask
from planner_service.agents.needs import Needs, factories_of
from planner_service.documents.store import PackedDocument, packed_profile, profiles
from planner_service.jobs import service as jobs
from planner_service.jobs.kinds import JobKind
from planner_service.plans import service as plans
from planner_service.platform.context import Context


def enqueue(context: Context, request: ModelPlanRequest, *, asked_by: str | None = None) -> Job:
    """Enqueues the estimate and the plan. Raises InvalidInputError if nobody could estimate or plan it."""
    return jobs.enqueue(context, task_of(context, request), asked_by=asked_by)


def task_of(context: Context, request: ModelPlanRequest) -> EstimateTask:
    """The estimate that the request needs.

    Raises InvalidInputError for options that no plan can have, and for devices without a datasheet.
    """
    request.options.require_possible()
    cluster = parse(Cluster, plans.cluster_text(context, request.cluster_id))
    types = [device.name for device in cluster.types]
    require(len(types) == 1, "cluster_id", "must have devices of one type where the profile is estimated", types)
    sizes = microbatch_sizes(request.batch_size, request.sequence_length, request.options.microbatch_size)
    return EstimateTask(
        request=request,
        analytic=datasheet_of(cluster.device),
        microbatch_sizes=sizes,
        forms=forms_asked(
            cluster,
            request.options,
            batch_size=request.batch_size,
            sequence_length=request.sequence_length,
            precision=request.precision,
        ),
    )


def check(context: Context, task: EstimateTask) -> None:
    """Raises InvalidInputError for faults that show before there is a profile."""
    parse_spec(task.model, field="model")
    plans.cluster_text(context, task.request.cluster_id)
    plans.require_short(task.request, context.longest_search_s)


def needs(_connection: Connection, task: EstimateTask) -> Needs:
    """Any agent whose operator allows the model: no device is needed."""
    return Needs(factories=factories_of(task))


def pack(result: EstimateResult) -> PackedDocument:
    return packed_profile(result.profile)


def store(context: Context, connection: Connection, _job: Job, profile: PackedDocument) -> Mapping[str, str]:
    """Stores the profile."""
    profiles.add(connection, profile, context.now())
    return {"profile_id": profile.id}


def then(job: Job, left: Mapping[str, str]) -> PlanTask:
    """The requested plan, with the profile in the model's place."""
    if not isinstance(job.task, EstimateTask):
        raise LookupError(f"job {job.id} is of kind {job.task.kind}")
    return PlanTask(request=job.task.request.with_profile(left["profile_id"]))


ESTIMATE = JobKind(name="estimate", check=check, needs=needs, pack=pack, store=store, then=then)
"""The kind of job that estimates a profile and continues as a plan."""
