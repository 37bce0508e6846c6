"""Routes of the runs."""

from fastapi import APIRouter, Response

from planner_service.api.auth import scope
from planner_service.api.bodies import Page, Services, raw_json
from planner_service.contract.listing import Page as PageOf
from planner_service.contract.runs import Run, RunSummary
from planner_service.core.timeline import Timeline
from planner_service.services import runs

router = APIRouter(prefix="/v1/runs", tags=["runs"], dependencies=[scope("read")])


@router.get("")
def list_runs(services: Services, page: Page, plan_id: str | None = None) -> PageOf[RunSummary]:
    """The runs, newest first; of one plan only where one is given."""
    return runs.newest(services, page, plan_id)


@router.get("/{run_id}")
def get_run(services: Services, run_id: str) -> Run:
    """A run, with its report once it has succeeded."""
    return runs.get(services, run_id)


@router.get("/{run_id}/timeline", response_model=Timeline)
def get_run_timeline(services: Services, run_id: str) -> Response:
    """The measured timeline."""
    return raw_json(runs.timeline_document(services, run_id))


@router.get("/{run_id}/trace")
def get_run_trace(services: Services, run_id: str) -> Response:
    """The predicted and the measured timeline side by side, as a Chrome trace."""
    return raw_json(runs.trace(services, run_id))
