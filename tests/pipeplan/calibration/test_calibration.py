"""Calibration: hidden costs are played into timelines, and what is calibrated from those must be the hidden costs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.calibration.calibrate import calibrate, predicted_samples_per_s
from pipeplan.calibration.fit import StageSeconds, block_factors
from pipeplan.calibration.observed import costs_of
from pipeplan.calibration.samples import MeasuredRun
from pipeplan.documents.calibration import Calibration, Term, apply
from pipeplan.documents.identity import content_id
from pipeplan.documents.profile import DeviceMemory, Model, Profile
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import PlanningProblem
from pipeplan.programs.instructions import Forward, Update
from pipeplan.programs.timeline import throughput_samples_per_s
from tests.pipeplan.builders import profile
from tests.pipeplan.calibration.measured import CELLS, CLUSTER, PROFILE, batches_of, executed, network, plan_for, scaled
from tests.properties import examples

FORWARD, BACKWARD = 1.3, 0.9

ALL = (
    ("naive", (3, 6), 1),
    ("data-parallel", (6,), 2),
    ("gpipe", (2, 4, 6), 1),
    ("1f1b", (3, 6), 1),
    ("1f1b", (1, 5, 6), 1),
    ("pipedream-2bw", (2, 6), 2),
    ("pipedream", (3, 4, 6), 1),
    ("pipedream", (6,), 2),
)


def known(term: Term | None) -> float:
    assert term is not None
    return term.value


HIDDEN = (
    scaled(
        (FORWARD,) * 6,
        (BACKWARD,) * 6,
        update_s_per_byte=2e-6,
        version_s_per_byte=8e-7,
        instruction_s=3e-4,
        exchange_factor=2.5,
    ),
    network(5e5, 3e-4),
)


@pytest.mark.each_case
@pytest.mark.parametrize(("schedule", "stops", "replicas"), ALL)
def test_a_run_gives_back_the_costs_that_made_it(schedule: str, stops: tuple[int, ...], replicas: int) -> None:
    found = calibrate(PROFILE, CLUSTER, [executed(plan_for(schedule, stops, replicas), HIDDEN)])
    if len(stops) > 1:
        assert known(found.instruction_s) == pytest.approx(3e-4, rel=0.01)
        assert found.forward is not None and found.backward is not None
        assert found.forward.values == pytest.approx((FORWARD,) * 6, rel=0.01)
        assert found.backward.values == pytest.approx((BACKWARD,) * 6, rel=0.01)
    assert abs(found.runs[0].error_after) < 0.001 < abs(found.runs[0].error_before)


SIZED = replace(PROFILE, overheads=replace(PROFILE.overheads, message_s_per_byte=5e-7))
"""The profile with a time for each byte of a message: 50 to 250 us here, beside 100 us for any."""

MESSAGES = replace(HIDDEN[0], overheads=replace(HIDDEN[0].overheads, message_s_per_byte=2e-6)), HIDDEN[1]


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
def test_messages_of_several_sizes_show_what_each_byte_takes(schedule: str) -> None:
    """Then plans with other cuts, whose messages have other sizes, are predicted as well."""
    plan = plan_for(schedule, (1, 3, 6), 1, profile=SIZED)
    found = calibrate(SIZED, CLUSTER, [executed(plan, MESSAGES)])
    assert known(found.instruction_s) == pytest.approx(3e-4, rel=0.01)
    assert known(found.message_s_per_byte) == pytest.approx(2e-6, rel=0.01)
    assert found.levels[0].bandwidth_bytes_per_s == pytest.approx(5e5, rel=0.01)
    assert abs(found.runs[0].error_after) < 0.001 < abs(found.runs[0].error_before)
    other = plan_for("1f1b", (2, 5, 6), 1, profile=SIZED)
    measured = throughput_samples_per_s(executed(other, MESSAGES).timeline)
    corrected = predicted_samples_per_s(other, *apply(found, SIZED, CLUSTER), batches=batches_of(other))
    assert corrected == pytest.approx(measured, rel=0.001)


def test_messages_of_one_size_predict_their_own_run() -> None:
    plan = plan_for("1f1b", (3, 6), 1, profile=SIZED)
    found = calibrate(SIZED, CLUSTER, [executed(plan, MESSAGES)])
    assert abs(found.runs[0].error_after) < 0.001 < abs(found.runs[0].error_before)
    message_s = known(found.instruction_s) + 300 * known(found.message_s_per_byte)
    assert message_s == pytest.approx(3e-4 + 300 * 2e-6, rel=0.001)


def test_a_calibration_without_a_time_for_bytes_has_them_in_that_of_an_instruction() -> None:
    """As all have that were made before there was one. One of a single stage has seen no message."""
    found = calibrate(SIZED, CLUSTER, [executed(plan_for("1f1b", (3, 6), 1, profile=SIZED), MESSAGES)])
    older = replace(found, message_s_per_byte=None)
    assert apply(older, SIZED, CLUSTER)[0].overheads.message_s_per_byte == 0.0
    alone = replace(older, runs=(replace(found.runs[0], depth=1),))
    assert apply(alone, SIZED, CLUSTER)[0].overheads.message_s_per_byte == 5e-7


def _split(profile: Profile, back: float, weights: float) -> Profile:
    """The profile with a split backward, whose halves take these multiples of a block's forward."""
    blocks = tuple(
        replace(
            block,
            measurements=tuple(
                replace(m, backward_input_s=back * m.forward_s, backward_weight_s=weights * m.forward_s)
                for m in block.measurements
            ),
        )
        for block in profile.blocks
    )
    return replace(profile, blocks=blocks)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b-interleaved", "zb-v"])
