"""What is left of a gradient exchange when the backward that it overlaps with has ended."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.costs.collectives import BUCKET_BYTES, FIRST_BUCKET_BYTES, outlasting_s

LARGE = 2 * BUCKET_BYTES


def test_blocks_that_are_through_first_are_exchanged_beside_the_others() -> None:
    """Backward, from the last block to the first, 1 s each; 1 s of exchange a block: [1, 2), [2, 3), [3, 4)."""
    assert outlasting_s([(1.0, LARGE)] * 3, 1.0 / LARGE) == pytest.approx(1.0)


def test_a_slow_exchange_outlasts_the_backward_by_what_does_not_fit_in_it() -> None:
    """5 s a block: the first can begin at 1 s, so that 15 s end at 16, 13 after the backward."""
    assert outlasting_s([(1.0, LARGE)] * 3, 5.0 / LARGE) == pytest.approx(13.0)


def test_gradients_of_late_blocks_leave_early_and_those_of_early_blocks_are_waited_for() -> None:
    """As VGG's, and as an embedding: 2 s of exchange beside 3 s of backward."""
    blocks = [(1.0, 0.0), (1.0, 0.0), (1.0, float(LARGE))]
    assert outlasting_s(blocks, 2.0 / LARGE) == pytest.approx(0.0)
    assert outlasting_s(blocks[::-1], 2.0 / LARGE) == pytest.approx(2.0)


def test_small_blocks_wait_for_each_other_in_a_bucket() -> None:
    """The first bucket is full with the second block, the rest goes when the backward has ended."""
    size = FIRST_BUCKET_BYTES / 2
    assert outlasting_s([(1.0, size)] * 6, 1.0 / size) == pytest.approx(4.0)


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**9)), min_size=1, max_size=20),
    st.floats(0, 1e-6),
)
def test_an_exchange_outlasts_the_backward_by_at_least_what_cannot_hide_and_at_most_all(
    blocks: list[tuple[float, float]], seconds_per_byte: float
) -> None:
    whole_s = sum(size for _, size in blocks) * seconds_per_byte
    left_s = outlasting_s(blocks, seconds_per_byte)
    backward_s = sum(seconds for seconds, _ in blocks)
    rounding_s = 1e-9 * (whole_s + backward_s)
    assert max(whole_s - backward_s, 0.0) - rounding_s <= left_s <= whole_s + rounding_s
