"""Solving over HTTP: a plan in the answer, or as a job (RFC 7240). No thread waits while a planner works."""

import asyncio
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Header, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from pipeplan.documents.files import answer_document
from pipeplan.documents.identity import canonical_json
from pipeplan.errors import DeadlineError, UnavailableError
from planner_service.api.auth import caller
from planner_service.api.idempotency import model_reply, once_response
from planner_service.contract.plans import PlanRequest
from planner_service.services import idempotency, jobs, plan_jobs, plans
from planner_service.services.background import Background
from planner_service.services.context import Context
from planner_service.services.idempotency import Key
from planner_service.services.solver import SolverTicket
from planner_service.solvers.messages import Answered, Question
from planner_service.storage.idempotency import Reply

LONGEST_WAIT_S = 60.0
HELD_S = 30.0
"""What a request may take beside the planner."""

PreferHeader = Annotated[
    str | None,
    Header(
        description="`respond-async`: the answer is 202 and a job to follow; `respond-async, wait=5`: only if the plan "
        "is not there within 5 s"
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """What a client prefers: an answer at once, and for how many seconds it would wait for the plan itself."""

    respond_async: bool = False
    wait_s: float = 0.0

    @property
    def applied(self) -> str:
        """What is said of it in the answer."""
        return f"respond-async, wait={self.wait_s:g}" if self.wait_s else "respond-async"


def preference_of(header: str | None) -> Preference:
    """The preferences in a Prefer header; those that nobody knows are left aside, as RFC 7240 asks."""
    stated = dict(re.findall(r"([\w-]+)(?:\s*=\s*\"?([^\",;\s]*)\"?)?", (header or "").lower()))
    wait = stated.get("wait", "")
    wait_s = min(float(wait), LONGEST_WAIT_S) if wait.isascii() and wait.isdigit() else 0.0
    return Preference(respond_async="respond-async" in stated, wait_s=wait_s)


async def plan_answer(
    request: Request, context: Context, asked: PlanRequest, key: Key | None, preference: Preference
) -> Response:
    """The answer to a request for a plan."""
    background: Background = request.app.state.background
    if preference.respond_async:
        return await _by_job(request, context, asked, key, preference)
    held_s = background.bounds.deadline_s + HELD_S
    if key is not None and (known := await run_in_threadpool(idempotency.hold, context, key, held_s)) is not None:
        return once_response(known)
    settled = False
    try:
        reply = await _solve(request, background, context, asked, key)
        settled = True
    finally:
        if key is not None and not settled:
            await asyncio.shield(asyncio.to_thread(idempotency.let_go, context, key))
    return once_response(idempotency.Outcome(reply=reply))


async def _solve(
    request: Request, background: Background, context: Context, asked: PlanRequest, key: Key | None
) -> Reply:
    posed = await run_in_threadpool(plans.posed, context, asked)
    ticket = background.pool.submit(Question(planner=asked.planner, pose=posed.problem))
    try:
        answered = await _answer_of(request, ticket, asked.planner, background.bounds.deadline_s)
    finally:
        ticket.cancel()
    return await run_in_threadpool(_keep, context, asked, answered, key, (await caller(request)).name)


async def _answer_of(request: Request, ticket: SolverTicket, planner: str, deadline_s: float) -> Answered:
    """The planner's answer. Raises ClientDisconnect where nobody waits for it, DeadlineError where it takes long."""
    future = asyncio.wrap_future(ticket.future)
    gone = asyncio.create_task(_disconnection(request))
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


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _keep(context: Context, asked: PlanRequest, answered: Answered, key: Key | None, asked_by: str) -> Reply:
    with context.database.write() as connection:
        reply = _reply_of(plans.keep(context, connection, asked, answered, asked_by=asked_by))
        idempotency.settle(connection, key, reply)
    return reply


async def _by_job(
    request: Request, context: Context, asked: PlanRequest, key: Key | None, preference: Preference
) -> Response:
    background: Background = request.app.state.background
    asked_by = (await caller(request)).name

    def enqueue(within: Context) -> Reply:
        longest_s = background.bounds.job_deadline_s
        job = plan_jobs.enqueue(within, asked, longest_s=longest_s, asked_by=asked_by)
        return model_reply(job, status=HTTPStatus.ACCEPTED, location=f"/v1/jobs/{job.id}")

    outcome = await run_in_threadpool(idempotency.perform, context, key, enqueue)
    background.runner.poke()
    response = once_response(outcome)
    if preference.wait_s:
        response = await _within(background, context, outcome, preference.wait_s)
    response.headers["Preference-Applied"] = preference.applied
    return response


async def _within(background: Background, context: Context, outcome: idempotency.Outcome, wait_s: float) -> Response:
    """The plan, if the job ends with one in time; or else the job."""
    job_id = (outcome.reply.location or "").rpartition("/")[2]
    await background.feed.ends_within(("job", job_id), wait_s)

    def read() -> Reply:
        job = jobs.get(context, job_id)
        created = plan_jobs.answer_of(context, job)
        if created is not None:
            return _reply_of(created)
        return model_reply(job, status=HTTPStatus.ACCEPTED, location=f"/v1/jobs/{job_id}")

    return once_response(idempotency.Outcome(reply=await run_in_threadpool(read), replayed=outcome.replayed))


def _reply_of(created: plans.Created) -> Reply:
    document = answer_document(created.answer) | {"solve_time_s": created.solve_time_s}
    if created.plan_id is None:
        return Reply(status=HTTPStatus.OK, body=canonical_json(document))
    body = canonical_json(document | {"id": created.plan_id})
    status = HTTPStatus.CREATED if created.new else HTTPStatus.OK
    return Reply(status=status, body=body, location=f"/v1/plans/{created.plan_id}")
