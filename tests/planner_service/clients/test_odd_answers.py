"""What both clients make of what the service never sends: a proxy's page, broken bytes, a certificate of nobody's."""

import asyncio
import ssl
import threading
from pathlib import Path
from socket import create_server
from typing import Any

import httpx
import pytest

from pipeplan.client.client import AsyncClient, Client
from pipeplan.errors import InvalidInputError, NotFoundError, ServiceError
from planner_service.overview.openapi import PLAN_REQUEST
from tests.planner_service.clients.services import Scripted, Time, asked_of

BOTH = pytest.mark.parametrize("kind", [Client, AsyncClient])
PAGE = {"Content-Type": "text/html; charset=utf-8"}
JSON = {"Content-Type": "application/json"}


@BOTH
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (httpx.Response(200, text="<html>please log in</html>", headers=PAGE), "text/html.*proxy"),
        (httpx.Response(500, text="<html>an error</html>", headers=PAGE), "500 Internal Server Error.*proxy"),
        (httpx.Response(302, headers={"Location": "https://login.example/"}), "302"),
        (httpx.Response(304), "304"),
        (httpx.Response(204), "no Alias"),
        (httpx.Response(200, text="<html>", headers=JSON), "no Alias"),
        (httpx.Response(200, text='{"name": "a"}', headers=JSON), "no Alias"),
        (httpx.Response(200, text="[" * 100_000, headers=JSON), "no Alias"),
        (httpx.Response(200, content=b'{"name": "\xff"}', headers=JSON), "no Alias"),
    ],
)
def test_what_is_no_answer_of_the_service_is_the_services_failure(kind: Any, answer: httpx.Response, told: str) -> None:
    service = Scripted(answer)
    with pytest.raises(ServiceError, match=told) as caught:
        asked_of(kind, service, Time())("alias", "a")
    assert "\n" not in str(caught.value)
    assert len(service.asked) == 1


@BOTH
@pytest.mark.parametrize(
    "content", ["[]", "[" * 100_000, "5", "{}", '{"feasible": true}', '{"feasible": true, "solve_time_s": "x"}']
)
def test_what_is_no_plan_is_told_as_that(kind: Any, content: str) -> None:
    service = Scripted(httpx.Response(201, text=content, headers=JSON))
    with pytest.raises(ServiceError, match="no plan or job"):
        asked_of(kind, service, Time())("create_plan", PLAN_REQUEST)


@BOTH
def test_bytes_that_cannot_be_unpacked_are_asked_for_again(kind: Any) -> None:
    service, time = Scripted(httpx.DecodingError("incorrect header check")), Time()
    with pytest.raises(ServiceError, match="incorrect header check"):
        asked_of(kind, service, time)("alias", "a")
    assert len(service.asked) > 1


@BOTH
def test_a_certificate_that_is_not_trusted_is_told_at_once(kind: Any) -> None:
    lost = httpx.ConnectError("certificate verify failed")
    lost.__cause__ = ssl.SSLCertVerificationError("certificate verify failed")
    service, time = Scripted(lost), Time()
    with pytest.raises(ServiceError, match="SSL_CERT_FILE"):
        asked_of(kind, service, time)("alias", "a")
    assert (len(service.asked), time.slept) == (1, [])


def test_https_to_a_service_that_speaks_http_is_told_at_once() -> None:
    with create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        time = Time()
        url = f"https://127.0.0.1:{listening.getsockname()[1]}"
        with Client(url, "t", clock=time.clock) as client, pytest.raises(ServiceError, match="URL begin"):
            client.whoami()
        thread.join()
    assert time.slept == []


def test_authorities_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "nothing.pem"))
    with pytest.raises(InvalidInputError, match="SSL_CERT_FILE"):
        Client("https://127.0.0.1:1")
    Client("http://127.0.0.1:1").close()


def test_a_closed_client_says_so() -> None:
    client = Client("http://127.0.0.1:1")
    client.close()
    client.close()
    for ask in (client.whoami, lambda: list(client.plans()), lambda: next(client.follow_job("a"))):
        with pytest.raises(InvalidInputError, match="closed"):
            ask()

    async def awaited() -> None:
        closed = AsyncClient("http://127.0.0.1:1")
        await closed.close()
        with pytest.raises(InvalidInputError, match="closed"):
            await closed.whoami()
        with pytest.raises(InvalidInputError, match="closed"):
            await anext(aiter(closed.follow_job("a")))

    asyncio.run(awaited())


@BOTH
def test_the_services_words_move_no_cursor(kind: Any) -> None:
    told = {"detail": "\x1b[31mred\nmore", "type": "urn:pipeplan:problem:not-found", "title": "no", "status": 404}
    service = Scripted(httpx.Response(404, json=told))
    with pytest.raises(NotFoundError) as caught:
        asked_of(kind, service, Time())("alias", "a")
    assert str(caught.value).isprintable()
