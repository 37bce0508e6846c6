"""Why a run missed its prediction: the parts sum to the gap, and a single cause is found as that one."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.calibration.missed import kinds, missed
from pipeplan.documents.plan import Plan
from pipeplan.formats import why_missed
from pipeplan.programs.instructions import Checkpoint, Update
from pipeplan.programs.timeline import Timeline, throughput_samples_per_s
from pipeplan.simulation.play import simulate
from pipeplan.simulation.predict import predict, program_of
from pipeplan.simulation.report import Compared, Missed, RankReport
from tests.pipeplan.calibration.measured import CLUSTER, PROFILE, batches_of, executed, network, plan_for, scaled
from tests.properties import examples

PLANS = [
    plan_for("1f1b", (2, 4, 6), 1),
    plan_for("gpipe", (3, 6), 1, recompute=True),
    plan_for("pipedream-2bw", (3, 6), 2),
    plan_for("pipedream", (2, 4, 6), 1),
    plan_for("1f1b-interleaved", (1, 2, 4, 6), 2, chunks=2),
    plan_for("zb-v", (2, 3, 4, 6), 1, chunks=2),
]
ONES = (1.0,) * len(PROFILE.blocks)


def _missed(plan: Plan, measured: Timeline, off_processor: Sequence[float | None] = ()) -> tuple[Missed, Compared]:
    predicted = predict(plan, batches=batches_of(plan))
    throughput = Compared(predicted=throughput_samples_per_s(predicted), measured=throughput_samples_per_s(measured))
    found = missed(plan, predicted, measured, throughput, others_took=off_processor)
    return found, throughput


def _sum(found: Missed) -> float:
    return found.compute + found.link + found.waiting + found.checkpoints + (found.other_programs or 0.0)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.schedule)
@pytest.mark.parametrize("slower", [1.5, 0.7])
def test_compute_that_alone_is_slower_is_the_whole_gap(plan: Plan, slower: float) -> None:
    factors = tuple(slower for _ in ONES)
    found, throughput = _missed(plan, executed(plan, (scaled(factors, factors), CLUSTER)).timeline)
    gap = throughput.measured - throughput.predicted
    assert (gap < 0) is (slower > 1)
    assert found.compute == pytest.approx(gap, rel=0.02)
    assert found.other_programs is None


@pytest.mark.parametrize("plan", PLANS[:2], ids=lambda plan: plan.schedule)
def test_a_link_that_alone_is_slower_is_the_whole_gap(plan: Plan) -> None:
    found, throughput = _missed(plan, executed(plan, (PROFILE, network(2e4, 1e-4))).timeline)
    gap = throughput.measured - throughput.predicted
    assert gap < -0.01 * throughput.predicted
    assert found.link == pytest.approx(gap, rel=0.1)
    assert abs(found.compute) < 1e-9


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.schedule)
def test_time_off_the_processor_is_other_programs(plan: Plan) -> None:
    """Everything takes twice as long, and half of the time the processes were not running."""
    twice = (2.0,) * len(ONES)
    measured = executed(plan, (scaled(twice, twice), CLUSTER)).timeline
    found, throughput = _missed(plan, measured, [0.5] * plan.workers)
    gap = throughput.measured - throughput.predicted
    assert found.other_programs == pytest.approx(gap, rel=0.05)
    assert abs(found.compute) < 0.02 * abs(gap)
    assert _missed(plan, measured, [0.0] * plan.workers)[0].compute == pytest.approx(gap, rel=0.02)


@examples(25)
@given(
    st.sampled_from(PLANS),
    st.tuples(*(st.floats(0.3, 3.0) for _ in ONES)),
    st.floats(1e4, 1e7),
    st.floats(0.0, 0.9),
)
def test_the_parts_sum_to_the_gap(plan: Plan, factors: tuple[float, ...], bandwidth: float, off: float) -> None:
    measured = executed(plan, (scaled(factors, factors[::-1]), network(bandwidth, 1e-4))).timeline
    for lost in ((), [off] * plan.workers, [off] * (plan.workers - 1) + [None]):
        found, throughput = _missed(plan, measured, lost)
        assert _sum(found) == pytest.approx(throughput.measured - throughput.predicted)
        assert (found.other_programs is None) is (not lost or None in lost)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.schedule)
def test_the_kinds_of_instruction_are_all_of_a_batch(plan: Plan) -> None:
    predicted = predict(plan, batches=batches_of(plan))
    twice = (2.0,) * len(ONES)
    measured = executed(plan, (scaled(twice, ONES), CLUSTER)).timeline
    rows = {row.kind: row.s_per_batch for row in kinds(predicted, measured)}
    assert sum(row.predicted for row in rows.values()) == pytest.approx(predicted.makespan_s / predicted.batches)
    assert sum(row.measured for row in rows.values()) == pytest.approx(measured.makespan_s / measured.batches)
    assert rows["forward"].measured > 1.8 * rows["forward"].predicted
    assert rows["backward"].measured == pytest.approx(rows["backward"].predicted)


def test_a_run_that_went_as_predicted_missed_nothing() -> None:
    found, _ = _missed(PLANS[0], predict(PLANS[0], batches=batches_of(PLANS[0])))
    assert (found.compute, found.link, found.waiting) == (0.0, 0.0, 0.0)


def _with_checkpoints(plan: Plan, every: int, seconds: float) -> Timeline:
    """The plan's run, in which each stage writes a checkpoint after so many batches and trains on after it."""
    costs = tuple(replace(each, update_s=each.update_s + seconds) for each in plan.costs)
    program = program_of(plan, batches=batches_of(plan), checkpoint_every=every)
    played = simulate(program, costs)
    lanes = []
    for lane in played.lanes:
        start_s, end_s = list(lane.start_s), list(lane.end_s)
        for index, (update, after) in enumerate(pairwise(lane.instructions)):
            if isinstance(update, Update) and isinstance(after, Checkpoint):
                end_s[index] -= seconds
                start_s[index + 1] -= seconds
        lanes.append(replace(lane, start_s=tuple(start_s), end_s=tuple(end_s)))
    return replace(played, lanes=tuple(lanes))


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[4]], ids=lambda plan: plan.schedule)
def test_checkpoints_after_every_batch_are_the_gap(plan: Plan) -> None:
    measured = _with_checkpoints(plan, 1, 0.2)
    found, throughput = _missed(plan, measured)
    assert found.checkpoints == pytest.approx(throughput.measured - throughput.predicted, rel=0.05)
    assert found.checkpoints < -0.1 * throughput.predicted
    rows = {row.kind: row.s_per_batch for row in found.kinds}
    assert rows["checkpoint"].predicted == 0.0
    assert rows["checkpoint"].measured == pytest.approx(0.2 * plan.chunks)
    sentence = why_missed(throughput, found)
    assert "checkpoints -" in sentence and "link +0" in sentence and "Write checkpoints less often." in sentence


