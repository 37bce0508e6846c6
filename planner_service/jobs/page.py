"""Pages of the jobs: the queue by state, and one job's page with the buttons that cancel or retry it."""

from http import HTTPStatus
from typing import get_args

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from pipeplan.protocol.jobs import JobQuery, JobState
from planner_service.access.auth import scope
from planner_service.jobs import service as jobs
from planner_service.platform.pages import OwnPage, page, query_of
from planner_service.platform.requests import Services

STATES: tuple[JobState, ...] = get_args(JobState)
RETRIED: tuple[JobState, ...] = ("failed", "cancelled", "dead")

router = APIRouter()


@router.get("/jobs")
def list_jobs(services: Services, request: Request) -> HTMLResponse:
    """A page of the jobs that pass the address's filters."""
    return page(request, "jobs/jobs.html", jobs=jobs.page(services, query_of(JobQuery, request)), states=STATES)


@router.get("/jobs/{job_id}")
def show_job(services: Services, request: Request, job_id: str) -> HTMLResponse:
    """One job."""
    return page(request, "jobs/job.html", job=jobs.get(services, job_id), again=RETRIED)


@router.post("/jobs/{job_id}/cancel", dependencies=[scope("plan"), OwnPage])
def cancel_job(services: Services, job_id: str) -> Response:
    """Cancels it, and shows it."""
    return _shown(jobs.cancel(services, job_id).id)


@router.post("/jobs/{job_id}/retry", dependencies=[scope("plan"), OwnPage])
def retry_job(services: Services, job_id: str) -> Response:
    """Puts it back into the queue, and shows it."""
    return _shown(jobs.retry(services, job_id).id)


def _shown(job_id: str) -> Response:
    return RedirectResponse(f"/jobs/{job_id}", HTTPStatus.SEE_OTHER)
