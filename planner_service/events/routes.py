"""Events of jobs and runs, as server-sent events that can be resumed after any of them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, format_sse_event

from planner_service.access.auth import KNOWN_FOR_S, Admission, scope
from planner_service.events import service as events
from planner_service.events.feed import Feed
from planner_service.events.store import Subject
from planner_service.platform.context import Context
from planner_service.platform.requests import Services

SILENCE_S = 15.0
"""After this time without an event a comment is sent, to keep proxies from taking the connection for dead."""

LONGEST_S = 900.0
"""A stream ends after this time, and earlier once its token or session ends. Its caller reconnects."""

RETRY_MS = 1000
LARGEST_NUMBER = 2**31 - 1
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events: `id` is the number, `event` the state that it came to or `progress`, `data` JSON",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    204: {"description": "It has ended, and nothing came after that number: do not come back"},
}

router = APIRouter(prefix="/v1", tags=["events"])
After = Annotated[int, Query(ge=0, le=LARGEST_NUMBER, description="only events after this number")]
LastEventId = Annotated[
    int | None, Header(ge=0, le=LARGEST_NUMBER, description="the same, as browsers send it when they come back")
]


@router.get("/jobs/{job_id}/events", dependencies=[scope("read")], response_class=Response, responses=STREAM)
async def follow_job(
    request: Request, services: Services, job_id: str, after: After = 0, last_event_id: LastEventId = None
) -> Response:
    """What happens to a job, from its start or after an event, as it happens; the stream ends with the job."""
    return await _stream(request, services, ("job", job_id), after if last_event_id is None else last_event_id)


@router.get("/runs/{run_id}/events", dependencies=[scope("read")], response_class=Response, responses=STREAM)
async def follow_run(
    request: Request, services: Services, run_id: str, after: After = 0, last_event_id: LastEventId = None
) -> Response:
    """What happens to a run, from its start or after an event, as it happens; the stream ends with the run."""
    return await _stream(request, services, ("run", run_id), after if last_event_id is None else last_event_id)


async def _stream(request: Request, context: Context, subject: Subject, after: int) -> Response:
    """Follows a subject; 204 if it has ended and has no event after the number. Raises NotFoundError."""
    feed: Feed = request.app.state.feed
    ended = await run_in_threadpool(events.has_ended, context, subject)
    if ended and not await run_in_threadpool(events.after, context, subject, after):
        return Response(status_code=HTTPStatus.NO_CONTENT)
    feed.require_room()
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return EventSourceResponse(_sent(request, feed, subject, after), headers=headers)


async def _sent(request: Request, feed: Feed, subject: Subject, after: int) -> AsyncGenerator[bytes, None]:
    """The stream's text. It ends with the subject, or with the token or the session of its caller."""
    admission: Admission = request.app.state.admission
    yield format_sse_event(retry=RETRY_MS)
    loop = asyncio.get_running_loop()
    spoke_s = admitted_s = loop.time()
    following = feed.follow(subject, after, silence_s=KNOWN_FOR_S, longest_s=LONGEST_S)
    async with aclosing(following):
        async for event in following:
            now_s = loop.time()
            if event is None or now_s - admitted_s >= KNOWN_FOR_S:
                if not await admission.still_admits(request.scope):
                    return
                admitted_s = now_s
            if event is not None:
                yield format_sse_event(id=str(event.number), event=event.kind, data_str=event.model_dump_json())
            elif now_s - spoke_s >= SILENCE_S:
                yield format_sse_event(comment="still here")
            else:
                continue
            spoke_s = now_s
