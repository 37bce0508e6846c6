"""Exchanges among stages: where they stand, that nobody waits for ever, and that the check knows their place."""

from dataclasses import replace

import pytest

from pipeplan.documents.stage_costs import unit_costs
from pipeplan.errors import InvalidInputError, ScheduleError
from pipeplan.programs.check import check
from pipeplan.programs.communicate import AmongStages, exchange_among_stages
from pipeplan.programs.instructions import Backward, ReduceNorm
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.program import Program
from pipeplan.programs.text import format_stream, parse_stream
from pipeplan.schedules.registry import build
from pipeplan.simulation.play import simulate
from tests.schedules import ASP

BOTH = AmongStages(tied=((0, 2), (0, 1, 2)), norm=True)


def program(schedule: str, wanted: AmongStages, *, replicas: int = 1, batches: int = 1) -> Program:
    pipeline = Pipeline(replicas=(replicas,) * 3, microbatches=3, batches=batches)
    return exchange_among_stages(build(schedule, pipeline), wanted)


def test_exchanges_stand_before_the_update_replicas_first_and_the_norm_last() -> None:
    ends = [format_stream(s.instructions[-5:]) for s in program("1f1b", BOTH, replicas=2).streams[:3]]
    assert ends == ["G1 T1:0,1,2 T1:0,2 N1 U1", ">B5:0 G1 T1:0,1,2 N1 U1", "G1 T1:0,1,2 T1:0,2 N1 U1"]


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


def test_stages_whose_exchanges_stand_in_different_orders_are_told_to_hang() -> None:
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
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "pipedream-2bw"])
def test_where_stages_meet_all_have_the_gradients_of_the_same_batches_and_no_others(
    schedule: str, replicas: int
) -> None:
    """So a loss scale may change there, and a norm is that of one batch."""
    made = program(schedule, AmongStages(norm=True), replicas=replicas, batches=4)
    for stream in made.streams:
        through: set[int] = set()
        for instruction in stream.instructions:
            if isinstance(instruction, Backward):
                through.add(made.pipeline.batch_of(instruction.microbatch))
            elif isinstance(instruction, ReduceNorm):
                assert through == set(range(instruction.version))


def test_asp_refuses_what_all_workers_would_have_to_agree_on() -> None:
    made = build(ASP, Pipeline(replicas=(2,), microbatches=1))
    with pytest.raises(InvalidInputError, match="schedule: must update all workers together"):
        exchange_among_stages(made, AmongStages(norm=True))
