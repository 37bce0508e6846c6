"""Results: what agents report at a job's end, as it is checked and stored."""

from dataclasses import dataclass
from datetime import datetime
from typing import assert_never

from sqlalchemy import Connection

from pipeplan.documents.identity import content_id
from pipeplan.errors import InvalidInputError, require
from pipeplan.protocol.jobs import (
    AgentResult,
    Completion,
    Job,
    LinksResult,
    PartResult,
    ProfileResult,
    RunResult,
    parse_completion,
)
from planner_service.documents.store import (
    PackedCluster,
    PackedProfile,
    clusters,
    packed_cluster,
    packed_profile,
    profiles,
)
from planner_service.jobs import store as storage
from planner_service.jobs.gangs import Hold
from planner_service.platform.context import Context, found
from planner_service.runs import store as runs


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKept:
    """A profile job's result, as it is stored."""

    profile: PackedProfile
    cluster: PackedCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksKept:
    """A links job's result, as it is stored."""

    cluster: PackedCluster


Kept = ProfileKept | LinksKept | PartResult | runs.PackedRun
"""A result in the form in which it is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedReport:
    """A completion with its result as it is stored. `result_id` tells the result from others."""

    token: str
    report_id: str | None
    kind: str
    result_id: str
    kept: Kept


def read(content: bytes) -> PackedReport:
    """The report that a body holds. Raises InvalidInputError."""
    return report_of(parse_completion(content))


def report_of(completion: Completion) -> PackedReport:
    """Packs a completion, seconds of work for a large one. Raises InvalidInputError for what could not be shown."""
    result = completion.result
    return PackedReport(
        token=completion.token,
        report_id=completion.report_id,
        kind=result.kind,
        result_id=content_id(result.model_dump(mode="json")),
        kept=_packed(result),
    )


def require_whole(hold: Hold, kind: str) -> None:
    """Raises InvalidInputError for what is not the result of this job, or not of the member that has it."""
    require(kind == hold.job.task.kind, "result.kind", f"must be {hold.job.task.kind}", kind)
    first = hold.member is None or hold.member.node_rank == 0
    require(first, "result.kind", "must be part: node rank 0 has the result", kind)


def store(context: Context, connection: Connection, job: Job, result: Kept, result_id: str, now: datetime) -> None:
    """Ends the job with its result, in the same transaction."""
    match result:
        case ProfileKept(profile=profile, cluster=cluster):
            profiles.add(connection, profile, now)
            clusters.add(connection, cluster, now)
            storage.succeed(
                connection, job.id, result_id=result_id, profile_id=profile.id, cluster_id=cluster.id, now=now
            )
        case LinksKept(cluster=cluster):
            clusters.add(connection, cluster, now)
            storage.succeed(connection, job.id, result_id=result_id, cluster_id=cluster.id, now=now)
        case runs.PackedRun():
            runs.finish(connection, found("run of job", job.id, job.run_id), result)
            storage.succeed(connection, job.id, result_id=result_id, now=now)
            throughput = result.throughput
            context.metrics.observe_prediction(predicted=throughput.predicted, measured=throughput.measured)
        case PartResult():
            raise InvalidInputError("result.kind", "must be the job's result", "part")
        case _:
            assert_never(result)


def _packed(result: AgentResult) -> Kept:
    match result:
        case RunResult():
            _require_readable(result)
            return runs.measured(result)
        case ProfileResult():
            return ProfileKept(profile=packed_profile(result.profile), cluster=packed_cluster(result.cluster))
        case LinksResult():
            return LinksKept(cluster=packed_cluster(result.cluster))
        case PartResult():
            return result
        case _:
            assert_never(result)


def _require_readable(result: RunResult) -> None:
    """Raises InvalidInputError where the timeline holds a text that is no instruction: it could not be drawn."""
    for lane in result.timeline.lanes:
        for _ in lane.events():
            pass
