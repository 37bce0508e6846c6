"""One job's page: what it is at, and the buttons that end it or try it again."""

from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from planner_service.api.auth import scope
from planner_service.api.bodies import Services
from planner_service.contract.jobs import JobState
from planner_service.dashboard.forms import OwnPage
from planner_service.dashboard.rendering import page
from planner_service.services import jobs

RETRIED: tuple[JobState, ...] = ("failed", "cancelled", "dead")

router = APIRouter()


@router.get("/jobs/{job_id}")
def show_job(services: Services, request: Request, job_id: str) -> HTMLResponse:
    """One job."""
    return page(request, "job.html", job=jobs.get(services, job_id), again=RETRIED)


@router.post("/jobs/{job_id}/cancel", dependencies=[scope("plan"), OwnPage])
def cancel_job(services: Services, job_id: str) -> Response:
    """Cancels it, and shows it again."""
    return _shown(jobs.cancel(services, job_id).id)


@router.post("/jobs/{job_id}/retry", dependencies=[scope("plan"), OwnPage])
def retry_job(services: Services, job_id: str) -> Response:
    """Puts it back into the queue, and shows it again."""
    return _shown(jobs.retry(services, job_id).id)


def _shown(job_id: str) -> Response:
    return RedirectResponse(f"/jobs/{job_id}", HTTPStatus.SEE_OTHER)
