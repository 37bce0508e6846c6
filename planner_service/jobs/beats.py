"""Beats: a shortcut for heartbeats, the most frequent of all requests that write.

Finding the route and its dependencies takes twice as long as the heartbeat itself. `Beats` runs after all checks of
callers, and gives the route's answer. Every unusual request continues to the route, which reports its error.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeplan.documents.files import parse_sent
from pipeplan.errors import InvalidInputError, PipeplanError
from pipeplan.protocol.jobs import Heartbeat
from pipeplan.protocol.tokens import Scope as TokenScope
from planner_service.jobs import service as jobs
from planner_service.platform.context import Context
from planner_service.platform.problems import send_error
from planner_service.platform.requests import may
from planner_service.platform.writers import in_writer

LARGEST_BYTES = 4096
"""The largest body that the event loop's thread reads: even the slowest one takes less time than a switch to another
thread.
"""

SCOPES: tuple[TokenScope, ...] = ("agent",)


class BeatLane:
    """The route that is answered for, as logs and metrics name it."""

    path = "/v1/jobs/{job_id}/heartbeat"


class Beats:
    """Answers heartbeats before any route is looked up."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job_id = _job_of(scope)
        if job_id is None:
            await self._app(scope, receive, send)
            return
        message = await receive()
        content = message.get("body", b"")
        try:
            if message["type"] != "http.request" or message.get("more_body", False):
                raise InvalidInputError("body", "must come at once", "a part")
            beat = parse_sent(Heartbeat, content)
        except InvalidInputError:
            waiting = [message]

            async def once_more() -> Message:
                return waiting.pop() if waiting else await receive()

            await self._app(scope, once_more, send)
            return

        scope["route"] = BeatLane
        try:
            answer = await in_writer(jobs.heartbeat, self._context, job_id, beat)
        except PipeplanError as error:
            await send_error(error, scope, receive, send)
            return
        body = answer.model_dump_json(exclude_none=True).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _job_of(scope: Scope) -> str | None:
    """The job of a heartbeat that is answered here; None for every other request."""
    if scope["type"] != "http" or scope["method"] != "POST" or scope["query_string"] or not may(scope, SCOPES):
        return None
    parts = scope["path"].split("/")
    if len(parts) != 5 or parts[:3] != ["", "v1", "jobs"] or parts[4] != "heartbeat":
        return None
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    small = length.isdigit() and len(length) < 5 and 0 < int(length) <= LARGEST_BYTES
    json = headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"
    return str(parts[3]) if small and json else None
