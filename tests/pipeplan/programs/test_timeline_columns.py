"""Timelines as columns: what comes back is what went in."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.files import parse
from pipeplan.documents.identity import canonical_json
from pipeplan.errors import InvalidInputError
from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Checkpoint,
    Forward,
    Instruction,
    RecvActivation,
    ReduceGradients,
    ReduceNorm,
    ReduceTied,
    SendGradient,
    StartReduce,
    Update,
)
from pipeplan.programs.timeline import Lane, Timeline
from pipeplan.programs.timeline_columns import TICKS, TimelineColumns, timeline_columns

NUMBERS = st.integers(1, 2000)
CHUNKS = st.integers(0, 3)
INSTRUCTIONS: st.SearchStrategy[Instruction] = st.one_of(
    st.builds(Forward, NUMBERS, st.integers(0, 9), CHUNKS),
    st.builds(Backward, NUMBERS, st.integers(0, 9), CHUNKS),
    st.builds(BackwardInput, NUMBERS),
    st.builds(BackwardWeight, st.lists(NUMBERS, min_size=1, max_size=4).map(tuple), st.integers(0, 9)),
    st.builds(RecvActivation, NUMBERS, st.integers(0, 63), CHUNKS),
    st.builds(SendGradient, NUMBERS, st.integers(0, 63)),
    st.builds(StartReduce, NUMBERS),
    st.builds(ReduceGradients, NUMBERS, CHUNKS, st.one_of(st.none(), st.integers(0, 63))),
    st.builds(ReduceTied, NUMBERS, st.just((0, 3))),
    st.builds(ReduceNorm, NUMBERS),
    st.builds(Update, NUMBERS),
    st.builds(Checkpoint, NUMBERS, st.integers(1, 9)),
)
EVENTS = st.tuples(INSTRUCTIONS, st.floats(0, 1e3), st.floats(0, 1e3), st.integers(0, 2**50))


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Up to three lanes, each with up to twenty events one after the other."""
    lanes = []
    for rank in range(draw(st.integers(1, 3))):
        events = draw(st.lists(EVENTS, max_size=20))
        moments = list(accumulate(time_s for _, wait_s, takes_s, _ in events for time_s in (wait_s, takes_s)))
        lanes.append(
            Lane(
                rank=rank,
                stage=rank,
                replica=0,
                instructions=tuple(event[0] for event in events),
                start_s=tuple(moments[::2]),
                end_s=tuple(moments[1::2]),
                memory_bytes=tuple(event[3] for event in events),
            )
        )
    return Timeline(lanes=tuple(lanes), batch_size=8, batches=2)


@given(timelines())
def test_instructions_and_bytes_come_back_exactly_and_moments_within_half_a_tick(timeline: Timeline) -> None:
    columns = timeline_columns(timeline)
    back = parse(TimelineColumns, canonical_json(columns)).timeline()
    assert (back.batch_size, back.batches) == (8, 2)
    near_s = columns.tick_s * 0.501
    for was, now in zip(timeline.lanes, back.lanes, strict=True):
        assert (now.rank, now.stage, now.replica) == (was.rank, was.stage, was.replica)
        assert now.instructions == was.instructions
        assert now.memory_bytes == was.memory_bytes
        assert now.start_s == pytest.approx(was.start_s, rel=1e-12, abs=near_s)
        assert now.end_s == pytest.approx(was.end_s, rel=1e-12, abs=near_s)


@given(timelines())
def test_the_last_event_ends_with_the_last_tick_and_what_takes_no_time_has_none(timeline: Timeline) -> None:
    columns = timeline_columns(timeline)
    ends = [sum(lane.gaps) + sum(lane.durations) for lane in columns.lanes]
    assert max(ends) in (0, TICKS)
    for was, packed in zip(timeline.lanes, columns.lanes, strict=True):
        for start_s, end_s, duration in zip(was.start_s, was.end_s, packed.durations, strict=True):
            assert duration >= 0
            assert end_s > start_s or duration == 0


def test_columns_of_other_lengths_and_words_that_are_not_there_are_refused() -> None:
    lane = {
        "rank": 0,
        "stage": 0,
        "replica": 0,
        "words": [0],
        "numbers": [1],
        "gaps": [0],
        "durations": [1],
        "held": [0],
    }
    document = {"lanes": [lane], "words": [["F", ""]], "origin_s": 0, "tick_s": 1, "batch_size": 1, "batches": 1}
    assert parse(TimelineColumns, canonical_json(document)).timeline().lanes[0].instructions == (Forward(1),)
    for changed, field in (({"gaps": []}, "gaps"), ({"words": [1]}, "words")):
        with pytest.raises(InvalidInputError, match=field):
            parse(TimelineColumns, canonical_json(document | {"lanes": [lane | changed]}))
