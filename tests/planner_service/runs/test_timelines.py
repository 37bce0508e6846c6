"""Timelines and losses as chunks: exact, small, and read in windows."""

from dataclasses import replace

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select, update

from pipeplan.documents.files import parse
from pipeplan.errors import InvalidInputError
from pipeplan.programs.timeline_document import LaneDocument, TimelineDocument
from pipeplan.protocol.jobs import Completion, RunResult
from planner_service.jobs import service as jobs
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from planner_service.platform.tables import run_chunks
from planner_service.runs import service as runs
from planner_service.runs.timelines import (
    ROWS,
    InstructionRows,
    TimelineWindow,
    chunks_of,
    chunks_of_losses,
    pack_floats,
    pack_rows,
    unpack_floats,
    unpack_rows,
)
from tests.planner_service.examples import ANY_WORK, run_result, run_task, store_plan

MILLION = 10**6
MEGABYTE = 10**6
COMPUTE_S = {"F": 0.010, "B": 0.020, ">": 0.0001, "<": 0.003}

_times = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.floats(-1e-9, 1e4), st.just(-0.0))
_texts = st.one_of(st.text(max_size=12), st.from_regex(r"[<>]?[FB][0-9]{1,25}(@[0-9]{1,3})?", fullmatch=True))


def test_what_is_measured_comes_back_to_the_last_bit() -> None:
    rows = st.lists(st.tuples(_texts, _times, _times, st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=40)

    @given(rows)
    def check(given_rows: list[tuple[str, float, float, int]]) -> None:
        texts, starts, ends, held = (list(column) for column in zip(*given_rows, strict=True))
        back = unpack_rows(
            pack_rows(
                InstructionRows(
                    instructions=texts,
                    start_s=np.array(starts),
                    end_s=np.array(ends),
                    memory_bytes=np.array(held, dtype=np.int64),
                )
            )
        )
        assert list(back.instructions) == texts
        assert [value.hex() for value in back.start_s.tolist()] == [value.hex() for value in starts]
        assert [value.hex() for value in back.end_s.tolist()] == [value.hex() for value in ends]
        assert back.memory_bytes.tolist() == held

    check()


@given(st.lists(st.floats(allow_nan=False)))
def test_losses_come_back_to_the_last_bit(losses: list[float]) -> None:
    assert [value.hex() for value in unpack_floats(pack_floats(losses))] == [value.hex() for value in losses]


def _measured(instructions: int) -> TimelineDocument:
    """A worker in the middle of a pipeline: every duration has noise of its own, as measured ones have."""
    noise = np.random.default_rng(1)
    steps = [
        text
        for k in range(-(-instructions // 6))
        for text in (f"<F{k}:0", f"F{k}@{k // 8}", f">F{k}:2", f"<B{k}:2", f"B{k}@{k // 8}", f">B{k}:0")
    ][:instructions]
    durations_s = np.array([COMPUTE_S[text[0]] for text in steps]) * (1 + 0.02 * noise.standard_normal(instructions))
    gaps_s = np.abs(noise.normal(20e-6, 3e-6, instructions))
    ends_s = np.cumsum(durations_s + gaps_s)
    lane = LaneDocument(
        rank=1,
        stage=1,
        replica=0,
        instructions=tuple(steps),
        start_s=tuple((ends_s - durations_s).round(9).tolist()),
        end_s=tuple(ends_s.round(9).tolist()),
        memory_bytes=tuple(2**30 + 5_000_000 * (k % 4) for k in range(instructions)),
    )
    return TimelineDocument(lanes=(lane,), batch_size=16, batches=instructions // 48)


@pytest.mark.campaign
def test_a_million_instructions_are_a_few_megabytes() -> None:
    timeline = _measured(MILLION)
    assert sum(len(chunk.content) for chunk in chunks_of(timeline)) < 5 * MEGABYTE


def test_a_million_losses_are_a_few_megabytes() -> None:
    losses = (3 + np.random.default_rng(1).standard_normal(MILLION)).astype(np.float32).tolist()
    assert sum(len(chunk.content) for chunk in chunks_of_losses(losses)) < 4 * MEGABYTE


@pytest.fixture
def result(context: Context) -> RunResult:
    """What a run reports whose timeline and losses take several chunks."""
    small = run_result(plans.get(context, store_plan(context)))
    (lane,) = _measured(5 * ROWS).lanes
    idle = LaneDocument(rank=0, stage=0, replica=0, instructions=(), start_s=(), end_s=(), memory_bytes=())
    losses = tuple((np.random.default_rng(2).standard_normal(2 * ROWS + 5)).tolist())
    report = replace(small.report, losses=losses, first_step=7)
    timeline = TimelineDocument(lanes=(idle, lane), batch_size=16, batches=4)
    return RunResult(report=report, timeline=timeline)


@pytest.fixture
def run_id(context: Context, result: RunResult) -> str:
    """A run that ended with that result."""
    return _finished(context, result)


def _finished(context: Context, result: RunResult) -> str:
    job = jobs.enqueue(context, run_task(store_plan(context)))
    lease = jobs.lease(context, ANY_WORK)
    assert lease is not None
    assert job.run_id is not None
    jobs.complete(context, lease.job.id, Completion(token=lease.token, result=result))
    return job.run_id


def _inside(lane: LaneDocument, start_s: float, stop_s: float) -> list[tuple[str, float, float, int]]:
    columns = zip(lane.instructions, lane.start_s, lane.end_s, lane.memory_bytes, strict=True)
    return [event for event in columns if event[1] < stop_s and (event[2] > start_s or event[1] >= start_s)]


def _events(lane: LaneDocument) -> list[tuple[str, float, float, int]]:
    return list(zip(lane.instructions, lane.start_s, lane.end_s, lane.memory_bytes, strict=True))


def test_the_whole_comes_back_as_it_was_sent(context: Context, run_id: str, result: RunResult) -> None:
    assert runs.timeline(context, run_id) == result.timeline
    assert runs.get(context, run_id).report == result.report


def test_bytes_that_a_worker_could_not_count_stay_unknown(http: TestClient, context: Context) -> None:
    small = run_result(plans.get(context, store_plan(context)))
    first, *others = small.timeline.lanes
    stage, *stages = small.report.stages
    rank, *ranks = small.report.ranks
    report = replace(
        small.report,
        stages=(replace(stage, peak_memory_bytes=None), *stages),
        ranks=(replace(rank, peak_memory_bytes=None), *ranks),
    )
    timeline = replace(small.timeline, lanes=(replace(first, memory_bytes=()), *others))
    run_id = _finished(context, RunResult(report=report, timeline=timeline))
    assert runs.timeline(context, run_id) == timeline
    assert runs.get(context, run_id).report == report
    assert http.get(f"/runs/{run_id}").text.count(">unknown<") == 2
    window = http.get(f"/v1/runs/{run_id}/timeline", params={"start": 0.0, "stop": 1e6}).json()
    assert window["lanes"][0]["instructions"]
    assert window["lanes"][0]["memory_bytes"] == []
    columns = http.get(f"/v1/runs/{run_id}/timeline/columns").json()["measured"]["lanes"]
    assert [bool(lane["held"]) for lane in columns] == [False, *(True for _ in others)]
    for path in ("trace", "charts/timeline.svg", "charts/timeline.csv"):
        assert http.get(f"/v1/runs/{run_id}/{path}").status_code == 200


@pytest.mark.each_case
@pytest.mark.parametrize(("start", "stop"), [(0, 0.5), (50.0, 51.0), (77.7, None), (None, 0.02), (1e6, 2e6), (-5, 0)])
def test_a_window_holds_what_has_a_share_in_it(
    http: TestClient, run_id: str, result: RunResult, start: float | None, stop: float | None
) -> None:
    asked = {name: value for name, value in (("start", start), ("stop", stop)) if value is not None}
    answer = http.get(f"/v1/runs/{run_id}/timeline", params=asked)
    got = parse(TimelineDocument, answer.content)
    low, high = (-np.inf if start is None else start), (np.inf if stop is None else stop)
    assert [_events(lane) for lane in got.lanes] == [_inside(lane, low, high) for lane in result.timeline.lanes]
    assert (got.batches, got.batch_size) == (result.timeline.batches, result.timeline.batch_size)


def test_neighbouring_windows_share_only_what_is_in_both(context: Context, run_id: str, result: RunResult) -> None:
    """Whatever the cut, before it and behind it are all events, and twice those that go on across it."""
    lane = result.timeline.lanes[1]
    for cut_s in (lane.start_s[ROWS], lane.end_s[ROWS - 1], (lane.start_s[9] + lane.end_s[9]) / 2):
        before, behind = (
            runs.timeline(context, run_id, window).lanes[1].instructions
            for window in (TimelineWindow(start_s=-np.inf, stop_s=cut_s), TimelineWindow(start_s=cut_s, stop_s=np.inf))
        )
        across = sum(start_s < cut_s < end_s for start_s, end_s in zip(lane.start_s, lane.end_s, strict=True))
        assert len(before) + len(behind) == len(lane.instructions) + across


def test_a_window_reads_none_but_its_own_chunks(context: Context, run_id: str, result: RunResult) -> None:
    start_s = result.timeline.lanes[1].start_s[2 * ROWS]
    window = TimelineWindow(start_s=start_s, stop_s=start_s + 1)
    expected = runs.timeline(context, run_id, window)
    with context.database.write() as connection:
        connection.execute(update(run_chunks).where(run_chunks.c.part != 2).values(content=b"unreadable"))
    assert runs.timeline(context, run_id, window) == expected


@pytest.mark.each_case
@pytest.mark.parametrize(("start", "stop"), [(0, 5), (ROWS - 2, ROWS + 2), (2 * ROWS, None), (0, None), (10**9, None)])
def test_losses_come_in_windows_of_steps(
    http: TestClient, run_id: str, result: RunResult, start: int, stop: int | None
) -> None:
    asked = {"start": start} | ({} if stop is None else {"stop": stop})
    answer = http.get(f"/v1/runs/{run_id}/losses", params=asked).json()
    assert answer["losses"] == list(result.report.losses[start:stop])
    assert answer["first_step"] == 7 + start


@pytest.mark.parametrize(("start", "stop"), [(0, None), (2, 5), (3, ROWS), (5, None)])
def test_losses_of_earlier_attempts_come_first(
    http: TestClient, context: Context, result: RunResult, start: int, stop: int | None
) -> None:
    """Of the seven steps before the last attempt's, the losses of four are known."""
    earlier = (9.0, 8.0, 7.0, 6.0)
    report = replace(result.report, earlier_losses=earlier)
    run_id = _finished(context, RunResult(report=report, timeline=result.timeline))
    whole = (*earlier, *result.report.losses)
    asked = {"start": start} | ({} if stop is None else {"stop": stop})
    answer = http.get(f"/v1/runs/{run_id}/losses", params=asked).json()
    assert (answer["losses"], answer["first_step"]) == (list(whole[start:stop]), 3 + start)
    stored = runs.get(context, run_id).report
    assert stored is not None
    assert (stored.earlier_losses, stored.losses) == (earlier, result.report.losses)
    rows = http.get(f"/v1/runs/{run_id}/charts/loss.csv").text.splitlines()
    assert (rows[1], len(rows)) == ("3,9.0", 1 + len(whole))
    assert "from 9" in http.get(f"/runs/{run_id}").text


def test_more_earlier_losses_than_earlier_steps_are_refused(result: RunResult) -> None:
    with pytest.raises(InvalidInputError, match="earlier_losses: must be at most 7, as many as the steps before"):
        replace(result.report, earlier_losses=(1.0,) * 8)


def test_what_is_too_large_for_one_answer_is_one_refusal_that_says_how_to_ask(
    context: Context, http: TestClient, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MAX_INSTRUCTIONS", 2 * ROWS)
    with pytest.raises(InvalidInputError, match=rf"{5 * ROWS} instructions there span .*\?start=0&stop=60"):
        runs.timeline(context, run_id)
    assert http.get(f"/v1/runs/{run_id}/timeline").status_code == 422
    assert len(runs.timeline(context, run_id, TimelineWindow(start_s=0, stop_s=1)).lanes[1].instructions) > 0
    measured = runs.timelines(context, run_id)["measured"]
    assert 0 < len(measured.lanes[1].instructions) <= 2 * ROWS
    assert http.get(f"/v1/runs/{run_id}/trace").status_code == 200


@pytest.mark.each_case
@pytest.mark.parametrize(("start", "stop"), [("5", "5"), ("6", "5"), ("nan", "1"), ("inf", "inf"), ("x", "1")])
def test_a_window_that_is_none_is_refused(http: TestClient, run_id: str, start: str, stop: str) -> None:
    answer = http.get(f"/v1/runs/{run_id}/timeline", params={"start": start, "stop": stop})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "start"


def test_a_number_that_no_column_holds_is_refused_by_name(context: Context) -> None:
    result = run_result(plans.get(context, store_plan(context)))
    lane = replace(result.timeline.lanes[0], memory_bytes=(2**70,) * len(result.timeline.lanes[0].instructions))
    timeline = replace(result.timeline, lanes=(lane,))
    with pytest.raises(InvalidInputError, match=r"timeline\.lanes\.0\.memory_bytes"):
        _finished(context, RunResult(report=result.report, timeline=timeline))
    with context.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(run_chunks)).scalar_one() == 0
