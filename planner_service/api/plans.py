"""Routes of the plans."""

import json
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from pipeplan.documents.identity import canonical_json
from pipeplan.documents.plan import Plan
from pipeplan.programs.timeline import Timeline
from planner_service.api.auth import scope
from planner_service.api.bodies import CALIBRATED, Batches, Services, document, takes
from planner_service.api.caching import (
    REVALIDATE,
    UNCHANGED,
    Answer,
    Lane,
    ListLane,
    derived_tag,
    document_response,
    stored,
)
from planner_service.api.idempotency import OnceKey
from planner_service.api.listing import asked_for
from planner_service.api.solving import PreferHeader, plan_answer, preference_of
from planner_service.contract.comparisons import Alternatives, Comparison
from planner_service.contract.jobs import Job
from planner_service.contract.listing import Page
from planner_service.contract.plans import PlanQuery, PlanRequest, PlanSummary, Streams
from planner_service.services import comparisons, exports, plans
from planner_service.services.context import Context

router = APIRouter(prefix="/v1/plans", tags=["plans"])

DOCUMENT = Lane(noun="plans", path="/v1/plans/{plan_id}", scopes=("read", "agent"), load=plans.document)

EXPORTED: dict[str, Any] = {
    kind: {"schema": {"type": "object" if kind.endswith("json") else "string"}} for kind in exports.MEDIA_TYPES
}


@router.post(
    "",
    dependencies=[scope("plan"), takes(CALIBRATED)],
    status_code=201,
    responses={202: {"model": Job, "description": "A job that makes the plan, as `Prefer: respond-async` asks"}},
)
async def create_plan(
    request: Request,
    services: Services,
    asked: Annotated[PlanRequest, Depends(document(PlanRequest))],
    key: OnceKey,
    prefer: PreferHeader = None,
) -> Response:
    """Asks a planner. 201 is a new plan, 200 one that was there before, or `feasible: false` with the reasons.

    With `Prefer: respond-async` the answer is 202 and a job to follow: for planners that take long.
    """
    return await plan_answer(request, services, asked, key, preference_of(prefer))


@router.get("", dependencies=[scope("read")], response_model=Page[PlanSummary] | Page[Plan])
def list_plans(services: Services, query: Annotated[PlanQuery, Query()]) -> Response:
    """The plans: newest first, or in the order asked for; those that pass all filters; whole with `content`."""
    return Response(_page(query, services), media_type="application/json")


@lru_cache(maxsize=1024)
def _list_answer(query_string: bytes) -> Answer | None:
    query = asked_for(PlanQuery, query_string)
    return None if query is None else partial(_page, query)


def _page(query: PlanQuery, services: Context) -> bytes:
    if not query.content:
        return plans.page(services, query).model_dump_json().encode()
    documents, next_cursor = plans.page_of_documents(services, query)
    return b"".join((b'{"items":[', b",".join(documents), b'],"next_cursor":', json.dumps(next_cursor).encode(), b"}"))


LIST = ListLane(path="/v1/plans", scopes=("read",), answer=_list_answer)


@router.get("/compare", dependencies=[scope("read")], response_model=Comparison)
def compare_plans(
    services: Services,
    plan_id: Annotated[list[str], Query(alias="id", min_length=2, max_length=10, description="plans' ids")],
) -> Response:
    """Plans side by side: what differs, and what makes each faster or slower than the first."""
    return Response(comparisons.compare(services, plan_id).model_dump_json(), media_type="application/json")


@router.get("/{plan_id}", dependencies=[scope(*DOCUMENT.scopes)], responses=UNCHANGED)
def get_plan(services: Services, request: Request, plan_id: str) -> Response:
    """A plan's document. It never changes: its id is its entity tag."""
    content = stored(services, DOCUMENT.noun, plan_id, plans.document)
    return document_response(request, plan_id, lambda: content)


@router.get("/{plan_id}/streams", dependencies=[scope("read")], response_model=Streams, responses=UNCHANGED)
def get_plan_streams(services: Services, request: Request, plan_id: str, batches: Batches = 1) -> Response:
    """What every worker executes, in order, in the instructions' text form."""

    def load() -> str:
        return plans.streams(services, plan_id, batches).model_dump_json()

    return _derived(services, request, plan_id, load, "streams", batches)


@router.get("/{plan_id}/alternatives", dependencies=[scope("read")], response_model=Alternatives, responses=UNCHANGED)
def get_plan_alternatives(services: Services, request: Request, plan_id: str) -> Response:
    """The configurations that the plan was chosen over, with the reason that each lost."""

    def load() -> str:
        return comparisons.alternatives(services, plan_id).model_dump_json()

    return _derived(services, request, plan_id, load, "alternatives")


@router.get(
    "/{plan_id}/exports/{format_name}",
    dependencies=[scope("read")],
    response_class=Response,
    responses=UNCHANGED | {200: {"description": "The plan in the format", "content": EXPORTED}},
)
def export_plan(
    services: Services,
    request: Request,
    plan_id: str,
    format_name: Annotated[str, Path(json_schema_extra={"enum": list(exports.NAMES)})],
    target_version: Annotated[
        str | None, Query(json_schema_extra={"enum": [*exports.VERSIONS, None]}, description="of torchtitan only")
    ] = None,
) -> Response:
    """The plan for another system. What the system cannot express stands in the notes; 422 where nothing fits."""
    kind, text = exports.export(services, plan_id, format_name, target_version)
    tag = derived_tag(plan_id, format_name, target_version or "")
    response = document_response(request, tag, lambda: text, cache_control=REVALIDATE, media_type=kind.media_type)
    response.headers["Content-Disposition"] = f'attachment; filename="{plan_id[:8]}-{format_name}{kind.suffix}"'
    return response


@router.get("/{plan_id}/timeline", dependencies=[scope("read")], response_model=Timeline, responses=UNCHANGED)
def get_plan_timeline(services: Services, request: Request, plan_id: str, batches: Batches = 2) -> Response:
    """The predicted timeline: the plan's streams, played with its costs."""

    def load() -> str:
        return canonical_json(plans.timeline(services, plan_id, batches))

    return _derived(services, request, plan_id, load, "timeline", batches)


@router.get("/{plan_id}/trace", dependencies=[scope("read")], responses=UNCHANGED)
def get_plan_trace(services: Services, request: Request, plan_id: str, batches: Batches = 2) -> Response:
    """The predicted timeline as a Chrome trace, for chrome://tracing and Perfetto."""
    return _derived(services, request, plan_id, lambda: plans.trace(services, plan_id, batches), "trace", batches)


def _derived(
    services: Services, request: Request, plan_id: str, load: Callable[[], str], *parameters: object
) -> Response:
    """What is made of a plan, under a tag that names the plan, what is made of it, and this version, which makes it."""
    stored(services, DOCUMENT.noun, plan_id, plans.document)
    tag = derived_tag(plan_id, *parameters)
    return document_response(request, tag, load, cache_control=REVALIDATE)
