"""The heart: it renews a lease, and tells a service that is away from a network that is."""

from collections.abc import Callable
from datetime import UTC, datetime

import httpx
import pytest

from pipeplan.errors import ServiceError
from pipeplan.protocol.jobs import Job, Lease, LinksTask
from tests.waiting import wait_until
from worker_agent.agent.client import AgentClient, Heart, is_cut_off

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
LEASE = Lease(
    job=Job(
        id="j",
        task=LinksTask(devices=1, repeats=2),
        state="leased",
        attempts=1,
        created_at=MOMENT,
        updated_at=MOMENT,
    ),
    token="t",
    expires_in_s=0.3,
)
BEATS = 3


@pytest.mark.parametrize(
    ("error", "renewed"),
    [
        (httpx.ConnectError("[Errno 111] Connection refused"), True),
        (httpx.ReadTimeout("timed out"), False),
    ],
)
def test_a_service_that_is_away_renews_the_lease_and_silence_does_not(
    error: httpx.TransportError, renewed: bool
) -> None:
    """A service that starts again gives every lease its whole length, so a job need not stop before."""
    beats = 0

    def fail(_request: httpx.Request) -> httpx.Response:
        nonlocal beats
        beats += 1
        raise error

    with AgentClient("http://127.0.0.1", transport=httpx.MockTransport(fail)) as client:
        heart = Heart(client, LEASE, lambda: None)
        ends_s = heart.ends_s
        heart.start()
        try:
            wait_until(lambda: beats >= BEATS)
        finally:
            heart.stop()
    assert (heart.ends_s > ends_s) is renewed


@pytest.mark.parametrize(
    ("error", "cut_off"),
    [
        (httpx.ConnectError("[Errno 111] Connection refused"), False),
        (httpx.ConnectTimeout("timed out"), True),
        (httpx.ReadTimeout("timed out"), True),
        (httpx.ConnectError("[Errno 113] No route to host"), True),
    ],
)
def test_a_service_that_is_away_is_told_from_a_network_that_is(error: httpx.TransportError, cut_off: bool) -> None:
    def fail(_request: httpx.Request) -> httpx.Response:
        raise error

    with (
        AgentClient("http://127.0.0.1", transport=httpx.MockTransport(fail)) as client,
        pytest.raises(ServiceError) as caught,
    ):
        client.plan("p")
    assert is_cut_off(caught.value) is cut_off


def test_an_answer_means_that_nobody_is_cut_off() -> None:
    answer: Callable[[httpx.Request], httpx.Response] = lambda _: httpx.Response(502)  # noqa: E731
    with (
        AgentClient("http://127.0.0.1", transport=httpx.MockTransport(answer)) as client,
        pytest.raises(ServiceError) as caught,
    ):
        client.plan("p")
    assert not is_cut_off(caught.value)
