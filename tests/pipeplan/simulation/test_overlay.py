"""Overlays: the same instructions of a plan, predicted and measured."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.costs.memory import stages_by_rank
from pipeplan.documents.plan import Plan
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.programs.instructions import Forward
from pipeplan.programs.timeline import Timeline
from pipeplan.simulation.overlay import differences, overlaid, pairs
from pipeplan.simulation.predict import predict
from planner_service.overview.openapi import CLUSTER, PROFILE

STEPS = 9


def _plan(schedule: str, **options: object) -> Plan:
    chosen = Options(schedule=schedule, stages=2, **options)  # type: ignore[arg-type]
    planner = "exact" if options else "pipedream-2bw"
    answer = solve(planner, PlanningProblem(profile=PROFILE, cluster=CLUSTER, batch_size=16, options=chosen))
    assert isinstance(answer, Plan)
    return answer


PLANS = {
    "1f1b": _plan("1f1b"),
    "pipedream-2bw": _plan("pipedream-2bw"),
    "1f1b-interleaved": _plan("1f1b-interleaved", chunks=2),
}


def _slower(timeline: Timeline, factor: float, later_s: float) -> Timeline:
    lanes = (
        replace(
            lane,
            start_s=tuple(later_s + factor * moment_s for moment_s in lane.start_s),
            end_s=tuple(later_s + factor * moment_s for moment_s in lane.end_s),
        )
        for lane in timeline.lanes
    )
    return replace(timeline, lanes=tuple(lanes))


@pytest.mark.parametrize("schedule", list(PLANS))
@given(st.integers(1, STEPS), st.integers(1, STEPS), st.sampled_from([1.0, 1.5]))
def test_both_end_with_the_same_instructions_and_begin_at_nought(
    schedule: str, played: int, shown: int, factor: float
) -> None:
    plan = PLANS[schedule]
    measured = _slower(predict(plan, batches=STEPS), factor, 7.0)
    expected, seen = overlaid(predict(plan, batches=played, first_batch=STEPS - played), measured, shown)
    assert expected.batches == seen.batches == min(played, shown)
    for timeline in (expected, seen):
        assert min(lane.start_s[0] for lane in timeline.lanes) == 0
    if min(played, shown) < played:  # of a play's first batch the pipeline is still empty
        for one, other in zip(expected.lanes, seen.lanes, strict=True):
            assert one.instructions == other.instructions
        taken = {pair.instruction: (pair.predicted_s, pair.measured_s) for pair in pairs(expected, seen)}
        forward = next(each for each in seen.lanes[0].instructions if isinstance(each, Forward))
        assert taken[forward][1] == pytest.approx(factor * taken[forward][0])


def test_what_took_longer_is_named_by_stage_and_kind() -> None:
    played = predict(PLANS["1f1b"], batches=4)
    late = played.lanes[1]
    ends = tuple(
        end + (0.25 if isinstance(each, Forward) else 0)
        for each, end in zip(late.instructions, late.end_s, strict=True)
    )
    measured = replace(played, lanes=(played.lanes[0], replace(late, end_s=ends)))
    rows = differences(*overlaid(played, measured, 2), stages_by_rank(PLANS["1f1b"]))
    first = next(row for row in rows if row.stage == 1)
    assert (first.kind, first.count) == ("Forward", 2 * PLANS["1f1b"].microbatches)
    assert first.measured_s - first.predicted_s == pytest.approx(0.25)
    assert first.longer_s == pytest.approx(0.25 * first.count)
    assert all(row.longer_s == 0 for row in rows if (row.stage, row.kind) != (1, "Forward"))


def test_the_stages_of_a_rank_have_rows_of_their_own() -> None:
    plan = PLANS["1f1b-interleaved"]
    played = predict(plan, batches=4)
    late = played.lanes[1]
    ends = tuple(
        end + (0.25 if isinstance(each, Forward) and each.chunk == 1 else 0)
        for each, end in zip(late.instructions, late.end_s, strict=True)
    )
    measured = replace(played, lanes=(played.lanes[0], replace(late, end_s=ends)))
    rows = differences(*overlaid(played, measured, 2), stages_by_rank(plan))
    assert {row.stage for row in rows} == {0, 1, 2, 3}
    assert [(row.stage, row.kind) for row in rows if row.longer_s] == [(3, "Forward")]


def test_the_end_of_a_long_run_is_cut_at_a_batch() -> None:
    plan = PLANS["1f1b"]
    whole = predict(plan, batches=STEPS)
    half = tuple(
        replace(
            lane,
            instructions=lane.instructions[k:],
            start_s=lane.start_s[k:],
            end_s=lane.end_s[k:],
            memory_bytes=lane.memory_bytes[k:],
        )
        for lane in whole.lanes
        for k in [len(lane.instructions) // 2]
    )
    expected, seen = overlaid(predict(plan, batches=8, first_batch=1), replace(whole, lanes=half), 3)
    assert seen == overlaid(whole, whole, 3)[1]
    assert [lane.instructions for lane in expected.lanes] == [lane.instructions for lane in seen.lanes]
