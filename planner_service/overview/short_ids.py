"""Short ids in addresses: /v1/plans/3fa2/streams is that of the one plan whose id begins so, and so is /plans/3fa2."""

import re

from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeplan.errors import InvalidInputError, PipeplanError
from pipeplan.protocol.listing import IdQuery
from planner_service.documents.caching import IMMUTABLE, REVALIDATE
from planner_service.overview import service as overview
from planner_service.platform.context import Context
from planner_service.platform.problems import send_error
from planner_service.platform.requests import may

_ADDRESS = re.compile(r"((?:/v1)?/(profile|cluster|plan|job|run)s/)([0-9a-f]{4,31})(/.*)?")


class ShortIds:
    """Puts the whole id into the address of who may read lists; who may not cannot find an id by its head.

    It runs after the layers that check callers. If several ids begin so, the answer is a 422 that names them. What a
    short id stands for may change: no answer to one is kept without asking.
    """

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on, under the address with the whole id where there is one."""
        found = _ADDRESS.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if found is None or not may(scope, ("read",)):
            await self._app(scope, receive, send)
            return
        before, noun, head, after = found.groups("")
        try:
            whole = await run_in_threadpool(self._whole, noun, head)
        except PipeplanError as error:
            await send_error(error, scope, receive, send)
            return
        if whole is not None:
            scope["path"] = f"{before}{whole}{after}"
            scope["raw_path"] = scope["path"].encode()

        async def asked_again(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    (name, REVALIDATE.encode() if value == IMMUTABLE.encode() else value)
                    for name, value in message.get("headers", ())
                ]
            await send(message)

        await self._app(scope, receive, asked_again)

    def _whole(self, noun: str, head: str) -> str | None:
        found = overview.ids(self._context, IdQuery.model_validate({"noun": noun, "prefix": head}))
        if len(found.ids) > 1:
            named = ", ".join(found.ids) + (", and more" if found.more else "")
            raise InvalidInputError("id", f"must be the head of one {noun}'s id, and is that of {named}", head)
        return found.ids[0] if found.ids else None
