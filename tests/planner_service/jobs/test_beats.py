"""Heartbeats' short way: what it answers is what the route answers, and what is unusual is left to the route."""

import asyncio
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from pipeplan.protocol.tokens import LOCAL
from planner_service.jobs import service as jobs
from planner_service.jobs.beats import LARGEST_BYTES, Beats
from planner_service.platform.context import Context
from planner_service.platform.requests import KEY
from tests.planner_service.examples import ANY_WORK, PROFILE_TASK

TOO_LONG_FOR_IT = b" " * LARGEST_BYTES
JSON = {"Content-Type": "application/json"}


def _leased(context: Context) -> tuple[str, str]:
    jobs.enqueue(context, PROFILE_TASK)
    lease = jobs.lease(context, ANY_WORK)
    assert lease is not None
    return f"/v1/jobs/{lease.job.id}/heartbeat", lease.token


def _told(http: TestClient, path: str, content: bytes, **headers: str) -> tuple[int, str, Any]:
    answer = http.post(path, content=content, headers={**JSON, **headers})
    document = answer.json()
    document.pop("request_id", None)
    return answer.status_code, answer.headers["content-type"], document


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"token": "TOKEN"}', 200),
        ('{"token": "TOKEN", "progress": {"done": 1, "total": 2, "message": "block 1"}}', 200),
        ('{"token": "another"}', 409),
        ('{"token": "TOKEN", "more": 1}', 422),
        ('{"token": "TOKEN", "progress": {"done": NaN, "total": 2}}', 422),
        ('{"token": "TOKEN", "progress": {"done": -1, "total": 2}}', 422),
        ('{"token": 5}', 422),
        ("[]", 422),
    ],
)
def test_the_short_way_answers_as_the_route_does(http: TestClient, context: Context, body: str, status: int) -> None:
    path, token = _leased(context)
    content = body.replace("TOKEN", token).encode()
    short = _told(http, path, content)
    assert short[0] == status
    assert short == _told(http, path, content + TOO_LONG_FOR_IT)


def test_a_job_that_is_not_there_or_was_cancelled_is_told_so(http: TestClient, context: Context) -> None:
    path, token = _leased(context)
    content = f'{{"token": "{token}"}}'.encode()
    missing = "/v1/jobs/nothing/heartbeat"
    assert _told(http, missing, content) == _told(http, missing, content + TOO_LONG_FOR_IT)
    assert _told(http, missing, content)[0] == 404
    jobs.cancel(context, path.split("/")[3])
    assert _told(http, path, content)[2] == {"expires_in_s": 0.0, "cancelled": True}


def test_what_is_unusual_is_left_to_the_route(http: TestClient, context: Context) -> None:
    path, token = _leased(context)
    content = f'{{"token": "{token}"}}'.encode()
    assert _told(http, path, content, **{"Content-Type": "text/plain"})[0] == 415
    assert _told(http, f"{path}?more=1", content)[0] == 422
    assert _told(http, path, b"{")[0] == _told(http, path, b"")[0] == 422
    assert http.get(path).status_code == 405
    chunked = http.post(path, content=iter([content[:5], content[5:]]), headers=JSON)
    assert chunked.status_code == 200


def test_a_usual_heartbeat_reaches_no_route(http: TestClient, context: Context) -> None:
    path, token = _leased(context)
    content = f'{{"token": "{token}"}}'.encode()

    async def route(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise LookupError("the route was asked")

    sent: list[Message] = []

    async def ask(caller: object) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers, KEY: caller}
        await Beats(route, context)(scope, receive, send)

    asyncio.run(ask(LOCAL))
    assert sent[0]["status"] == 200
    with pytest.raises(LookupError):  # which says that the caller may not
        asyncio.run(ask(None))
