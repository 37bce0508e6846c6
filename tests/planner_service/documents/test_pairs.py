"""Two profiles side by side: blocks belong together by name; a ratio is the second's figure over the first's."""

from dataclasses import replace

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.files import dump
from pipeplan.documents.profile import Block, Profile
from pipeplan.errors import InvalidInputError
from pipeplan.formats import times
from planner_service.documents.pairs import LABELS, pair_of
from planner_service.overview.openapi import PROFILE
from tests.planner_service.examples import profile_document
from tests.planner_service.html_pages import Page

NAMES = st.lists(st.sampled_from("abcdef"), min_size=1, unique=True)


def _profile(names: list[str], factor: float = 1.0) -> Profile:
    """A profile whose block takes the longer, the later its letter comes, and this many times as long again."""
    blocks = []
    for name in names:
        longer = factor * ord(name)
        measured = [
            replace(at, forward_s=at.forward_s * longer, backward_s=at.backward_s * longer)
            for at in PROFILE.blocks[0].measurements
        ]
        blocks.append(Block(name=name, weight_bytes=2**20, measurements=tuple(measured)))
    return replace(PROFILE, blocks=tuple(blocks))


@given(NAMES, st.sampled_from([0.25, 1.0, 3.0]))
def test_the_same_blocks_have_one_ratio_in_both_directions(names: list[str], factor: float) -> None:
    one, other = _profile(names), _profile(names, factor)
    for pair, ratio in (
        (pair_of("", (dump(one), dump(other))), factor),
        (pair_of("", (dump(other), dump(one))), 1 / factor),
    ):
        assert sum(row.blocks for row in pair.rows) == len(names)
        for cells in (pair.totals, *(row.cells for row in pair.rows)):
            assert [cell.label for cell in cells] == list(LABELS)
            assert [cell.ratio for cell in cells] == [times(ratio)] * 2 + [times(1)] * 3


@given(NAMES, NAMES)
def test_blocks_belong_together_by_name_and_none_is_lost(first: list[str], second: list[str]) -> None:
    pair = pair_of("", (dump(_profile(first)), dump(_profile(second))))
    shared = len(set(first) & set(second))
    alone = [sum(row.blocks for row in pair.rows if row.only == side) for side in (1, 2)]
    assert alone == [len(first) - shared, len(second) - shared]
    matched = [row for row in pair.rows if row.only is None]
    assert sum(row.blocks for row in matched) == shared
    assert all(row.cells[0].ratio == times(1) for row in matched)
    assert bool(pair.totals) == bool(shared)


def test_profiles_that_share_no_size_are_refused() -> None:
    large = [replace(at, microbatch_size=at.microbatch_size * 16) for at in PROFILE.blocks[0].measurements]
    other = replace(PROFILE, blocks=tuple(replace(block, measurements=tuple(large)) for block in PROFILE.blocks))
    with pytest.raises(InvalidInputError, match="must share a size"):
        pair_of("", (dump(PROFILE), dump(other)))
    with pytest.raises(InvalidInputError, match="both were measured at: 1, 2"):
        pair_of("3", (dump(PROFILE), dump(PROFILE)))


def test_the_list_leads_to_the_comparison_of_two(http: TestClient) -> None:
    html = {"Accept": "text/html"}
    documents = (profile_document(), profile_document(model={"name": "<b>other</b>"}))
    one, other = (http.post("/v1/profiles", json=document).json()["id"] for document in documents)
    listed = Page(http.get("/profiles", headers=html).text)
    assert "/profiles/compare" in [form.action for form in listed.forms]
    page = Page(http.get(f"/profiles/compare?profile={one}&profile={other}&microbatch_size=1", headers=html).text)
    assert "Forward 1 × 16 ms, 16 ms" in page.text
    assert "<b>other</b> on A100-40GB" in page.text
    refused = http.get(f"/profiles/compare?profile={one}", headers=html)
    assert (refused.status_code, "must name two profiles" in refused.text) == (422, True)
