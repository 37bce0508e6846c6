"""Exchanges beside other work: where they begin, where they are waited for, and what that is worth."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.stage_costs import StageCosts, unit_costs
from pipeplan.errors import ScheduleError
from pipeplan.programs.check import check
from pipeplan.programs.communicate import AmongStages, exchange_among_stages
from pipeplan.programs.footprint import footprints
from pipeplan.programs.instructions import Backward, Forward, ReduceGradients, StartReduce, Update, is_compute
from pipeplan.programs.overlap import overlap_exchanges
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.program import Program
from pipeplan.programs.text import format_stream, parse_instruction, parse_stream
from pipeplan.programs.timeline import throughput_samples_per_s
from pipeplan.schedules.registry import build
from pipeplan.simulation.play import simulate
from pipeplan.simulation.split_backward import split_backward
from tests.schedules import ASP, DATA_PARALLEL, INTERLEAVED, SCHEDULES, V_SHAPED, microbatches_of

COSTS = unit_costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)


def overlapped(
    schedule: str, replicas: tuple[int, ...], microbatches: int, batches: int, *, checkpoint_every: int = 0
) -> Program:
    pipeline = Pipeline(replicas=replicas, microbatches=microbatches, batches=batches)
    return overlap_exchanges(build(schedule, pipeline, checkpoint_every=checkpoint_every))


def streams(program: Program, *, transfers: bool = False) -> list[str]:
    """The streams; sends and receives are left out."""
    kept = (s.instructions for s in program.streams)
    return [format_stream(i for i in stream if transfers or not hasattr(i, "peer")) for stream in kept]


def test_data_parallelism_exchanges_in_the_backward_of_a_batchs_last_microbatch_alone() -> None:
    assert streams(overlapped("data-parallel", (2,), 3, 2)) == [
        "F1 B1 F3 B3 F5 S1 B5 G1 U1 F7@1 B7@1 F9@1 B9@1 F11@1 S2 B11@1 G2 U2",
        "F2 B2 F4 B4 F6 S1 B6 G1 U1 F8@1 B8@1 F10@1 B10@1 F12@1 S2 B12@1 G2 U2",
    ]


def test_2bw_exchanges_beside_the_next_batch_until_the_first_forward_on_the_new_version() -> None:
    first, last, *_ = streams(overlapped("pipedream-2bw", (2, 2), 2, 4))
    assert first == (
        "F1 F3 B1 F5 S1 B3 F7 B5 G1 U1 F9@1 S2 B7 F11@1 B9@1 G2 U2 F13@2 S3 B11@1 F15@2 B13@2 S4 B15@2 G3 U3 G4 U4"
    )
    assert last == (
        "F1 B1 F3 S1 B3 F5 B5 F7 S2 B7 G1 U1 F9@1 B9@1 F11@1 S3 B11@1 G2 U2 F13@2 B13@2 F15@2 S4 B15@2 G3 U3 G4 U4"
    )


def test_checkpoints_move_with_their_updates_and_change_no_other_instruction() -> None:
    written = streams(overlapped("pipedream-2bw", (2,), 2, 4, checkpoint_every=2))
    assert written[0] == (
        "F1 B1 F3 S1 B3 F5 B5 F7 S2 B7 G1 U1 F9@1 B9@1 F11@1 S3 B11@1 G2 U2 C2@1 F13@2 B13@2 F15@2 S4 B15@2 "
        "G3 U3 G4 U4 C4@3"
    )
    without = [" ".join(word for word in stream.split() if word[0] != "C") for stream in written]
    assert without == streams(overlapped("pipedream-2bw", (2,), 2, 4))


def test_receives_for_the_new_version_are_awaited_after_the_update() -> None:
    last = streams(overlapped("pipedream-2bw", (2, 2), 2, 3), transfers=True)[1]
    assert ">B7:0 G1 U1 <F9:0 F9@1" in last


def test_vertical_sync_updates_one_minibatch_later_than_pipedream() -> None:
    assert streams(overlapped("pipedream", (2,), 1, 2))[0] == "F1 S1 B1 G1 U1 F3@1 S2 B3@1 G2 U2"
    assert streams(overlapped("pipedream-vertical-sync", (2, 2), 1, 4))[1] == (
        "F1 S1 B1 F3 S2 B3 G1 U1 F5@1 S3 B5@1 G2 U2 F7@2 S4 B7@2 G3 U3 G4 U4"
    )


def test_a_rank_of_several_stages_exchanges_one_while_it_computes_another() -> None:
    pipeline = Pipeline(replicas=(2,) * 4, microbatches=2, batches=2, chunks=2)
    first = streams(overlap_exchanges(build(INTERLEAVED, pipeline)))[0]
    assert first == (
        "F1 F3 F1.1 F3.1 B1.1 S1.1 B3.1 B1 S1 B3 G1 U1 F5@1 F7@1 G1.1 U1.1 F5.1@1 F7.1@1 B5.1@1 S2.1 B7.1@1 "
        "B5@1 S2 B7@1 G2 U2 G2.1 U2.1"
    )


def test_updates_for_which_stages_meet_stay_where_they_are() -> None:
    made = build("pipedream-2bw", Pipeline(replicas=(2, 2), microbatches=2, batches=2))
    meeting = exchange_among_stages(made, AmongStages(norm=True))
    assert streams(overlap_exchanges(meeting))[1] == "F1 B1 F3 S1 B3 G1 N1 U1 F5 B5 F7 S2 B7 G2 N2 U2"


def test_the_last_separate_weight_gradient_completes_a_set_of_gradients() -> None:
    split = split_backward(build("1f1b", Pipeline(replicas=(2, 2), microbatches=2)), [COSTS] * 2)
    assert streams(overlap_exchanges(split))[:2] == ["F1 F3 I1 W1 I3 S1 W3 G1 U1", "F1 I1 F3 I3 S1 W1,3 G1 U1"]
    zb_h1 = build("zb-h1", Pipeline(replicas=(2, 2), microbatches=2))
    assert streams(overlap_exchanges(zb_h1))[:2] == ["F1 F3 I1 W1 I3 S1 W3 G1 U1", "F1 I1 F3 I3 W1 S1 W3 G1 U1"]


def test_asp_computes_on_the_newest_weights_and_waits_for_no_gradient() -> None:
    assert streams(overlapped(ASP, (3,), 1, 2)) == [
        "F1 S1:0 B1 G1:0 U1 S2:1 S3:2 F4@1 S4:0 B4@1 G2:1 U2 G3:2 U3 G4:0 U4 S5:1 S6:2 G5:1 U5 G6:2 U6",
        "S1:0 F2 S2:1 B2 G1:0 U1 G2:1 U2 S3:2 S4:0 F5@2 S5:1 B5@2 G3:2 U3 G4:0 U4 G5:1 U5 S6:2 G6:2 U6",
        "S1:0 S2:1 F3 S3:2 B3 G1:0 U1 G2:1 U2 G3:2 U3 S4:0 S5:1 F6@3 S6:2 B6@3 G4:0 U4 G5:1 U5 G6:2 U6",
    ]


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("first_batch", [0, 3])
def test_asps_gradients_are_as_many_updates_old_as_there_are_other_replicas(replicas: int, first_batch: int) -> None:
    pipeline = Pipeline(replicas=(replicas,), microbatches=2, batches=3, first_batch=first_batch)
    for stream in build(ASP, pipeline).streams:
        for i in stream.instructions:
            if isinstance(i, Forward | Backward):
                made = pipeline.batch_of(i.microbatch) * replicas + stream.replica + 1
                assert i.version == max(made - replicas, 0)


unsplit = st.builds(
    lambda schedule, depth, width, microbatches, batches, every: build(
        schedule,
        Pipeline(
            replicas=(width,) * (1 if schedule in DATA_PARALLEL else depth * (2 if schedule in V_SHAPED else 1)),
            microbatches=microbatches_of(schedule, depth * microbatches, depth=2 * depth),
            batches=batches,
            chunks=2 if schedule in V_SHAPED else 1,
        ),
        checkpoint_every=every,
    ),
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 5),
    st.integers(0, 2),
)
split = st.builds(
    lambda program, half_way: split_backward(program, [COSTS] * program.pipeline.depth, half_way=half_way),
    unsplit.filter(lambda program: program.schedule.takes_two_bp),
    st.booleans(),
)
programs = unsplit | split


@given(programs)
def test_overlapping_moves_no_work_keeps_the_laws_and_holds_two_sets_of_gradients(program: Program) -> None:
    made = overlap_exchanges(program)
    check(made)
    simulate(made, [COSTS] * program.pipeline.depth)
    for before, after in zip(program.streams, made.streams, strict=True):
        others = [i for i in after.instructions if not isinstance(i, StartReduce)]
        assert sorted(others, key=repr) == sorted(before.instructions, key=repr)
        assert [i for i in others if is_compute(i)] == [i for i in before.instructions if is_compute(i)]
        for part in made.stage_streams(after):
            most = max(h.further_gradients for h in footprints(part.instructions, recompute=False))
            assert most <= (program.pipeline.replicas[0] - 1 if program.schedule.name == ASP else 1)


@given(programs, st.floats(0.0, 20.0), st.floats(0.0, 1.0))
def test_overlapping_exchanges_makes_no_program_longer(program: Program, reduce_s: float, share: float) -> None:
    costs = [replace(COSTS, reduce_s=reduce_s, reduce_tail_s=max(share, 1 - 2 / max(reduce_s, 2)) * reduce_s)]
    depth = program.pipeline.depth
    before, after = (simulate(made, costs * depth) for made in (program, overlap_exchanges(program)))
    assert after.makespan_s <= before.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("text", "law"),
    [
        ("F1 S1 B1 U1 F3@1 S2 B3@1 G2 U2", "U1: its gradients are still exchanged"),
        ("S1 F1 B1 G1 U1 F3@1 S2 B3@1 G2 U2", "S1: no backward follows that completes the gradients"),
        ("F1 S2 B1 G1 U1 F3@1 B3@1 G2 U2", "S2: the exchange before it was for version 0"),
        ("F1 S1 B1 G1 U1 F3@1 S1 B3@1 G2 U2", "S1: the exchange before it was for version 1"),
        ("F1 S1 B1 G1 U1 F3@1 B3@1 G2 U2 S3", "S3: no backward follows that completes the gradients"),
    ],
)
def test_a_broken_law_of_exchanges_is_named(text: str, law: str) -> None:
    program = build("data-parallel", Pipeline(replicas=(2,), microbatches=1, batches=2))
    broken = replace(program.streams[0], instructions=parse_stream(text))
    with pytest.raises(ScheduleError, match=f"rank 0 at {law}"):
        check(replace(program, streams=(broken, *program.streams[1:])))


def costs(**others: float) -> StageCosts:
    return replace(COSTS, **others)  # type: ignore[arg-type]


def ends(program: Program, each: StageCosts, instruction: str) -> list[float]:
    lanes = simulate(program, [each] * program.pipeline.depth).lanes
    return [lane.end_s[lane.instructions.index(parse_instruction(instruction))] for lane in lanes]


def test_what_is_left_of_an_exchange_when_its_backward_has_ended_is_waited_for() -> None:
    """F1 in [0, 1), B1 in [1, 3): of 1.5 s of exchange 0.5 are left, for both replicas; or all of it."""
    program = overlapped("data-parallel", (2,), 1, 1)
    assert ends(program, costs(reduce_s=1.5, reduce_tail_s=0.5), "G1") == [3.5, 3.5]
    assert ends(program, costs(reduce_s=1.5), "G1") == [4.5, 4.5]
    assert ends(build("data-parallel", program.pipeline), costs(reduce_s=1.5, reduce_tail_s=0.5), "G1") == [4.5, 4.5]


def test_beside_p2_at_least_its_share_of_what_the_backward_hides_is_hidden() -> None:
    """F1, I1, W1 of 1 s each: the backward of 2 s would hide 1 of 1.5 s, W1 half of that."""
    program = split_backward(build("1f1b", Pipeline(replicas=(2,), microbatches=1)), [COSTS])
    each = costs(reduce_s=1.5, reduce_tail_s=0.5)
    assert ends(overlap_exchanges(program), each, "G1") == [4.0, 4.0]
    assert ends(program, each, "G1") == [4.5, 4.5]


def test_exchanges_of_one_stage_pass_one_after_the_other() -> None:
    """2BW on one stage of two replicas, a batch of 6 s in [0, 6), [6, 12), ...: an exchange of 10 s begins at 6, the
    next one when that is through.
    """
    program = overlapped("pipedream-2bw", (2,), 2, 3)
    each = costs(reduce_s=10.0)
    assert [ends(program, each, text)[0] for text in ("G1", "G2", "G3")] == [16.0, 26.0, 36.0]


@pytest.mark.parametrize("reduce_s", [0.0, 5.0, 20.0, 24.0, 30.0, 100.0])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_2bw_hides_its_exchange_as_its_closed_form_says_but_for_what_is_in_flight(depth: int, reduce_s: float) -> None:
    """PipeDream-2BW, appendix A.1.1: a microbatch takes max(compute, exchange / m).

    The form leaves out that a stage forwards the first microbatches of the batch after next before the last backwards
    of the next one, as many as it has in flight but one. So much less of a batch is beside the exchange: it is for the
    input stage, which has most in flight, that an exchange as long as a batch is waited for.
    """
    microbatches, step_s = 8, 3.0
    program = overlapped("pipedream-2bw", (2,) * depth, microbatches, 12)
    timeline = simulate(program, [costs(reduce_s=reduce_s)] * depth)
    batch_s = timeline.batch_size / throughput_samples_per_s(timeline)
    closed_form_s = max(microbatches * step_s, reduce_s)
    waits_s = reduce_s + (depth - 1) * step_s if reduce_s else 0.0
    assert batch_s == pytest.approx(max(closed_form_s, waits_s), rel=1e-12)


@pytest.mark.parametrize("reduce_s", [0.0, 0.5, 1.0])
def test_asp_does_not_wait_if_all_gradients_pass_within_a_minibatch(reduce_s: float) -> None:
    """3 replicas of 3 s a minibatch: BSP waits for an exchange a batch, ASP for none."""
    program = overlapped(ASP, (3,), 1, 12)
    timeline = simulate(program, [costs(reduce_s=reduce_s)])
    assert throughput_samples_per_s(timeline) == pytest.approx(3 / 3.0)
    waiting = simulate(overlapped("data-parallel", (3,), 1, 12), [costs(reduce_s=reduce_s)])
    assert throughput_samples_per_s(waiting) == pytest.approx(3 / (3.0 + reduce_s))


def test_asps_versions_are_made_in_one_order_on_all_replicas() -> None:
    for stream in overlapped(ASP, (4,), 1, 5).streams:
        updates = [i.version for i in stream.instructions if isinstance(i, Update)]
        sources = [i.source for i in stream.instructions if isinstance(i, ReduceGradients)]
        assert updates == list(range(1, 21))
        assert sources == [0, 1, 2, 3] * 5
