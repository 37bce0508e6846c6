"""Reasons: sizes in the units in which all memory is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.formats import size
from pipeplan.planners.reasons import readable


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 * 2**29, "1.5 GiB"), (2**70, "1024 EiB")],
)
def test_sizes_have_the_largest_unit_below_them(size_bytes: int, text: str) -> None:
    assert readable(size_bytes) == text


@given(st.integers(1024, 2**50 - 1))
def test_a_reason_and_the_row_beside_it_have_one_unit(size_bytes: int) -> None:
    assert readable(size_bytes).split()[1] == size(size_bytes).split()[1]