def test_the_stages_of_a_rank_are_told_apart(schedule: str, replicas: int) -> None:
    """Ranks hold two stages each, every block has its own factor, and the halves of a split backward theirs."""
    factors = (1.2, 0.9, 1.4, 0.8)
    back = (1.2, 0.9, 0.9, 1.0)  # of the last one, right after its forward, the mean of the others
    known_by = replace(_split(PROFILE, 1.0, 1.0), blocks=_split(PROFILE, 1.0, 1.0).blocks[:4])
    hidden = scaled((*factors, 1.0, 1.0), (*back, 1.0, 1.0), instruction_s=3e-4)
    truth = replace(_split(hidden, 1.5, 0.5), blocks=_split(hidden, 1.5, 0.5).blocks[:4])
    plan = plan_for(schedule, (1, 2, 3, 4), replicas, chunks=2, profile=known_by)
    found = calibrate(known_by, CLUSTER, [executed(plan, (truth, network(5e5, 3e-4)))])
    assert found.forward is not None
    assert found.forward.values == pytest.approx(factors, rel=0.01)
    if schedule == "zb-v":
        assert found.backward_input is not None and found.backward_weight is not None
        assert found.backward_input.values == pytest.approx([1.5 * each for each in factors], rel=0.01)
        assert found.backward_weight.values == pytest.approx([0.5 * each for each in factors], rel=0.01)
    else:
        assert found.backward is not None
        assert found.backward.values == pytest.approx(back, rel=0.01)
    assert known(found.instruction_s) == pytest.approx(3e-4, rel=0.01)
    assert abs(found.runs[0].error_after) < 0.005 < abs(found.runs[0].error_before)


def test_every_boundary_of_two_ranks_shows_their_link() -> None:
    plan = plan_for("1f1b-interleaved", (1, 2, 3, 6), 1, chunks=2)
    found = calibrate(PROFILE, CLUSTER, [executed(plan, (PROFILE, network(5e5, 3e-4)))])
    assert found.levels[0].observations == 3
    assert found.levels[0].bandwidth_bytes_per_s == pytest.approx(5e5, rel=0.01)
    assert found.levels[0].latency_s == pytest.approx(3e-4, rel=0.01)


def test_all_runs_together_give_back_every_term() -> None:
    shares = {"forward_without_graph": 0.8, "recompute": 0.9, "backward_after_forward": 0.95}
    hidden = (replace(HIDDEN[0], overheads=replace(HIDDEN[0].overheads, **shares)), HIDDEN[1])
    plans = [plan_for(*shape) for shape in ALL if shape[1:] != ((6,), 2)]
    plans += [plan_for("data-parallel", (6,), 2), plan_for("1f1b", (2, 4, 6), 1, recompute=True)]
    found = calibrate(PROFILE, CLUSTER, [executed(plan, hidden) for plan in plans])
    terms = ("forward_without_graph", "recompute", "backward_after_forward", "update_s_per_byte")
    for name in (*terms, "version_s_per_byte", "instruction_s", "exchange_factor"):
        assert known(getattr(found, name)) == pytest.approx(getattr(hidden[0].overheads, name), rel=0.01), name
    level = found.levels[0]
    assert level.bandwidth_bytes_per_s == pytest.approx(5e5, rel=0.01)
    assert level.latency_s == pytest.approx(3e-4, rel=0.01)
    assert known(found.activation_factor) == 1.0


