"""Equal blocks in a row are one row of a table."""

from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.alike import alike


def test_numbered_names_are_drawn_together() -> None:
    names = ["embedding", *(f"layer.{n}" for n in range(4)), "norm", "head"]
    assert list(alike(names, [0, 1, 1, 1, 1, 2, 3])) == [
        (0, 1, "embedding"),
        (1, 5, "layer.0-3"),
        (5, 6, "norm"),
        (6, 7, "head"),
    ]


def test_blocks_that_differ_or_are_not_numbered_in_order_stay_apart() -> None:
    assert [name for *_, name in alike(["h1", "h2", "h3"], [1, 1, 2])] == ["h1-2", "h3"]
    assert [name for *_, name in alike(["h1", "h3", "g4"], [1, 1, 1])] == ["h1", "h3", "g4"]
    assert [name for *_, name in alike(["a", "a", "9", "10"], [1, 1, 1, 1])] == ["a", "a", "9-10"]


@given(st.lists(st.tuples(st.sampled_from(["a", "b1", "b2", "b3", "c.10", "c.11"]), st.integers(0, 1)), min_size=1))
def test_every_block_is_in_one_run_of_equals(blocks: list[tuple[str, int]]) -> None:
    names, contents = [name for name, _ in blocks], [content for _, content in blocks]
    runs = list(alike(names, contents))
    assert [place for start, stop, _ in runs for place in range(start, stop)] == list(range(len(blocks)))
    assert all(len(set(contents[start:stop])) == 1 for start, stop, _ in runs)
    assert all(name.startswith(names[start]) for start, _, name in runs)
