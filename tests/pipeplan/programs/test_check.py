"""The check refuses programs that break a law, and the simulator those that hang."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.errors import ScheduleError
from pipeplan.programs.check import check
from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    Compute,
    Forward,
    Instruction,
    RecvActivation,
    SendActivation,
    Update,
)
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.program import Program
from pipeplan.programs.text import parse_stream
from pipeplan.schedules.registry import build
from pipeplan.simulation.play import simulate
from tests.pipeplan.builders import equal_thirds
from tests.schedules import DATA_PARALLEL, INTERLEAVED, SCHEDULES, chunks_of, microbatches_of

Change = Callable[[list[Instruction], int], None]


def changed(program: Program, rank: int, instructions: Sequence[Instruction]) -> Program:
    streams = list(program.streams)
    streams[rank] = replace(streams[rank], instructions=tuple(instructions))
    return replace(program, streams=tuple(streams))


def drop(stream: list[Instruction], at: int) -> None:
    del stream[at]


def duplicate(stream: list[Instruction], at: int) -> None:
    stream.insert(at, stream[at])


def newer(stream: list[Instruction], at: int) -> None:
    """Makes it compute on the next version."""
    instruction = stream[at]
    assert isinstance(instruction, Forward | Backward | BackwardInput)
    stream[at] = replace(instruction, version=instruction.version + 1)


programs = st.builds(
    lambda schedule, stages, batches: build(
        schedule,
        Pipeline(
            replicas=(1,) * (stages * chunks_of(schedule)),
            microbatches=max(stages, microbatches_of(schedule, stages, depth=stages * chunks_of(schedule))),
            batches=batches,
            chunks=chunks_of(schedule),
        ),
    ),
    st.sampled_from(sorted(set(SCHEDULES) - DATA_PARALLEL - {INTERLEAVED})),
    st.integers(1, 4),
    st.integers(1, 4),
)


@given(programs, st.sampled_from([drop, duplicate, newer]), st.data())
def test_dropped_doubled_and_misversioned_compute_is_refused(
    program: Program, change: Change, data: st.DataObject
) -> None:
    check(program)
    rank = data.draw(st.integers(0, len(program.streams) - 1))
    stream = list(program.streams[rank].instructions)
    at = data.draw(
        st.sampled_from([i for i, x in enumerate(stream) if isinstance(x, Forward | Backward | BackwardInput)])
    )
    change(stream, at)
    with pytest.raises(ScheduleError, match=f"rank {rank} "):
        check(changed(program, rank, stream))


@given(programs, st.data())
def test_a_backward_moved_before_its_forward_is_refused(program: Program, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(program.streams) - 1))
    stream = list(program.streams[rank].instructions)
    at = data.draw(st.sampled_from([i for i, x in enumerate(stream) if isinstance(x, Backward | BackwardInput)]))
    backward = stream[at]
    assert isinstance(backward, Backward | BackwardInput)
    forward = stream.index(Forward(backward.microbatch, backward.version, backward.chunk))
    stream[at], stream[forward] = stream[forward], stream[at]
    with pytest.raises(ScheduleError, match=r"backward before forward|second time|newest version"):
        check(changed(program, rank, stream))


@given(programs, st.data())
def test_a_dropped_or_doubled_update_is_refused(program: Program, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(program.streams) - 1))
    stream = list(program.streams[rank].instructions)
    updates = [i for i, x in enumerate(stream) if isinstance(x, Update)]
    change = data.draw(st.sampled_from([drop, duplicate]))
    change(stream, data.draw(st.sampled_from(updates)))
    with pytest.raises(ScheduleError):
        check(changed(program, rank, stream))


@pytest.mark.parametrize(
    ("text", "law"),
    [
        ("F1 F2 B1 U1 B2", "microbatches \\[2\\] are in flight"),
        ("F1 B1 F2 B2@1 U1", "the newest version is 0"),
        ("F1 B1 F2 U2 B2", "U2: the newest version is 0"),
        ("F1 B1 U1", "never computes the forward of \\[2\\]"),
        ("F1 I1 F2 B2 U1", "never computes the backward of the weights of \\[1\\]"),
        ("F1 B1 F2 B2 F3 B3 U1", "F3: forward of a microbatch that is not its own"),
        ("F1 B1 F2 B2 U1 C2", "C2: the newest version is 1"),
    ],
)
def test_a_broken_law_is_named_with_rank_and_instruction(text: str, law: str) -> None:
    program = build("1f1b", Pipeline(replicas=(1,), microbatches=2))
    with pytest.raises(ScheduleError, match=law):
        check(changed(program, 0, list(parse_stream(text))))


@given(programs, st.integers(1, 3))
def test_a_program_that_goes_on_from_a_later_batch_passes(program: Program, first_batch: int) -> None:
    check(build(program.schedule, replace(program.pipeline, first_batch=first_batch)))


def test_an_older_version_than_the_schedule_allows_is_refused() -> None:
    program = build("pipedream-2bw", Pipeline(replicas=(1,), microbatches=1, batches=4))
    stale = parse_stream("F1 B1 U1 F2 B2 U2 F3 B3 U3 F4@2 B4@2 U4")
    with pytest.raises(ScheduleError, match="F3: the newest version is 2, at most 1 older is allowed"):
        check(changed(program, 0, list(stale)))


def test_a_law_that_one_chunk_of_a_rank_breaks_is_named() -> None:
    program = build("1f1b-interleaved", Pipeline(replicas=(1,) * 4, microbatches=2, chunks=2))
    stream = [i for i in program.streams[1].instructions if i != Backward(2, 0, 1)]
    with pytest.raises(ScheduleError, match="rank 1 never computes the backward of \\[2\\]"):
        check(changed(program, 1, stream))


@pytest.mark.parametrize(
    ("first", "second", "law"),
    [
        (Forward(2), Forward(2, 0, 1), "rank 1 at F2.1: forward before that of stage 1 on the same rank"),
        (BackwardInput(1, 0, 1), BackwardInput(1), "rank 1 at I1: backward before that of stage 2 on the same rank"),
    ],
)
def test_a_rank_must_pass_a_microbatch_through_its_stages_in_order(
    first: Instruction, second: Instruction, law: str
) -> None:
    """Of 2 ranks in a V rank 1 has the stages 1 and 2: nothing that is sent holds their order."""
    program = build("zb-v", Pipeline(replicas=(1,) * 4, microbatches=3, chunks=2))
    stream = list(program.streams[1].instructions)
    earlier, later = stream.index(first), stream.index(second)
    stream[earlier], stream[later] = stream[later], stream[earlier]
    with pytest.raises(ScheduleError, match=law):
        check(changed(program, 1, stream))


def test_vertical_sync_that_a_stage_does_not_keep_is_refused() -> None:
    """Weight stashing alone is what breaks it: every stage on the newest version that it has itself."""
    pipeline = Pipeline(replicas=(1, 1), microbatches=1, batches=4)
    stashing = build("pipedream", pipeline).streams
    law = "rank 1 at F2@1: the input stage's version of this microbatch holds 0 minibatches, this one 1"
    with pytest.raises(ScheduleError, match=law):
        check(replace(build("pipedream-vertical-sync", pipeline), streams=stashing))


def test_a_deadlock_is_named_by_rank_and_instruction() -> None:
    program = build("1f1b", Pipeline(replicas=(1, 1), microbatches=1))
    stream = [i for i in program.streams[0].instructions if not isinstance(i, SendActivation)]
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits at <B1:1; rank 1 waits at <F1:0"):
        simulate(changed(program, 0, stream), [equal_thirds()] * 2)


def test_a_tensor_that_nobody_receives_is_named() -> None:
    program = build("1f1b", Pipeline(replicas=(1, 1), microbatches=1))
    stream = [i for i in program.streams[1].instructions if not isinstance(i, RecvActivation)]
    with pytest.raises(ScheduleError, match="rank 0 sends microbatch 1 to rank 1, which never receives it"):
        simulate(changed(program, 1, stream), [equal_thirds()] * 2)


def test_receives_in_another_order_than_the_sends_are_named() -> None:
    program = build("gpipe", Pipeline(replicas=(1, 1), microbatches=2))
    stream = list(program.streams[1].instructions)
    stream[0], stream[2] = stream[2], stream[0]
    with pytest.raises(ScheduleError, match="rank 1 waits for microbatch 2 from rank 0, which sends 1 first"):
        simulate(changed(program, 1, stream), [equal_thirds()] * 2)


def test_instructions_of_different_kinds_are_never_equal() -> None:
    """NamedTuples would be: `Forward(1, 0) == Backward(1, 0)`."""
    forward: Compute = Forward(1)
    backward: Compute = Backward(1)
    assert forward != backward