@pytest.mark.parametrize("beside", [(), ("1f1b",)])
def test_runs_by_block_give_back_what_forwards_and_backwards_take(beside: tuple[str, ...]) -> None:
    """A backward runs blocks again in itself: what is left when that is taken away is the backward's own."""
    plans = [plan_for("gpipe", (3, 6), 1, recompute=True, recompute_unit="block")]
    plans += [plan_for(schedule, (3, 6), 1) for schedule in beside]
    found = calibrate(PROFILE, CLUSTER, [executed(plan, HIDDEN) for plan in plans])
    assert found.forward is not None
    assert found.forward.values == pytest.approx((FORWARD,) * 6, rel=0.01)
    assert found.backward is not None
    assert found.backward.values == pytest.approx((BACKWARD,) * 6, rel=0.01)
    assert all(abs(run.error_after) < 0.001 < abs(run.error_before) for run in found.runs)


def test_runs_that_cut_the_model_at_different_places_tell_its_blocks_apart() -> None:
    """Cuts after every block leave one unknown a block; the factors are then each block's own."""
    forward = (1.2, 0.9, 1.1, 1.0, 1.4, 0.8)
    hidden = (scaled(forward, (1.0,) * 6), CLUSTER)
    plans = [plan_for("1f1b", (cut, 6), 1) for cut in range(1, 6)]
    found = calibrate(PROFILE, CLUSTER, [executed(plan, hidden) for plan in plans])
    assert found.forward is not None
    assert found.forward.values == pytest.approx(forward, rel=0.01)


def test_within_a_stage_the_measured_time_is_shared_out_in_proportion() -> None:
    hidden = (scaled((1.5, 1.5, 1.5, 0.7, 0.7, 0.7), (1.0,) * 6), CLUSTER)
    found = calibrate(PROFILE, CLUSTER, [executed(plan_for("1f1b", (3, 6), 1), hidden)])
    assert found.forward is not None
    assert found.forward.values[:3] == pytest.approx((1.5,) * 3, rel=0.05)
    assert found.forward.values[3:] == pytest.approx((0.7,) * 3, rel=0.05)
    stage_s = sum(c.forward_s * f for c, f in zip(CELLS[:3], found.forward.values[:3], strict=True))
    assert stage_s == pytest.approx(1.5 * sum(c.forward_s for c in CELLS[:3]), rel=0.001)


@pytest.mark.parametrize(("schedule", "stops", "replicas"), ALL)
def test_what_gpipe_showed_predicts_other_schedules_cuts_and_widths(
    schedule: str, stops: tuple[int, ...], replicas: int
) -> None:
    hidden = (
        scaled((FORWARD,) * 6, (BACKWARD,) * 6, update_s_per_byte=2e-6, instruction_s=3e-4),
        network(5e5, 3e-4),
    )
    found = calibrate(PROFILE, CLUSTER, [executed(plan_for("gpipe", (2, 4, 6), 1), hidden)])
    other = plan_for(schedule, stops, replicas)
    batches = batches_of(other)
    measured = throughput_samples_per_s(executed(other, hidden).timeline)
    corrected = predicted_samples_per_s(other, *apply(found, PROFILE, CLUSTER), batches=batches)
    plain = predicted_samples_per_s(other, PROFILE, CLUSTER, batches=batches)
    assert corrected == pytest.approx(measured, rel=0.001)
    assert abs(plain / measured - 1) > 0.01


