"""What clients do with their token, and with answers that ask to come back."""

import logging
from pathlib import Path

import httpx
import pytest

from pipeplan.client.connection import Connection, RetryClock
from pipeplan.errors import ForbiddenError, InvalidInputError, ServiceError, TooManyRequestsError, UnauthorizedError
from tests.planner_service.servers import pipeplan, served

TOKEN = "ppl_" + "0" * 32 + "_" + "1" * 72


class Answers(httpx.MockTransport):
    """Gives one answer after the other, the last again and again, and keeps what was asked."""

    def __init__(self, *answers: httpx.Response) -> None:
        self.asked: list[httpx.Request] = []
        self._answers = list(answers)
        super().__init__(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def problem(status: int, slug: str, **headers: str) -> httpx.Response:
    """The service's answer to what it refuses."""
    content = {"type": f"urn:pipeplan:problem:{slug}", "title": "no", "status": status, "detail": "no"}
    return httpx.Response(status, json=content, headers=headers)


def test_the_token_is_sent_and_never_shown() -> None:
    answers = Answers(httpx.Response(200))
    connection = Connection(url="http://127.0.0.1:1", token=TOKEN, transport=answers)
    connection.get("/readyz")
    assert answers.asked[0].headers["Authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in repr(connection)


@pytest.mark.parametrize("token", ["a b", "a\nb", "é", "a\x00"])
def test_a_token_that_no_header_holds_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Connection(url="http://127.0.0.1:1", token=token)
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "token", "warned"),
    [
        ("http://192.0.2.1:8437", TOKEN, True),
        ("http://plans.example.org", TOKEN, True),
        ("https://plans.example.org", TOKEN, False),
        ("http://127.0.0.1:8437", TOKEN, False),
        ("http://192.0.2.1:8437", None, False),
    ],
)
def test_a_token_that_leaves_the_machine_unencrypted_is_warned_of(
    caplog: pytest.LogCaptureFixture, url: str, token: str | None, warned: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        Connection(url=url, token=token).close()
    assert ("unencrypted" in caplog.text) == warned
    assert TOKEN not in caplog.text


def test_no_redirect_carries_the_token_elsewhere() -> None:
    answers = Answers(httpx.Response(307, headers={"Location": "http://evil.example/"}))
    with pytest.raises(ServiceError, match="307"):
        Connection(url="http://127.0.0.1:1", token=TOKEN, transport=answers).get("/v1/plans")
    assert len(answers.asked) == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (problem(401, "unauthorized"), UnauthorizedError),
        (problem(403, "forbidden"), ForbiddenError),
    ],
)
def test_what_the_service_refuses_is_told_as_what_it_is(answer: httpx.Response, error: type[Exception]) -> None:
    with pytest.raises(error, match="no"):
        Connection(url="http://127.0.0.1:1", transport=Answers(answer)).get("/v1/plans")


def test_who_asks_too_often_comes_back_when_it_is_told_to() -> None:
    slept: list[float] = []
    clock = RetryClock(now_s=lambda: sum(slept), sleep=slept.append)
    answers = Answers(problem(429, "too-many-requests", **{"Retry-After": "7"}), httpx.Response(200, content=b"{}"))
    connection = Connection(url="http://127.0.0.1:1", transport=answers, clock=clock)
    assert connection.post("/v1/jobs/x/complete", "{}", patience_s=60) == b"{}"
    assert slept == [7.0]
    answers = Answers(problem(429, "too-many-requests", **{"Retry-After": "7"}))
    impatient = Connection(url="http://127.0.0.1:1", transport=answers)
    with pytest.raises(TooManyRequestsError) as caught:
        impatient.get("/v1/plans")
    assert caught.value.retry_after_s == 7


@pytest.mark.campaign
def test_the_commands_send_the_token_of_the_environment(tmp_path: Path) -> None:
    database = tmp_path / "service.sqlite3"
    made = pipeplan("token", "create", "--name", "ci", "--scope", "read", "--database", f"sqlite:///{database}")
    assert made.returncode == 0
    token = made.stdout.strip()
    with served(database, PIPEPLAN_REQUIRE_TOKENS="true") as url:
        without = pipeplan("plan", "list", "--url", url)
        assert (without.returncode, without.stdout) == (5, "")
        assert "a token is needed" in without.stderr
        assert pipeplan("plan", "list", "--url", url, PIPEPLAN_TOKEN=token).returncode == 0
        for command in (("plan", "get", "0" * 32), ("plan", "compare", "0" * 32, "1" * 32)):
            answer = pipeplan(*command, "--url", url, PIPEPLAN_TOKEN=token)
            assert "there is no plan" in answer.stderr
