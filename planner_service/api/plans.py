"""Routes of the plans."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Response

from planner_service.api.auth import scope
from planner_service.api.bodies import Batches, Page, Services, document, mark_created, raw_json
from planner_service.contract.documents import answer_document
from planner_service.contract.listing import Page as PageOf
from planner_service.contract.plans import PlanRequest, PlanSummary, Streams
from planner_service.core.identity import canonical_json
from planner_service.core.timeline import Timeline
from planner_service.services import plans

router = APIRouter(prefix="/v1/plans", tags=["plans"])


@router.post("", dependencies=[scope("plan")], status_code=201)
def create_plan(services: Services, request: Annotated[PlanRequest, Depends(document(PlanRequest))]) -> Response:
    """Asks a planner. 201 is a new plan, 200 one that was there before, or `feasible: false` with the reasons."""
    created = plans.create(services, request)
    response = raw_json(canonical_json(answer_document(created.answer) | {"solve_time_s": created.solve_time_s}))
    response.status_code = HTTPStatus.OK
    if created.plan_id is not None:
        mark_created(response, created.new, f"/v1/plans/{created.plan_id}")
    return response


@router.get("", dependencies=[scope("read")])
def list_plans(services: Services, page: Page) -> PageOf[PlanSummary]:
    """The plans, newest first."""
    return plans.newest(services, page)


@router.get("/{plan_id}", dependencies=[scope("read", "agent")])
def get_plan(services: Services, plan_id: str) -> Response:
    """A plan's document."""
    return raw_json(plans.document(services, plan_id))


@router.get("/{plan_id}/streams", dependencies=[scope("read")])
def get_plan_streams(services: Services, plan_id: str, batches: Batches = 1) -> Streams:
    """What every worker executes, in order, in the instructions' text form."""
    return plans.streams(services, plan_id, batches)


@router.get("/{plan_id}/timeline", dependencies=[scope("read")], response_model=Timeline)
def get_plan_timeline(services: Services, plan_id: str, batches: Batches = 2) -> Response:
    """The predicted timeline: the plan's streams, played with its costs."""
    return raw_json(canonical_json(plans.timeline(services, plan_id, batches)))


@router.get("/{plan_id}/trace", dependencies=[scope("read")])
def get_plan_trace(services: Services, plan_id: str, batches: Batches = 2) -> Response:
    """The predicted timeline as a Chrome trace, for chrome://tracing and Perfetto."""
    return raw_json(plans.trace(services, plan_id, batches))