@pytest.mark.parametrize(("schedule", "stops", "replicas"), ALL)
def test_a_run_that_went_as_predicted_corrects_nothing(schedule: str, stops: tuple[int, ...], replicas: int) -> None:
    plan = plan_for(schedule, stops, replicas)
    found = calibrate(PROFILE, CLUSTER, [executed(plan, (PROFILE, CLUSTER))])
    corrected, linked = apply(found, PROFILE, CLUSTER)
    assert found.forward is not None and found.backward is not None
    assert found.forward.values == pytest.approx((1.0,) * 6, rel=1e-6)
    assert found.backward.values == pytest.approx((1.0,) * 6, rel=1e-6)
    for name in ("instruction_s", "update_s_per_byte", "version_s_per_byte", "exchange_factor"):
        assert getattr(corrected.overheads, name) == pytest.approx(getattr(PROFILE.overheads, name), rel=1e-6), name
    assert linked.levels[0].bandwidth_bytes_per_s == pytest.approx(1e6, rel=1e-4)
    assert linked.levels[0].latency_s == pytest.approx(1e-4, rel=1e-4)
    assert found.runs[0].error_before == pytest.approx(0.0, abs=1e-9)


MANY_BUCKETS = replace(
    PROFILE,
    blocks=tuple(replace(block, weight_bytes=30_000_000) for block in PROFILE.blocks),
    overheads=replace(PROFILE.overheads, update_s_per_byte=1e-11),
)


@pytest.mark.parametrize(
    ("schedule", "bandwidth", "shown"),
    [
        ("data-parallel", 4e9, True),
        ("data-parallel", 1e12, True),
        ("pipedream-2bw", 2e8, True),
        ("pipedream-2bw", 1e10, False),
    ],
)
def test_an_exchange_hidden_in_part_shows_how_long_it_takes_and_one_hidden_whole_does_not(
    schedule: str, bandwidth: float, shown: bool
) -> None:
    """Gradients of 180 MB in 6 buckets beside a backward of 150 ms; under 2BW beside a batch of 0.9 s."""
    known_links = network(bandwidth, 1e-4)
    hidden = replace(MANY_BUCKETS, overheads=replace(MANY_BUCKETS.overheads, exchange_factor=2.5))
    plan = replace(plan_for(schedule, (6,), 2), profile_id=content_id(MANY_BUCKETS))
    found = calibrate(MANY_BUCKETS, known_links, [executed(plan, (hidden, known_links))])
    if shown:
        assert known(found.exchange_factor) == pytest.approx(2.5, rel=1e-6)
    else:
        assert found.exchange_factor is None


def test_calibrating_again_with_what_was_calibrated_changes_nothing() -> None:
    """The second calibration starts from the corrected profile, whose predictions the runs already are."""
    plan = plan_for("1f1b", (3, 6), 1)
    run = executed(plan, HIDDEN)
    corrected, linked = apply(calibrate(PROFILE, CLUSTER, [run]), PROFILE, CLUSTER)
    again = calibrate(corrected, linked, [replace(run, plan=replace(plan, profile_id=content_id(corrected)))])
    assert again.forward is not None and again.backward is not None
    assert again.forward.values == pytest.approx((1.0,) * 6, rel=1e-4)
    assert again.backward.values == pytest.approx((1.0,) * 6, rel=1e-4)
    assert known(again.instruction_s) == pytest.approx(corrected.overheads.instruction_s, rel=1e-6)


@examples(10)
@given(order=st.permutations(range(4)))
def test_the_order_of_the_runs_does_not_matter(order: list[int]) -> None:
    runs = [executed(plan_for(*shape), HIDDEN) for shape in ALL[:4]]
    assert calibrate(PROFILE, CLUSTER, [runs[i] for i in order]) == calibrate(PROFILE, CLUSTER, runs)


def test_a_late_start_and_slow_first_batches_are_left_out() -> None:
    plan = plan_for("1f1b", (3, 6), 1)
    run = executed(plan, HIDDEN)
    lanes = []
    for lane in run.timeline.lanes:
        first_update = next(i for i, one in enumerate(lane.instructions) if isinstance(one, Update))
        late_s = 5.0
        starts = [s if i <= first_update else s + late_s for i, s in enumerate(lane.start_s)]
        ends = [e if i < first_update else e + late_s for i, e in enumerate(lane.end_s)]
        lanes.append(replace(lane, start_s=tuple(starts), end_s=tuple(ends)))
    slow = replace(run, timeline=replace(run.timeline, lanes=tuple(lanes)))
    ours, theirs = calibrate(PROFILE, CLUSTER, [slow]), calibrate(PROFILE, CLUSTER, [run])
    assert known(ours.update_s_per_byte) == pytest.approx(known(theirs.update_s_per_byte))
    assert ours.forward is not None and theirs.forward is not None
    assert ours.forward.values == pytest.approx(theirs.forward.values)


