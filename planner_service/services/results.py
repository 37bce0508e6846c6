"""Results: what agents report at a job's end, as it is checked and stored."""

from datetime import datetime
from typing import assert_never

from sqlalchemy import Connection

from planner_service.contract.jobs import AgentResult, Job, LinksResult, PartResult, ProfileResult, RunResult
from planner_service.core.errors import InvalidInputError, require
from planner_service.services.context import Context, found
from planner_service.services.gangs import Hold
from planner_service.storage import clusters, profiles, runs
from planner_service.storage import jobs as storage

Kept = ProfileResult | LinksResult | PartResult | runs.Measured
"""A result in the form in which it is stored."""


def require_whole(hold: Hold, result: AgentResult) -> None:
    """Raises InvalidInputError for what is not the result of this job, or not of the member that has it."""
    require(result.kind == hold.job.task.kind, "result.kind", f"must be {hold.job.task.kind}", result.kind)
    first = hold.member is None or hold.member.node_rank == 0
    require(first, "result.kind", "must be part: node rank 0 has the result", result.kind)


def packed(result: AgentResult) -> Kept:
    """A result as it is stored. Raises InvalidInputError for a run's that could not be shown or kept."""
    if not isinstance(result, RunResult):
        return result
    _require_readable(result)
    return runs.measured(result)


def store(context: Context, connection: Connection, job: Job, result: Kept, result_id: str, now: datetime) -> None:
    """Ends the job with its result, in the same transaction."""
    match result:
        case ProfileResult():
            profile_id, _ = profiles.add(connection, result.profile, now)
            cluster_id, _ = clusters.add(connection, result.cluster, now)
            storage.succeed(
                connection, job.id, result_id=result_id, profile_id=profile_id, cluster_id=cluster_id, now=now
            )
        case LinksResult():
            cluster_id, _ = clusters.add(connection, result.cluster, now)
            storage.succeed(connection, job.id, result_id=result_id, cluster_id=cluster_id, now=now)
        case runs.Measured():
            runs.finish(connection, found("run of job", job.id, job.run_id), result)
            storage.succeed(connection, job.id, result_id=result_id, now=now)
            throughput = result.throughput
            context.metrics.observe_prediction(predicted=throughput.predicted, measured=throughput.measured)
        case PartResult():
            raise InvalidInputError("result.kind", "must be the job's result", "part")
        case _:
            assert_never(result)


def _require_readable(result: RunResult) -> None:
    """Raises InvalidInputError where the timeline holds a text that is no instruction: it could not be drawn."""
    for lane in result.timeline.lanes:
        for _ in lane.events():
            pass
