"""The text form of instructions parses back, and nothing else is taken for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.files import dump, parse
from pipeplan.errors import InvalidInputError
from pipeplan.programs import instructions as kinds
from pipeplan.programs.instructions import BackwardWeight, Checkpoint, Instruction
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.text import format_instruction, format_stream, parse_instruction, parse_stream
from pipeplan.programs.timeline_document import TimelineDocument, timeline_document
from pipeplan.schedules.registry import build
from pipeplan.simulation.play import simulate
from tests.pipeplan.builders import equal_thirds

numbers = st.integers(0, 10**6)
on_version = [kinds.Forward, kinds.Recompute, kinds.Backward, kinds.BackwardInput]
transfers = [kinds.SendActivation, kinds.RecvActivation, kinds.SendGradient, kinds.RecvGradient]
any_instruction: st.SearchStrategy[Instruction] = st.one_of(
    *(st.builds(kind, numbers, numbers, numbers) for kind in (*on_version, *transfers)),
    st.builds(BackwardWeight, st.lists(numbers, min_size=1, max_size=4).map(tuple), numbers, numbers),
    st.builds(kinds.StartReduce, numbers, numbers, st.none() | numbers),
    st.builds(kinds.ReduceGradients, numbers, numbers, st.none() | numbers),
    st.builds(kinds.ReduceNorm, numbers),
    st.builds(kinds.ReduceTied, numbers, st.lists(numbers, min_size=1, max_size=4).map(tuple)),
    st.builds(kinds.Update, numbers, numbers),
    st.builds(Checkpoint, numbers, numbers, numbers),
)


@given(st.lists(any_instruction, max_size=12))
def test_a_streams_text_parses_back_to_the_stream(stream: list[Instruction]) -> None:
    assert parse_stream(format_stream(stream)) == tuple(stream)


@given(st.text(max_size=12))
def test_any_text_is_an_instruction_or_an_error_of_ours(text: str) -> None:
    try:
        instruction = parse_instruction(text)
    except InvalidInputError as error:
        assert "must be an instruction's text form" in str(error)
    else:
        assert parse_instruction(format_instruction(instruction)) == instruction


def test_a_chunk_is_written_after_the_microbatch() -> None:
    texts: dict[str, Instruction] = {
        "F3.1@2": kinds.Forward(3, 2, 1),
        "W3,4.2": BackwardWeight((3, 4), 0, 2),
        ">F3.1:0": kinds.SendActivation(3, 0, 1),
        "U2.1": kinds.Update(2, 1),
        "C2.1@1": Checkpoint(2, 1, 1),
        "F3": kinds.Forward(3),
    }
    assert {text: parse_instruction(text) for text in texts} == texts
    assert [format_instruction(instruction) for instruction in texts.values()] == list(texts)


NO_INSTRUCTIONS = (
    *("", "F", "f1", "F1:2", ">F1", "W1:2", "F1,2", "U1@2", "G1@2", "U1:2", "S1,2", "F-1", "F1@", "X1", "F1."),
    *("T1", "T1@2", "F1@1,2", "N1:0", "N1.1", "T1.1:0"),
)


@pytest.mark.parametrize("text", NO_INSTRUCTIONS)
def test_what_is_not_an_instruction_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_instruction(text)


@given(
    st.sampled_from(["naive", "gpipe", "1f1b", "pipedream", "pipedream-2bw"]),
    st.integers(1, 4),
    st.integers(1, 2),
)
def test_a_timelines_document_parses_back_to_the_timeline(schedule: str, stages: int, width: int) -> None:
    program = build(schedule, Pipeline(replicas=(width,) * stages, microbatches=4))
    timeline = simulate(program, [equal_thirds()] * stages)
    assert parse(TimelineDocument, dump(timeline_document(timeline))).timeline() == timeline