def test_forwards_that_other_programs_disturbed_move_no_median() -> None:
    """One worker; every third forward takes three times as long, and all that follows is as much later."""
    plan = plan_for("data-parallel", (6,), 1)
    run = executed(plan, HIDDEN)
    (lane,) = run.timeline.lanes
    starts_s, ends_s, late_s = [], [], 0.0
    for index, (one, start_s, end_s) in enumerate(zip(lane.instructions, lane.start_s, lane.end_s, strict=True)):
        starts_s.append(start_s + late_s)
        late_s += 2 * (end_s - start_s) if isinstance(one, Forward) and index % 3 == 0 else 0.0
        ends_s.append(end_s + late_s)
    slow = replace(
        run, timeline=replace(run.timeline, lanes=(replace(lane, start_s=tuple(starts_s), end_s=tuple(ends_s)),))
    )
    disturbed, quiet = calibrate(PROFILE, CLUSTER, [slow]).forward, calibrate(PROFILE, CLUSTER, [run]).forward
    assert late_s > 0
    assert disturbed is not None and quiet is not None
    assert disturbed.values == pytest.approx(quiet.values, rel=1e-3)


def test_processes_tell_what_they_hold_beside_tensors() -> None:
    run = executed(plan_for("1f1b", (3, 6), 1), HIDDEN)
    resident = tuple(lane.peak_memory_bytes + 10**6 for lane in run.timeline.lanes)
    found = calibrate(PROFILE, CLUSTER, [replace(run, peak_resident_bytes=resident)])
    corrected, linked = apply(found, PROFILE, CLUSTER)
    assert corrected.device.context_bytes == linked.device.context_bytes == 10**6


def test_a_gpu_tells_what_lies_beside_its_allocator_and_the_host_nothing_of_it() -> None:
    run = executed(plan_for("1f1b", (3, 6), 1), HIDDEN)
    lanes = run.timeline.lanes
    on_gpus = replace(
        run,
        peak_resident_bytes=(3 * 2**30,) * len(lanes),
        device_memory=tuple(
            DeviceMemory(
                allocated_bytes=lane.peak_memory_bytes,
                reserved_bytes=lane.peak_memory_bytes * 5 // 4,
                context_bytes=500_000,
            )
            for lane in lanes
        ),
    )
    found = calibrate(PROFILE, CLUSTER, [on_gpus])
    _, linked = apply(found, PROFILE, CLUSTER)
    assert linked.device.context_bytes == 500_000
    assert linked.device.allocator_reserve == pytest.approx(0.2, rel=1e-3)


def test_larger_activations_than_profiled_are_seen() -> None:
    plan = plan_for("1f1b", (3, 6), 1)
    blocks = tuple(
        replace(b, measurements=tuple(replace(m, activation_bytes=6000) for m in b.measurements))
        for b in PROFILE.blocks
    )
    found = calibrate(PROFILE, CLUSTER, [executed(plan, (replace(PROFILE, blocks=blocks), CLUSTER))])
    assert known(found.activation_factor) == pytest.approx(1.2)
    assert apply(found, PROFILE, CLUSTER)[0].blocks[0].at(1).activation_bytes == 6000


