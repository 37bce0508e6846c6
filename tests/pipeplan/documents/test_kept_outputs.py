"""The parts of a block's output that are among its activations, and that are its input passed on."""

from dataclasses import replace

import pytest

from pipeplan.documents.identity import canonical_json, content_id
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError
from tests.pipeplan.builders import Cell, profile

KEPT = Cell(activation_bytes=9, output_bytes=5, kept_output_bytes=5)


def test_it_is_a_part_of_both() -> None:
    for cell in (replace(KEPT, output_bytes=4), replace(KEPT, activation_bytes=4)):
        with pytest.raises(
            InvalidInputError, match=r"kept_output_bytes: must be at most output_bytes and activation_byt"
        ):
            profile([cell])


@pytest.mark.parametrize(
    ("cell", "field"), [(KEPT, "kept_output_bytes"), (Cell(output_bytes=1, passed_bytes=1), "passed_bytes")]
)
def test_a_graph_says_nothing_of_it(cell: Cell, field: str) -> None:
    alone = profile([cell, Cell()], input_bytes=1)
    with pytest.raises(InvalidInputError, match=rf"blocks\.0\.measurements\.{field}: must be left out in a gra"):
        replace(alone, edges=((0, 1),))


def test_it_lies_between_those_of_the_sizes_that_were_measured() -> None:
    between = profile([KEPT], sizes=(1, 4)).at(2)
    assert [(block.output_bytes, block.kept_output_bytes) for block in between] == [(10, 10)]


def test_a_profile_without_it_has_the_id_that_it_always_had() -> None:
    def of(kept: int) -> Profile:
        return profile([replace(KEPT, kept_output_bytes=kept)])

    assert content_id(of(0)) != content_id(of(5))
    assert "kept_output_bytes" not in canonical_json(of(0))


def test_what_is_passed_on_is_a_part_of_input_and_output() -> None:
    (block,) = profile([Cell(output_bytes=5)], input_bytes=3).at(1)
    with pytest.raises(InvalidInputError, match=r"passed_bytes: must be at most input_bytes and output_bytes, 3, of b"):
        replace(block, passed_bytes=4)
    passing = profile([Cell(output_bytes=5, passed_bytes=3)], sizes=(1, 4), input_bytes=3)
    assert [each.passed_bytes for each in passing.at(2)] == [6]
    assert content_id(passing) != content_id(profile([Cell(output_bytes=5)], sizes=(1, 4), input_bytes=3))
    assert "passed_bytes" not in canonical_json(profile([Cell(output_bytes=5)]))
