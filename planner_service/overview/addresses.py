"""Names in addresses: aliases and first digits in the place of a whole id.

/v1/plans/3fa2/streams is that of the one plan whose id begins so, /v1/plans/gpt-prod/streams that of the plan at which
the alias points. The pages have the same addresses without /v1. Where plans are compared, the query names them so.
"""

import re
from urllib.parse import parse_qsl, quote, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeplan.errors import InvalidInputError, NotFoundError, PipeplanError
from pipeplan.protocol.listing import IdQuery
from pipeplan.protocol.plans import is_short_id
from planner_service.aliases import service as aliases
from planner_service.documents.caching import IMMUTABLE, REVALIDATE
from planner_service.overview import service as overview
from planner_service.platform.context import Context
from planner_service.platform.problems import send_error
from planner_service.platform.requests import may

_SHORT = re.compile(r"((?:/v1)?/(profile|cluster|job|run)s/)([0-9a-f]{4,31})(/.*)?")
_PLAN = re.compile(
    r"(?!/v1/plans/compare$|/plans/new$)"  # no plan's
    r"((?:/v1)?/(plan)s/)(?![0-9a-f]{32}(?:/|$))(.+?(?<!/))"
    r"(/(?:request|streams|alternatives|timeline|timeline/columns|trace|(?:exports|charts)/[^/]+))?"
)

_COMPARED = {"/v1/plans/compare": "id", "/compare": "plan"}
"""The parameter that names plans, by address."""


class Names:
    """Puts the whole id into the address; a plan is looked for by id, alias and first digits, as the commands do.

    It runs after the layers that check callers. Callers that may not read lists cannot find an id by its first digits.
    If several ids begin so, the answer is a 422 that names them. A name's target may change: caches must revalidate its
    answers, and `Content-Location` has the id.
    """

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on, under the address with the whole id where there is one."""
        found = None
        if may(scope, ("read", "agent")):
            found = _SHORT.fullmatch(scope["path"])
            if found is None and scope["method"] == "GET":
                found = _PLAN.fullmatch(scope["path"])
        try:
            if found is not None:
                place = await run_in_threadpool(self._place, found, may(scope, ("read",)))
            elif may(scope, ("read",)) and scope["path"] in _COMPARED:
                place = await run_in_threadpool(self._compared, scope)
            else:
                place = None
        except PipeplanError as error:
            await send_error(error, scope, receive, send)
            return
        if place is None:
            await self._app(scope, receive, send)
            return
        scope["path"] = place
        scope["raw_path"] = quote(scope["path"]).encode()

        async def asked_again(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [
                    (key, REVALIDATE.encode() if value == IMMUTABLE.encode() else value)
                    for key, value in message.get("headers", ())
                ]
                if scope["method"] == "GET" and message["status"] in (200, 304):
                    query = b"?" + scope["query_string"] if scope["query_string"] else b""
                    headers.append((b"content-location", scope["raw_path"] + query))
                message["headers"] = headers
            await send(message)

        await self._app(scope, receive, asked_again)

    def _compared(self, scope: Scope) -> None:
        """Puts whole ids into the query, as far as its names stand for any."""
        named, given = _COMPARED[scope["path"]], parse_qsl(scope["query_string"].decode(), keep_blank_values=True)
        whole = [(key, (self._id("plan", name, True) or name) if key == named else name) for key, name in given]
        scope["query_string"] = urlencode(whole).encode()

    def _place(self, found: re.Match[str], reads: bool) -> str | None:
        """The address with the whole id, and the requested part; None if there is none, which a route reports.

        An address that ends like that of a part is one if the rest names a plan: aliases may contain slashes.
        """
        before, noun, name, part = found.groups("")
        for head, rest in ((name, part), (name + part, "")):
            whole = self._id(noun, head, reads)
            if whole is not None:
                return before + whole + rest
        if "/" in name:  # no route has such a name
            raise NotFoundError(f"there is no plan {name[:200]}, nor an alias of that name")
        return None

    def _id(self, noun: str, name: str, reads: bool) -> str | None:
        if noun == "plan":
            try:
                return aliases.get(self._context, name).plan_id
            except (InvalidInputError, NotFoundError):
                pass
        if not reads or not is_short_id(name):
            return None
        found = overview.ids(self._context, IdQuery.model_validate({"noun": noun, "prefix": name}))
        if len(found.ids) > 1:
            named = ", ".join(found.ids) + (", and more" if found.more else "")
            raise InvalidInputError("id", f"must be the head of one {noun}'s id, and is that of {named}", name)
        return found.ids[0] if found.ids else None
