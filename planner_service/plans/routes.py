"""Routes of the plans.

A POST returns the plan, or a job with `Prefer: respond-async` (RFC 7240). No thread waits while a planner works.
"""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from http import HTTPStatus
from math import inf
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from pipeplan.documents.identity import canonical_json
from pipeplan.documents.plan import Plan
from pipeplan.errors import DeadlineError, UnavailableError
from pipeplan.formats import spoken_document
from pipeplan.programs.timeline_columns import TimelineColumns
from pipeplan.programs.timeline_document import TimelineDocument, timeline_document
from pipeplan.protocol.estimates import ModelPlanRequest, parse_plan_request
from pipeplan.protocol.jobs import Job
from pipeplan.protocol.listing import Page
from pipeplan.protocol.plans import Alternatives, Comparison, PlanQuery, PlanRequest, PlanSummary, Streams
from planner_service.access import idempotency
from planner_service.access.auth import caller, scope
from planner_service.access.idempotency import Key, OnceKey, Reply, model_reply, once_response
from planner_service.documents.caching import (
    IMMUTABLE,
    REVALIDATE,
    UNCHANGED,
    Answer,
    DocumentLane,
    ListLane,
    derived_tag,
    document_response,
    packed_response,
    stored,
)
from planner_service.jobs import service as jobs
from planner_service.plans import comparisons, estimates, exports
from planner_service.plans import jobs as plan_jobs
from planner_service.plans import service as plans
from planner_service.plans.background import Background
from planner_service.plans.questions import Answered, PlannerQuestion
from planner_service.plans.solver import SolverTicket
from planner_service.platform.context import Context
from planner_service.platform.requests import CALIBRATED, Batches, Services, asked_for, sent, takes
from planner_service.platform.stored import may_change, tag_of
from planner_service.platform.writers import WritingRoute, in_writer

LONGEST_WAIT_S = 60.0
HELD_S = 30.0
"""How long an idempotency key stays reserved after the planner's deadline: the rest of a request's time."""

