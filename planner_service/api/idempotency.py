"""Idempotency-Key: the header that makes a POST one that can be sent again."""

import hashlib
from functools import partial
from typing import Annotated

from fastapi import Depends, Header, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel

from planner_service.api.auth import Caller
from planner_service.api.bodies import SMALL, Body
from planner_service.services.idempotency import Key, Outcome, key_of
from planner_service.storage.idempotency import Reply

REPLAYED = "Idempotency-Replayed"
KeyHeader = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="1 to 200 characters of the caller's choice: the same request again under the same key has no "
        "second effect and the same answer, for 24 hours",
    ),
]


async def _of_body(request: Request, caller: Caller, content: Body, idempotency_key: KeyHeader = None) -> Key | None:
    key = partial(_key, request, caller.token_id or caller.name, idempotency_key, content)
    return key() if len(content) <= SMALL else await run_in_threadpool(key)


async def _of_path(request: Request, caller: Caller, idempotency_key: KeyHeader = None) -> Key | None:
    return _key(request, caller.token_id or caller.name, idempotency_key, b"")


OnceKey = Annotated[Key | None, Depends(_of_body)]
"""The key of a POST that has a body; None without the header."""

OncePathKey = Annotated[Key | None, Depends(_of_path)]
"""The key of a POST whose path says all."""


def model_reply(model: BaseModel, *, status: int = 200, location: str | None = None) -> Reply:
    """A model as the answer."""
    return Reply(status=status, body=model.model_dump_json(), location=location)


def once_response(outcome: Outcome) -> Response:
    """The answer as it goes over the wire, the first time and again."""
    reply = outcome.reply
    headers = {REPLAYED: "true"} if outcome.replayed else {}
    if reply.location is not None:
        headers["Location"] = reply.location
    return Response(reply.body or "", reply.status, headers, "application/json")


def _key(request: Request, caller: str, given: str | None, content: bytes) -> Key | None:
    if given is None:
        return None
    asked = f"{request.method} {request.url.path}?{request.url.query}\n".encode()
    digest = hashlib.sha256(asked)
    digest.update(content)
    return key_of(caller, given, digest.hexdigest())
