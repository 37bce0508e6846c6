"""The Chrome trace that the service sends: what chrome://tracing and Perfetto read."""

import json
from itertools import groupby
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipeplan.simulation.predict import predict
from pipeplan.simulation.trace import FIRST_TRACK
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from tests.planner_service.examples import store_plan


@pytest.fixture
def trace(http: TestClient, context: Context) -> dict[str, Any]:
    """The trace of one batch of two microbatches on two ranks."""
    answer = http.get(f"/v1/plans/{store_plan(context, batch_size=4)}/trace", params={"batches": 1})
    document: dict[str, Any] = json.loads(answer.text)
    return document


def test_every_instruction_is_an_event_on_its_ranks_track(trace: dict[str, Any]) -> None:
    tracks: dict[int, list[str]] = {0: [], 1: []}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["tid"] - FIRST_TRACK].append(event["name"])
    assert tracks == {
        0: ["F1", ">F1:1", "F2", ">F2:1", "<B1:1", "B1", "<B2:1", "B2", "U1"],
        1: ["<F1:0", "F1", "B1", ">B1:0", "<F2:0", "F2", "B2", ">B2:0", "U1"],
    }


def test_times_are_microseconds_and_tracks_are_named(trace: dict[str, Any]) -> None:
    first = next(event for event in trace["traceEvents"] if event["name"] == "F1")
    assert (first["ts"], first["dur"], first["cat"]) == (0.0, pytest.approx(10_000.0), "compute")
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["rank 0 (stage 0, replica 0)", "rank 1 (stage 1, replica 0)"]


def test_memory_is_a_counter_a_rank(context: Context, trace: dict[str, Any]) -> None:
    plan = plans.get(context, store_plan(context, batch_size=4))
    counted = [
        event["args"]["bytes"] for event in trace["traceEvents"] if event["ph"] == "C" and event["tid"] == FIRST_TRACK
    ]
    changes = groupby(predict(plan, batches=1).lanes[0].memory_bytes)  # a counter keeps its value until it changes
    assert counted == [held for held, _ in changes]