PreferHeader = Annotated[
    str | None,
    Header(
        description="`respond-async`: the answer is 202 and a job to follow; `respond-async, wait=5`: only if the plan "
        "is not there within 5 s"
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A client's preferences: a job instead of waiting, and how many seconds it would wait for the plan first."""

    respond_async: bool = False
    wait_s: float = 0.0

    @property
    def applied(self) -> str:
        return f"respond-async, wait={self.wait_s:g}" if self.wait_s else "respond-async"


def preference_of(header: str | None) -> Preference:
    """The preferences in a Prefer header; unknown ones are ignored, as RFC 7240 asks."""
    stated = dict(re.findall(r"([\w-]+)(?:\s*=\s*\"?([^\",;\s]*)\"?)?", (header or "").lower()))
    wait = stated.get("wait", "")
    wait_s = min(float(wait), LONGEST_WAIT_S) if wait.isascii() and wait.isdigit() else 0.0
    return Preference(respond_async="respond-async" in stated, wait_s=wait_s)


router = APIRouter(prefix="/v1/plans", tags=["plans"], route_class=WritingRoute)

DOCUMENT = DocumentLane(noun="plans", path="/v1/plans/{plan_id}", scopes=("read", "agent"), load=plans.document)

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
    asked: Annotated[PlanRequest | ModelPlanRequest, Depends(sent(parse_plan_request))],
    key: OnceKey,
    prefer: PreferHeader = None,
) -> Response:
    """Asks a planner. 201 is a new plan, 200 one that was stored before, or `feasible: false` with the reasons.

    With `Prefer: respond-async` the answer is 202 and a job to follow, for planners that take long. The same holds for
    a `model` instead of a `profile_id`: an agent estimates its profile first.
    """
    return await plan_answer(request, services, asked, key, preference_of(prefer))


async def plan_answer(
    request: Request,
    context: Context,
    asked: PlanRequest | ModelPlanRequest,
    key: Key | None,
    preference: Preference,
    *,
    patience_s: float = inf,
) -> Response:
    """The answer to a request for a plan. Raises DeadlineError after `patience_s`, or the service's own limit."""
    background: Background = request.app.state.background
    deadline_s = min(background.bounds.deadline_s, patience_s)
    if preference.respond_async or isinstance(asked, ModelPlanRequest):
        return await _by_job(request, context, asked, key, preference)
    held_s = deadline_s + HELD_S
    if key is not None and (known := await in_writer(idempotency.hold, context, key, held_s)) is not None:
        return once_response(known)

    settled = False
    try:
        posed = await run_in_threadpool(plans.posed, context, asked)
        ticket = background.pool.submit(PlannerQuestion(planner=asked.planner, pose=posed.problem))
        try:
            answered = await _answer_of(request, ticket, asked.planner, deadline_s)
        finally:
            ticket.cancel()
        reply = await in_writer(_keep, context, asked, answered, key, (await caller(request)).name)
        settled = True
    finally:
        if key is not None and not settled:
            await asyncio.shield(in_writer(idempotency.let_go, context, key))
    return once_response(idempotency.OnceOutcome(reply=reply))


async def _answer_of(request: Request, ticket: SolverTicket, planner: str, deadline_s: float) -> Answered:
    """The planner's answer. Raises ClientDisconnect if the client is gone, DeadlineError if it takes too long."""
    future = asyncio.wrap_future(ticket.future)

    async def disconnection() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.create_task(disconnection())
    try:
        waited: set[asyncio.Future[Any]] = {future, gone}
        await asyncio.wait(waited, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if future.cancelled():
            raise UnavailableError("the service is stopping")
        if future.done():
            return future.result()
        if gone.done():
            raise ClientDisconnect
    finally:
        gone.cancel()
        future.cancel()
    raise DeadlineError(
        f"the planner {planner} has not answered within {deadline_s:g} s; ask again with the header "
        "`Prefer: respond-async`: the answer is then 202 and a job that goes on, to be followed at its Location"
    )


def _keep(context: Context, asked: PlanRequest, answered: Answered, key: Key | None, asked_by: str) -> Reply:
    """Stores the plan and the reply to repetitions of the request, in one transaction."""
    with context.database.write() as connection:
        reply = _reply_of(plans.keep(context, connection, asked, answered, asked_by=asked_by))
        idempotency.settle(connection, key, reply)
    return reply


async def _by_job(
    request: Request, context: Context, asked: PlanRequest | ModelPlanRequest, key: Key | None, preference: Preference
) -> Response:
    """Enqueues the plan as a job. The answer is the job, or the plan if the job ends with one in the preferred time."""
    background: Background = request.app.state.background
    asked_by = (await caller(request)).name

    def enqueue(within: Context) -> Reply:
        enqueued = estimates if isinstance(asked, ModelPlanRequest) else plan_jobs
        return _job_reply(enqueued.enqueue(within, asked, asked_by=asked_by))

    outcome = await in_writer(idempotency.perform, context, key, enqueue)
    background.runner.poke()
    if preference.wait_s:
        job_id = (outcome.reply.location or "").rpartition("/")[2]
        await background.feed.ends_within(("job", job_id), preference.wait_s)

        def read() -> Reply:
            job = jobs.get(context, job_id)
            created = plan_jobs.answer_of(context, job)
            return _job_reply(job) if created is None else _reply_of(created)

        reply = await run_in_threadpool(read)
        outcome = idempotency.OnceOutcome(reply=reply, replayed=outcome.replayed)
    response = once_response(outcome)
    if preference.respond_async:
        response.headers["Preference-Applied"] = preference.applied
    return response


def _job_reply(job: Job) -> Reply:
    return model_reply(job, status=HTTPStatus.ACCEPTED, location=f"/v1/jobs/{job.id}")


def _reply_of(created: plans.Created) -> Reply:
    document = spoken_document(created.answer) | {"solve_time_s": created.solve_time_s}
    if created.plan_id is None:
        return Reply(status=HTTPStatus.OK, body=canonical_json(document))
    body = canonical_json(document | {"id": created.plan_id})
    status = HTTPStatus.CREATED if created.new else HTTPStatus.OK
    return Reply(status=status, body=body, location=f"/v1/plans/{created.plan_id}")


@router.get("", dependencies=[scope("read")], response_model=Page[PlanSummary] | Page[Plan])
def list_plans(services: Services, query: Annotated[PlanQuery, Query()]) -> Response:
    """The plans: newest first, or in the requested order; those that pass all filters; whole with `content`."""
    return Response(_page(query, services), media_type="application/json")


@lru_cache(maxsize=1024)
def _list_answer(query_string: bytes) -> Answer | None:
    query = asked_for(PlanQuery, query_string)
    return None if query is None else partial(_page, query)


def _page(query: PlanQuery, services: Context) -> bytes:
    texts = plans.page_of_documents if query.content else plans.page_of_summaries
    items, next_cursor = texts(services, query)
    return b"".join((b'{"items":[', b",".join(items), b'],"next_cursor":', json.dumps(next_cursor).encode(), b"}"))


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
    """A plan's document. Its id is its entity tag. It never changes, unless it has no play: that may be added."""
    content = stored(services, DOCUMENT.noun, plan_id, plans.document)
    control = REVALIDATE if may_change(DOCUMENT.noun, content) else IMMUTABLE
    tag = tag_of(DOCUMENT.noun, plan_id, content)
    return document_response(request, tag, lambda: content, cache_control=control)


@router.get("/{plan_id}/request", dependencies=[scope("read")])
def get_plan_request(services: Services, plan_id: str) -> PlanRequest:
    """The request with which the plan was first stored."""
    return plans.request(services, plan_id)


@router.get("/{plan_id}/streams", dependencies=[scope("read")], response_model=Streams, responses=UNCHANGED)
def get_plan_streams(services: Services, request: Request, plan_id: str, batches: Batches = 1) -> Response:
    """The instructions of every worker, in order, in text form."""
    made = partial(plans.streams, services, plan_id, batches)
    return _derived(services, request, plan_id, lambda: made().model_dump_json(), "streams", batches)


@router.get("/{plan_id}/alternatives", dependencies=[scope("read")], response_model=Alternatives, responses=UNCHANGED)
def get_plan_alternatives(services: Services, request: Request, plan_id: str) -> Response:
    """The configurations that the plan was chosen over, with the reason that each lost."""
    made = partial(comparisons.alternatives, services, plan_id)
    return _derived(services, request, plan_id, lambda: made().model_dump_json(), "alternatives")


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
    """The plan in another system's format. Notes list what the system cannot express; 422 if no export is possible."""
    kind, text = exports.export(services, plan_id, format_name, target_version)
    tag = derived_tag(plan_id, format_name, target_version or "")
    response = document_response(request, tag, lambda: text, cache_control=REVALIDATE, media_type=kind.media_type)
    response.headers["Content-Disposition"] = f'attachment; filename="{plan_id[:8]}-{format_name}{kind.suffix}"'
    return response


@router.get("/{plan_id}/timeline", dependencies=[scope("read")], response_model=TimelineDocument, responses=UNCHANGED)
def get_plan_timeline(services: Services, request: Request, plan_id: str, batches: Batches = 2) -> Response:
    """The predicted timeline: the plan's streams, played with its costs."""
    made = partial(plans.timeline, services, plan_id, batches)
    return _derived(services, request, plan_id, lambda: canonical_json(timeline_document(made())), "timeline", batches)


@router.get(
    "/{plan_id}/timeline/columns", dependencies=[scope("read")], response_model=TimelineColumns, responses=UNCHANGED
)
def get_plan_timeline_columns(services: Services, request: Request, plan_id: str, batches: Batches = 2) -> Response:
    """The predicted timeline as columns of small numbers, for drawing; compressed if the caller takes gzip."""
    stored(services, DOCUMENT.noun, plan_id, plans.document)
    return packed_response(
        request, lambda: plans.timeline_packed(services, plan_id, batches), plan_id, "columns", batches
    )


@router.get("/{plan_id}/trace", dependencies=[scope("read")], responses=UNCHANGED)
def get_plan_trace(services: Services, request: Request, plan_id: str, batches: Batches = 2) -> Response:
    """The predicted timeline as a Chrome trace, for chrome://tracing and Perfetto."""
    return _derived(services, request, plan_id, lambda: plans.trace(services, plan_id, batches), "trace", batches)


def _derived(
    services: Services, request: Request, plan_id: str, load: Callable[[], str | bytes], *parameters: object
) -> Response:
    """Content derived from a plan, under a tag of the plan, the derivation and the deriving release."""
    stored(services, DOCUMENT.noun, plan_id, plans.document)
    tag = derived_tag(plan_id, *parameters)
    return document_response(request, tag, load, cache_control=REVALIDATE)