def test_an_unsteady_rank_is_named() -> None:
    plan = PLANS[0]
    found, throughput = _missed(plan, simulate(program_of(plan, batches=batches_of(plan)), plan.costs))
    ranks = [
        RankReport(rank=rank, stage=0, replica=0, peak_memory_bytes=1, peak_resident_bytes=1, compute_spread=spread)
        for rank, spread in enumerate((None, 0.05, 0.4, 0.2))
    ]
    assert "steady" not in why_missed(throughput, found, ranks[:2])
    assert "on rank 2 the compute of a batch took 40.0 % longer" in why_missed(throughput, found, ranks)


def test_a_checkpoint_that_one_of_three_replicas_writes_counts() -> None:
    plan = plan_for("1f1b", (6,), 3)
    writing, others = (_with_checkpoints(plan, 1, seconds) for seconds in (0.2, 0.0))
    found, throughput = _missed(plan, replace(writing, lanes=(writing.lanes[0], *others.lanes[1:])))
    assert found.checkpoints == pytest.approx(throughput.measured - throughput.predicted, rel=0.05)
    assert found.checkpoints < -0.1 * throughput.predicted


@pytest.mark.parametrize(("every", "batches", "counts"), [(2, 4, False), (3, 6, False), (1, 2, True), (2, 3, True)])
def test_checkpoints_count_as_far_as_the_median_batch_has_them(every: int, batches: int, counts: bool) -> None:
    """After the last batch there is one, too, but no batch follows that would wait for it."""
    plan, seconds = plan_for("1f1b", (6,), 1), 0.2
    played = simulate(program_of(plan, batches=batches, checkpoint_every=every), plan.costs)
    (lane,) = played.lanes
    written = list(accumulate(seconds * isinstance(each, Checkpoint) for each in lane.instructions))
    start_s = [each_s + late_s for each_s, late_s in zip(lane.start_s, [0.0, *written], strict=False)]
    end_s = [each_s + late_s for each_s, late_s in zip(lane.end_s, written, strict=True)]
    lane = replace(lane, start_s=tuple(start_s), end_s=tuple(end_s))
    found, throughput = _missed(plan, replace(played, lanes=(lane,)))
    assert found.checkpoints == pytest.approx(throughput.measured - throughput.predicted, rel=1e-6, abs=1e-6)
    assert (found.checkpoints < -0.1) is counts


def test_rare_checkpoints_are_not_in_the_median_batch() -> None:
    found, _ = _missed(PLANS[3], _with_checkpoints(PLANS[3], 10, 0.2))
    assert found.checkpoints == 0.0
    assert {row.kind: row.s_per_batch.measured for row in found.kinds}["checkpoint"] > 0
