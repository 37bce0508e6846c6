"""Routes of the jobs: anybody enqueues and cancels, agents lease and report."""

from functools import partial
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from pipeplan.protocol.jobs import (
    Failure,
    Heartbeat,
    HeartbeatAnswer,
    Job,
    JobQuery,
    Lease,
    LeaseRequest,
    Release,
    Task,
    parse_task,
)
from pipeplan.protocol.listing import Page as PageOf
from planner_service.access.auth import Caller, scope
from planner_service.access.idempotency import OnceKey, OncePathKey, Reply, model_reply, once_response, perform
from planner_service.jobs import results
from planner_service.jobs import service as jobs
from planner_service.jobs.kinds import packers
from planner_service.jobs.results import PackedReport
from planner_service.platform.context import Context
from planner_service.platform.problems import described
from planner_service.platform.requests import CALIBRATED, GENERAL_LIMIT, SMALL, Body, Services, document, sent, takes
from planner_service.platform.writers import WritingRoute

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=WritingRoute)


@router.post("", dependencies=[scope("plan"), takes(CALIBRATED)], status_code=201, response_model=Job)
def enqueue_job(
    services: Services, task: Annotated[Task, Depends(sent(parse_task))], key: OnceKey, caller: Caller
) -> Response:
    """Enqueues a job: for an agent, or a plan for the service's own solvers."""

    def enqueue(context: Context) -> Reply:
        job = jobs.enqueue(context, task, asked_by=caller.name)
        return model_reply(job, status=HTTPStatus.CREATED, location=f"/v1/jobs/{job.id}")

    return once_response(perform(services, key, enqueue))


@router.get("", dependencies=[scope("read")])
def list_jobs(services: Services, query: Annotated[JobQuery, Query()]) -> PageOf[Job]:
    """The jobs: newest first, or in the requested order; those that pass all filters."""
    return jobs.page(services, query)


@router.post(
    "/lease",
    dependencies=[scope("agent"), takes(SMALL)],
    response_model=Lease,
    responses={204: {"description": "There is nothing to do"}, 404: described("There is no such agent")},
)
def lease_job(
    services: Services, caller: Caller, request: Annotated[LeaseRequest, Depends(document(LeaseRequest))], key: OnceKey
) -> Response:
    """Gives an agent the oldest job of the kinds that it can do, under a token of its own."""

    def lease(context: Context) -> Reply:
        given = jobs.lease(context, request, by=caller)
        return Reply(status=HTTPStatus.NO_CONTENT, body="") if given is None else model_reply(given)

    return once_response(perform(services, key, lease))


@router.get("/{job_id}", dependencies=[scope("read", "agent")])
def get_job(services: Services, job_id: str) -> Job:
    """A job."""
    return jobs.get(services, job_id)


@router.post("/{job_id}/heartbeat", dependencies=[scope("agent"), takes(SMALL)], response_model_exclude_none=True)
def heartbeat_job(
    services: Services, job_id: str, heartbeat: Annotated[Heartbeat, Depends(document(Heartbeat))]
) -> HeartbeatAnswer:
    """Renews the lease, and reports progress; the answer says whether to continue."""
    return jobs.heartbeat(services, job_id, heartbeat)


async def _report(services: Services, content: Body) -> PackedReport:
    """An agent's report, packed where large documents are read."""
    return await services.parsing.read(partial(results.read, packers()), content)


@router.post("/{job_id}/complete", dependencies=[scope("agent"), takes(GENERAL_LIMIT)])
def complete_job(services: Services, job_id: str, report: Annotated[PackedReport, Depends(_report)]) -> Job:
    """Ends the job with its result. May be repeated unchanged."""
    return jobs.take(services, job_id, report)


@router.post("/{job_id}/fail", dependencies=[scope("agent"), takes(SMALL)])
def fail_job(services: Services, job_id: str, failure: Annotated[Failure, Depends(document(Failure))]) -> Job:
    """Ends the job with an error. May be repeated unchanged."""
    return jobs.fail(services, job_id, failure)


@router.post("/{job_id}/release", dependencies=[scope("agent"), takes(SMALL)])
def release_job(services: Services, job_id: str, release: Annotated[Release, Depends(document(Release))]) -> Job:
    """Hands back a job that its owner cannot finish because the owner ends; this does not count as an attempt. May be
    repeated.
    """
    return jobs.release(services, job_id, release)


@router.post("/{job_id}/retry", dependencies=[scope("plan")], response_model=Job)
def retry_job(services: Services, job_id: str, key: OncePathKey) -> Response:
    """Puts a job that has failed, died or been cancelled back into the queue, with all its attempts.

    May be repeated.
    """
    return once_response(perform(services, key, lambda context: model_reply(jobs.retry(context, job_id))))


@router.post("/{job_id}/cancel", dependencies=[scope("plan")], response_model=Job)
def cancel_job(services: Services, job_id: str, key: OncePathKey) -> Response:
    """Cancels a job that has not ended. Its owner learns of it with the next heartbeat; a plan's search ends
    immediately.
    """
    return once_response(perform(services, key, lambda context: model_reply(jobs.cancel(context, job_id))))
