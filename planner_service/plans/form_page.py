"""Page of the form that makes a plan: it shows whether the request is valid, and the request as commands."""

import json
from collections.abc import Sequence
from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse

from pipeplan.documents.named_clusters import SERVERS
from pipeplan.errors import DeadlineError, PipeplanError
from pipeplan.planners.solve import PLANNERS
from pipeplan.protocol.estimates import ModelPlanRequest
from pipeplan.protocol.plans import PlanRequest
from pipeplan.protocol.problems import problem_of
from pipeplan.protocol.tokens import Identity
from planner_service.access.auth import Caller, scope
from planner_service.documents.service import clusters, profiles
from planner_service.plans import asking
from planner_service.plans.example import store_example
from planner_service.plans.routes import Preference, plan_answer
from planner_service.platform.context import Context
from planner_service.platform.listing import Cut
from planner_service.platform.pages import OwnPage, address_of, origin_of, page
from planner_service.platform.requests import SMALL, Form, Services, takes

SUGGESTED = Cut(limit=50)
"""How many of the newest profiles and clusters the form suggests; any other can be named by its id."""

USUAL = {"planner": "auto", "batch_size": "64"}

PATIENCE_S = 5.0
"""A plan that takes longer is made by a job, whose page shows how far it is."""

router = APIRouter()


@router.get("/plans/new")
def show_form(services: Services, request: Request, caller: Caller) -> HTMLResponse:
    """The form, filled in from its address, with the result of the checks."""
    return _form(request, services, caller, dict(address_of(request).parameters))


@router.post("/plans/new", dependencies=[scope("plan"), OwnPage, takes(SMALL)])
async def make_plan(request: Request, services: Services, caller: Caller, given: Form) -> Response:
    """Makes the plan and shows it, or the job that makes it; if that fails, the form again."""
    reasons: list[dict[str, str]] = []
    failed: PipeplanError | None = None
    try:
        asked = await run_in_threadpool(asking.checked, services, asking.document_of(given))
        answer = await answer_to(request, services, asked)
        place = answer.headers.get("location")
        if place is not None:
            return RedirectResponse(place.removeprefix("/v1"), HTTPStatus.SEE_OTHER)
        reasons = json.loads(bytes(answer.body))["reasons"]
    except PipeplanError as error:
        failed = error
    return await run_in_threadpool(_form, request, services, caller, given, failed, reasons)


@router.post("/example", dependencies=[scope("plan"), OwnPage])
async def make_example(request: Request, services: Services) -> Response:
    """Stores the example, makes its plan and shows that, or the job that makes it."""
    answer = await answer_to(request, services, await run_in_threadpool(store_example, services))
    return RedirectResponse(answer.headers["location"].removeprefix("/v1"), HTTPStatus.SEE_OTHER)


async def answer_to(request: Request, context: Context, asked: PlanRequest | ModelPlanRequest) -> Response:
    """The API's answer to the request: a plan, or after PATIENCE_S a job that makes it."""
    try:
        return await plan_answer(request, context, asked, None, Preference(), patience_s=PATIENCE_S)
    except DeadlineError:
        return await plan_answer(request, context, asked, None, Preference(respond_async=True))


def _form(
    request: Request,
    context: Context,
    caller: Identity,
    given: dict[str, str],
    failed: PipeplanError | None = None,
    reasons: Sequence[dict[str, str]] = (),
) -> HTMLResponse:
    known_profiles = profiles.newest(context, SUGGESTED).items
    known_clusters = clusters.newest(context, SUGGESTED).items
    values = given
    if "planner" not in given:  # a form always sends a planner, so this is a link
        newest = {
            "profile_id": [each.id for each in known_profiles],
            "cluster_id": [each.id for each in known_clusters],
        }
        values = USUAL | {name: ids[0] for name, ids in newest.items() if ids} | given
    document = asking.document_of(values)
    if failed is None and not reasons and (known_profiles or given):
        try:
            asking.checked(context, document)
        except PipeplanError as error:
            failed = error
    origin = origin_of(request)
    return page(
        request,
        "plans/new.html",
        status=problem_of(failed).status if failed is not None and request.method == "POST" else HTTPStatus.OK,
        values=values,
        profiles=known_profiles,
        clusters=known_clusters,
        servers=tuple(SERVERS),
        planners=tuple(PLANNERS),
        options=asking.options(),
        first=len(asking.FIRST),
        failed=failed,
        reasons=reasons,
        curl=asking.curl_of(document, origin, token=caller.token_id is not None),
        command=asking.command_of(document, origin),
    )
