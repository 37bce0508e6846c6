"""Exchanges among stages: where they stand, that nobody waits for ever, and that the check knows their place."""

from dataclasses import replace
from itertools import product

import pytest

from pipeplan.documents.stage_costs import unit_costs
from pipeplan.errors import InvalidInputError, ScheduleError
from pipeplan.programs.check import check
from pipeplan.programs.communicate import AmongStages, exchange_among_stages
from pipeplan.programs.instructions import Backward, BackwardWeight, ReduceNorm, ReduceTied, microbatches_of
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.program import Program
from pipeplan.programs.text import format_stream, parse_stream
from pipeplan.schedules.registry import build
from pipeplan.simulation.play import simulate
from tests.schedules import ASP, CHUNKED, INTERLEAVED

BOTH = AmongStages(tied=((0, 2), (0, 1, 2)), norm=True)


def program(schedule: str, wanted: AmongStages, *, replicas: int = 1, batches: int = 1) -> Program:
    pipeline = Pipeline(replicas=(replicas,) * 3, microbatches=3, batches=batches)
    return exchange_among_stages(build(schedule, pipeline), wanted)


def test_exchanges_stand_before_the_update_replicas_first_and_the_norm_last() -> None:
    ends = [format_stream(s.instructions[-5:]) for s in program("1f1b", BOTH, replicas=2).streams[:3]]
    assert ends == ["G1 T1:0,1,2 T1:0,2 N1 U1", ">B5:0 G1 T1:0,1,2 N1 U1", "G1 T1:0,1,2 T1:0,2 N1 U1"]


def chunked(schedule: str, wanted: AmongStages, *, replicas: int = 1, batches: int = 1) -> Program:
    """2 ranks a pipeline, each with 2 of the 4 stages."""
    pipeline = Pipeline(replicas=(replicas,) * 4, microbatches=4, batches=batches, chunks=2)
    return exchange_among_stages(build(schedule, pipeline), wanted)


@pytest.mark.parametrize(
    ("schedule", "first", "second"),
    [
        (INTERLEAVED, "<B7:1 B7 G1 G1.1 T1:0,2,3 T1:1,2 N1 U1 U1.1", "B7 >B7:0 G1 G1.1 T1:0,2,3 T1:1,2 N1 U1 U1.1"),
        ("zb-v", "<B7:1 I7 W7 G1 G1.1 T1:0,2,3 N1 U1 U1.1", "W7.1 W7 G1 G1.1 T1:0,2,3 T1:1,2 N1 U1 U1.1"),
    ],
)
def test_a_rank_meets_once_for_all_of_its_stages(schedule: str, first: str, second: str) -> None:
    """In a V the second rank alone has stages 1 and 2."""
    wanted = AmongStages(tied=((1, 2), (0, 2, 3)), norm=True)
    streams = chunked(schedule, wanted, replicas=2).streams[:2]
    for stream, expected in zip(streams, (first, second), strict=True):
        assert format_stream(stream.instructions).endswith(expected)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", sorted(CHUNKED))
def test_ranks_of_several_stages_meet_at_the_same_moments(schedule: str, replicas: int) -> None:
    made = chunked(schedule, AmongStages(tied=((0, 3), (0, 1, 2)), norm=True), replicas=replicas, batches=3)
    check(made)
    costs = unit_costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    lanes = simulate(made, [costs] * 4).lanes
    moments = {
        tuple(event.end_s for event in lane.events() if isinstance(event.instruction, ReduceNorm)) for lane in lanes
    }
    assert len(lanes) == 2 * replicas and len(moments) == 1 and len(*moments) == 3


def test_stages_of_one_rank_share_weights_without_waiting_for_anybody() -> None:
    """In a V of two ranks the first and the last stage are on one of them, the others on the other."""
    costs = replace(unit_costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0), latency_s=0.25)
    timeline = simulate(chunked("zb-v", AmongStages(tied=((0, 3), (0, 1)))), [costs] * 4)
    took = {
        (lane.rank, event.instruction): event.end_s - event.start_s
        for lane in timeline.lanes
        for event in lane.events()
        if isinstance(event.instruction, ReduceTied)
    }
    assert took[0, ReduceTied(1, (0, 3))] == 0.0
    assert min(took[rank, ReduceTied(1, (0, 1))] for rank in (0, 1)) == 0.25
    assert (1, ReduceTied(1, (0, 3))) not in took