class TestRefusals:
    RUN = executed(plan_for("1f1b", (3, 6), 1), HIDDEN)

    def refused(self, run: MeasuredRun) -> InvalidInputError:
        with pytest.raises(InvalidInputError) as refused:
            calibrate(PROFILE, CLUSTER, [self.RUN, run])
        return refused.value

    def test_a_run_of_another_model_is_refused(self) -> None:
        error = self.refused(replace(self.RUN, plan=replace(self.RUN.plan, model=Model(name="other"))))
        assert (error.field, error.value) == ("runs.1.plan.model", "other")

    def test_a_run_in_another_dtype_is_refused(self) -> None:
        error = self.refused(replace(self.RUN, plan=replace(self.RUN.plan, dtype="float64")))
        assert error.field == "runs.1.plan.dtype"

    def test_a_run_of_a_plan_from_another_profile_is_refused(self) -> None:
        error = self.refused(replace(self.RUN, plan=replace(self.RUN.plan, profile_id="0" * 32)))
        assert error.field == "runs.1.plan.profile_id"

    def test_a_calibration_without_runs_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match="runs: must be at least one"):
            calibrate(PROFILE, CLUSTER, [])

    def test_a_timeline_that_lacks_a_worker_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match=r"timeline\.lanes"):
            replace(self.RUN, timeline=replace(self.RUN.timeline, lanes=self.RUN.timeline.lanes[:1]))

    def test_a_timeline_without_an_update_is_refused(self) -> None:
        lanes = tuple(
            replace(
                lane,
                instructions=lane.instructions[:3],
                start_s=lane.start_s[:3],
                end_s=lane.end_s[:3],
                memory_bytes=lane.memory_bytes[:3],
            )
            for lane in self.RUN.timeline.lanes
        )
        with pytest.raises(InvalidInputError, match="must hold an update"):
            replace(self.RUN, timeline=replace(self.RUN.timeline, lanes=lanes))

    @pytest.mark.parametrize(
        ("changed", "field"),
        [
            (replace(PROFILE, model=Model(name="other")), "calibration.model"),
            (replace(PROFILE, device=replace(PROFILE.device, name="other")), "calibration.device"),
            (replace(PROFILE, dtype="bfloat16"), "calibration.dtype"),
            (replace(PROFILE, blocks=PROFILE.blocks[:5]), "calibration.blocks"),
        ],
    )
    def test_a_problem_with_the_calibration_of_another_profile_is_refused(self, changed: Profile, field: str) -> None:
        found = calibrate(PROFILE, CLUSTER, [self.RUN])
        with pytest.raises(InvalidInputError) as refused:
            PlanningProblem(profile=changed, cluster=CLUSTER, batch_size=4, calibration=found)
        assert refused.value.field == field


def test_absurd_profiles_and_timelines_give_an_answer() -> None:
    """Nothing takes any time: no factor can be known, and none is invented."""
    cells = [replace(cell, forward_s=0.0, backward_s=0.0, weight_bytes=0, output_bytes=0) for cell in CELLS]
    idle = profile(cells)
    plan = replace(
        plan_for("1f1b", (3, 6), 1),
        profile_id=content_id(idle),
        costs=costs_of(plan_for("1f1b", (3, 6), 1), idle, CLUSTER),
    )
    run = executed(plan, HIDDEN)
    found = calibrate(idle, CLUSTER, [run])
    assert (found.forward, found.backward, found.update_s_per_byte) == (None, None, None)


def test_a_run_whose_batches_took_no_time_is_refused() -> None:
    plan = plan_for("naive", (3, 6), 1)
    run = executed(plan, HIDDEN)
    still = tuple(
        replace(lane, start_s=(0.0,) * len(lane.start_s), end_s=(0.0,) * len(lane.end_s)) for lane in run.timeline.lanes
    )
    with pytest.raises(InvalidInputError, match="timeline: must be such that a batch takes some time"):
        calibrate(PROFILE, CLUSTER, [replace(run, timeline=replace(run.timeline, lanes=still))])


def test_a_hundred_thousand_blocks_are_fitted() -> None:
    half = 50_000
    stages = [
        StageSeconds(
            blocks=tuple(range(start, start + half)), profile_s=(1e-6,) * half, measured_s=s, relative_spread=0.0
        )
        for start, s in ((0, 0.06), (half, 0.05))
    ]
    factors = block_factors(stages, 2 * half)
    assert sum(factors[:half]) * 1e-6 == pytest.approx(0.06, rel=1e-3)
    assert sum(factors[half:]) * 1e-6 == pytest.approx(0.05, rel=1e-3)


def test_a_calibration_is_addressed_by_its_content() -> None:
    first, second = (calibrate(PROFILE, CLUSTER, [TestRefusals.RUN]) for _ in range(2))
    assert content_id(first) == content_id(second)
    assert isinstance(first, Calibration)


def test_fast_messages_do_not_speed_up_exchanges_that_were_not_measured() -> None:
    found = calibrate(PROFILE, CLUSTER, [executed(plan_for("1f1b", (2, 4, 6), 1), (PROFILE, network(3e6, 1e-4)))])
    before = costs_of(plan_for("data-parallel", (6,), 2), PROFILE, CLUSTER)[0]
    after = costs_of(plan_for("data-parallel", (6,), 2), *apply(found, PROFILE, CLUSTER))[0]
    assert found.levels[0].bandwidth_bytes_per_s > 2e6
    assert after.reduce_s == pytest.approx(before.reduce_s, rel=0.02)
