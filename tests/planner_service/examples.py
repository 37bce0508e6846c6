"""Documents that the service's tests send, and short cuts to what is stored."""

from dataclasses import asdict, replace
from typing import Any

from pipeplan.calibration.missed import missed
from pipeplan.documents.plan import Plan
from pipeplan.programs.instructions import Checkpoint
from pipeplan.programs.timeline import Lane, Timeline
from pipeplan.programs.timeline_document import timeline_document
from pipeplan.protocol.jobs import LeaseRequest, ProfileResult, ProfileTask, RunResult, RunTask
from pipeplan.protocol.plans import PlanRequest
from pipeplan.simulation.predict import predict
from pipeplan.simulation.report import Compared, RankReport, RunReport, StageReport, compare_stages
from planner_service.documents.service import clusters, profiles
from planner_service.overview.openapi import CLUSTER, PLAN_REQUEST, PROFILE
from planner_service.plans import service as plans
from planner_service.platform.context import Context

PROFILE_TASK = ProfileTask(model="hf:gpt2?n_layer=4", microbatch_sizes=(1, 2))
ANY_WORK = LeaseRequest(agent="node-1")
PROFILE_RESULT = ProfileResult(profile=PROFILE, cluster=CLUSTER)


def profile_document(**changes: Any) -> dict[str, Any]:
    """A profile's document, with some keys changed."""
    return asdict(PROFILE) | changes


def request_document(**changes: Any) -> dict[str, Any]:
    """A plan request's document, with some keys changed."""
    return PLAN_REQUEST.model_dump(mode="json") | changes


def store_plan(context: Context, **changes: Any) -> str:
    """Stores the examples' plan; returns its id."""
    profiles.create(context, PROFILE)
    clusters.create(context, CLUSTER)
    request = PlanRequest.model_validate(request_document(**changes))
    plan_id = plans.create(context, request).plan_id
    if plan_id is None:
        raise LookupError("no plan fits")
    return plan_id


def run_task(plan_id: str, **changes: Any) -> RunTask:
    """A task that executes the plan for four steps."""
    values = {
        "plan_id": plan_id,
        "model": "hf:gpt2?n_layer=4",
        "data": "worker_agent.models.text:random_tokens?vocab_size=50257",
        "steps": 4,
    }
    return RunTask.model_validate(values | changes)


def run_result(plan: Plan, *, slower: float = 1.25, steps: int = 4, checkpoint_s: float = 0.0) -> RunResult:
    """What a run reports that took so many times as long as its plan predicted, and then wrote a checkpoint."""
    predicted = predict(plan, batches=steps)
    measured = Timeline(
        lanes=tuple(_with_checkpoint(_stretched(lane, slower), steps, checkpoint_s) for lane in predicted.lanes),
        batch_size=predicted.batch_size,
        batches=predicted.batches,
    )
    stages: tuple[StageReport, ...] = compare_stages(predicted, measured)
    report = RunReport(
        schedule=plan.schedule,
        first_step=0,
        steps=steps,
        batch_size=plan.batch_size,
        losses=(4.0, 3.5, 3.2, *[3.1] * (steps - 3)),
        elapsed_s=measured.makespan_s,
        throughput_samples_per_s=Compared(predicted=60.0, measured=60.0 / slower),
        bubble_fraction=Compared(predicted=0.1, measured=0.12),
        stages=stages,
        ranks=tuple(
            RankReport(
                rank=lane.rank,
                stage=lane.stage,
                replica=lane.replica,
                peak_memory_bytes=lane.peak_memory_bytes,
                peak_resident_bytes=2**30,
            )
            for lane in measured.lanes
        ),
    )
    report = replace(report, missed=missed(plan, predicted, measured, report.throughput_samples_per_s))
    return RunResult(report=report, timeline=timeline_document(measured))


def _with_checkpoint(lane: Lane, step: int, seconds: float) -> Lane:
    if not seconds:
        return lane
    return replace(
        lane,
        instructions=(*lane.instructions, Checkpoint(version=step, oldest=step)),
        start_s=(*lane.start_s, lane.end_s[-1]),
        end_s=(*lane.end_s, lane.end_s[-1] + seconds),
        memory_bytes=(*lane.memory_bytes, lane.memory_bytes[-1]),
    )


def _stretched(lane: Lane, factor: float) -> Lane:
    return Lane(
        rank=lane.rank,
        stage=lane.stage,
        replica=lane.replica,
        instructions=lane.instructions,
        start_s=tuple(factor * moment_s for moment_s in lane.start_s),
        end_s=tuple(factor * moment_s for moment_s in lane.end_s),
        memory_bytes=lane.memory_bytes,
    )