@pytest.mark.parametrize(
    ("before", "after", "law"),
    [
        ("N1 U1 U1.1", "U1.1 N1 U1", "rank 0 at N1: chunk 1 of this rank has its update already"),
        ("W4 N1", "N1 W4", "rank 0 at W4: its rank has met the other stages for the next update already"),
    ],
)
def test_the_check_refuses_to_meet_before_the_gradients_or_after_an_update(before: str, after: str, law: str) -> None:
    made = chunked("zb-v", AmongStages(norm=True))
    text = format_stream(made.streams[0].instructions)
    wrong = replace(made.streams[0], instructions=parse_stream(text.replace(before, after)))
    assert before in text
    with pytest.raises(ScheduleError, match=law):
        check(replace(made, streams=(wrong, *made.streams[1:])))


def test_a_schedule_that_computes_between_the_updates_of_a_rank_is_refused() -> None:
    made = build(INTERLEAVED, Pipeline(replicas=(1,) * 4, microbatches=2, chunks=2))
    text = format_stream(made.streams[0].instructions)
    early = replace(made.streams[0], instructions=parse_stream(text.replace(" U1.1", "").replace("B2 ", "U1.1 B2 ")))
    with pytest.raises(InvalidInputError, match="schedule: must update all stages of a rank in a row to clip"):
        exchange_among_stages(replace(made, streams=(early, *made.streams[1:])), AmongStages(norm=True))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "pipedream-2bw"])
def test_every_schedule_of_equal_batches_plays_to_its_end(schedule: str, replicas: int) -> None:
    made = program(schedule, BOTH, replicas=replicas, batches=4)
    check(made)
    costs = unit_costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    timeline = simulate(made, [costs] * 3)
    ends = {
        lane.rank: [event.end_s for event in lane.events() if isinstance(event.instruction, ReduceNorm)]
        for lane in timeline.lanes
    }
    assert len({tuple(moments) for moments in ends.values()}) == 1
    assert len(ends[0]) == 4


def test_an_exchange_ends_one_latency_after_the_last_stage_has_come() -> None:
    costs = unit_costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    timeline = simulate(program("gpipe", AmongStages(norm=True)), [replace(costs, latency_s=0.25)] * 3)
    first, *others = timeline.lanes
    assert [lane.end_s[-1] for lane in others] == [first.end_s[-1]] * 2
    assert first.end_s[-1] == first.end_s[-3] + 0.25  # after its last backward


def test_exchanges_in_different_orders_on_two_stages_are_refused_as_a_deadlock() -> None:
    made = program("1f1b", BOTH)
    last = made.streams[2]
    crossed = replace(
        last, instructions=parse_stream(format_stream(last.instructions).replace("T1:0,1,2 T1:0,2", "T1:0,2 T1:0,1,2"))
    )
    costs = unit_costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits at T1:0,1,2"):
        simulate(replace(made, streams=(*made.streams[:2], crossed)), [costs] * 3)


def test_the_check_refuses_an_exchange_for_another_version() -> None:
    made = program("1f1b", AmongStages(norm=True))
    wrong = replace(
        made.streams[0], instructions=parse_stream(format_stream(made.streams[0].instructions).replace("N1", "N2"))
    )
    with pytest.raises(ScheduleError, match="rank 0 at N2: the newest version is 0"):
        check(replace(made, streams=(wrong, *made.streams[1:])))


@pytest.mark.parametrize("wanted", [AmongStages(norm=True), AmongStages(tied=((0, 2),))])
def test_pipedream_is_refused_and_left_alone_where_nothing_is_wanted(wanted: AmongStages) -> None:
    pipeline = Pipeline(replicas=(1, 1, 1), microbatches=1)
    made = build("pipedream", pipeline)
    assert exchange_among_stages(made, AmongStages()) is made
    with pytest.raises(InvalidInputError, match="schedule: must update all stages with the same batch"):
        exchange_among_stages(made, wanted)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "pipedream-2bw", *sorted(CHUNKED)])
def test_where_stages_meet_all_have_the_gradients_of_the_same_batches_and_no_others(
    schedule: str, replicas: int
) -> None:
    """So a loss scale may change there, and a norm is that of one batch."""
    make = chunked if schedule in CHUNKED else program
    made = make(schedule, AmongStages(norm=True), replicas=replicas, batches=4)
    for stream in made.streams:
        through: set[tuple[int, int]] = set()
        for instruction in stream.instructions:
            if isinstance(instruction, Backward | BackwardWeight):
                through |= {(instruction.chunk, made.pipeline.batch_of(k)) for k in microbatches_of(instruction)}
            elif isinstance(instruction, ReduceNorm):
                assert through == set(product(range(made.pipeline.chunks), range(instruction.version)))


def test_asp_refuses_what_all_workers_would_have_to_agree_on() -> None:
    made = build(ASP, Pipeline(replicas=(2,), microbatches=1))
    with pytest.raises(InvalidInputError, match="schedule: must update all workers together"):
        exchange_among_stages(made, AmongStages(norm=True))
