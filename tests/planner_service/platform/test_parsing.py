"""Large documents are read in processes of their own: few, held to time and memory, and in nobody's way."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pipeplan.errors import PipeplanError, TooLargeError, UnavailableError
from planner_service.app import create_app
from planner_service.documents.service import profiles
from planner_service.platform.parsing import SMALL_BYTES, Parsing, ParsingLimits, Sent, parser_process
from planner_service.platform.processes.pool import WorkerProcess
from planner_service.platform.settings import Settings
from tests.planner_service.answers import halve
from tests.planner_service.examples import profile_document
from tests.planner_service.odd_documents import crash, endless, greedy, patient, process_of

T = TypeVar("T")

LARGE = b" " * (SMALL_BYTES + 1)
JSON = {"Content-Type": "application/json"}


def _run(work: Callable[[], Awaitable[T]]) -> T:
    async def main() -> T:
        return await work()

    return asyncio.run(main())


def _read(parsing: Parsing, read: Callable[[bytes], T], content: bytes = LARGE) -> T:
    return _run(lambda: parsing.read(read, content))


@pytest.fixture
def parsing() -> Iterator[Parsing]:
    """One process at a time, and none that waits."""
    made = Parsing(ParsingLimits(parsers=1, queue=0, memory_bytes=2**29, cpu_s=2.0))
    yield made
    made.close()


def test_a_small_document_is_read_here_and_a_large_one_in_another_process(parsing: Parsing) -> None:
    assert _read(parsing, process_of, LARGE[1:]) == os.getpid()
    other = _read(parsing, process_of)
    assert other != os.getpid()
    assert _read(parsing, process_of) == other


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("read", "sentence"),
    [
        (greedy, r"more than 536,870,912 bytes of memory \(PIPEPLAN_PARSER_MEMORY_BYTES\)"),
        (endless, r"more than 2 s of processor time \(PIPEPLAN_PARSER_CPU_S\)"),
        (crash, "ended with status 1"),
    ],
)
def test_a_document_that_ends_its_process_is_too_large_and_the_next_one_is_read(
    parsing: Parsing, read: Callable[[bytes], int], sentence: str
) -> None:
    first = _read(parsing, process_of)
    with pytest.raises(TooLargeError, match=sentence):
        _read(parsing, read)
    assert _read(parsing, process_of) not in (first, os.getpid())


def test_a_document_of_millions_of_lists_meets_the_memory_limit(parsing: Parsing) -> None:
    with pytest.raises(TooLargeError, match="bytes of memory"):
        _read(parsing, profiles.read, b'{"blocks": [' + b"[]," * 8_000_000 + b"[]]}")


def test_the_death_of_one_process_costs_no_other_document() -> None:
    limits = ParsingLimits(parsers=2, queue=0)
    started: list[WorkerProcess[Sent, None, object]] = []

    def start() -> WorkerProcess[Sent, None, object]:
        started.append(parser_process(limits))
        return started[-1]

    parsing = Parsing(limits, start)
    waiting = threading.Thread(target=_expect, args=(parsing, TooLargeError))
    waiting.start()
    try:
        assert _until(lambda: len(started) == 1)
        other = _read(parsing, process_of)
        started[0].kill()
        waiting.join()
        assert _read(parsing, process_of) == other
    finally:
        parsing.close()
        waiting.join()


def _expect(parsing: Parsing, kind: type[PipeplanError]) -> None:
    with pytest.raises(kind):
        _read(parsing, patient)


def _until(condition: Callable[[], bool]) -> bool:
    for _ in range(10_000):
        if condition():
            return True
        threading.Event().wait(0.001)
    return False


@pytest.fixture
def busy(sqlite_url: str) -> Iterator[FastAPI]:
    """A service whose only parser reads a document that does not end."""
    app = create_app(Settings(database_url=sqlite_url, parser_processes=1, parser_queue=0), solve=halve)
    parsing: Parsing = app.state.context.parsing
    reader = threading.Thread(target=_expect, args=(parsing, UnavailableError))
    reader.start()
    assert _until(lambda: not _has_room(parsing))
    yield app
    parsing.close()
    reader.join()


def _has_room(parsing: Parsing) -> bool:
    try:
        parsing.require_room(SMALL_BYTES + 1)
    except UnavailableError:
        return False
    return True


def test_a_large_document_too_many_is_a_503_and_everything_else_is_answered(busy: FastAPI) -> None:
    with TestClient(busy, base_url="http://127.0.0.1") as http:
        answer = http.post("/v1/profiles", content=LARGE, headers=JSON)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
        assert "1 large documents are being read and 0 wait already" in answer.json()["detail"]
        chunks = (LARGE[:1024] for _ in range(65))
        assert http.post("/v1/profiles", content=chunks, headers=JSON).status_code == 503
        assert http.post("/v1/profiles", json=profile_document()).status_code == 201
        assert http.get("/healthz").status_code == 200


def test_a_large_profile_is_stored_as_it_was(http: TestClient) -> None:
    block = profile_document()["blocks"][0]
    document = profile_document(blocks=[block | {"name": f"block {number}"} for number in range(500)])
    created = http.post("/v1/profiles", json=document)
    assert int(created.request.headers["Content-Length"]) > SMALL_BYTES
    assert (created.status_code, created.json()["blocks"]) == (201, 500)
    stored = http.get(created.headers["Location"]).json()
    assert [one["name"] for one in stored["blocks"]] == [one["name"] for one in document["blocks"]]
    assert http.post("/v1/profiles", json=document).status_code == 200


def test_what_is_wrong_with_a_large_profile_is_named_as_with_a_small_one(http: TestClient) -> None:
    block = profile_document()["blocks"][0]
    blocks = [block | {"name": f"block {number}"} for number in range(500)]
    blocks[400]["weight_bytes"] = "many"
    answer = http.post("/v1/profiles", json=profile_document(blocks=blocks))
    assert answer.status_code == 422
    rule = "must be a number, in the unit at the end of its name"
    assert answer.json()["errors"] == [{"field": "blocks.400.weight_bytes", "rule": rule, "value": "many"}]


def test_a_key_that_is_no_quantity_is_told_no_unit(http: TestClient) -> None:
    """It was: "cluster_id is meant, in the unit at the end of its name"."""
    asked = {"profile_id": "0" * 32, "cluster": "0" * 32, "planner": "auto", "batch_size": 8}
    answer = http.post("/v1/plans", json=asked)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["rule"] == "is not a known key: cluster_id is meant (and 1 more)"
