"""Graphs: cuts, orders, and what crosses them."""

import numpy as np
import pytest
from hypothesis import given

from pipeplan.costs.graph import (
    closures,
    crossing_bytes,
    graph_of,
    ideals,
    line_of,
    members,
    membership,
    on_or_behind_a_cycle,
)
from pipeplan.documents.profile import Profile
from tests.pipeplan.graphs import DIAMOND, crossing, cuts_by_definition, graphs
from tests.properties import examples


def outputs(profile: Profile) -> list[int]:
    return [block.measurements[0].output_bytes for block in profile.blocks]


@given(graphs())
@examples(200)
def test_cuts_are_the_sets_that_hold_all_that_their_members_read(profile: Profile) -> None:
    found = ideals(graph_of(len(profile.blocks), profile.edges or ()), 1000)
    assert found is not None
    assert {frozenset(members(cut)) for cut in found} == set(cuts_by_definition(profile))
    assert len(found) == len(set(found))
    assert found[0] == 0 and members(found[-1]) == list(range(len(profile.blocks)))


def test_cuts_of_a_diamond_by_size_and_value() -> None:
    assert ideals(graph_of(4, DIAMOND), 100) == [0, 0b1, 0b11, 0b101, 0b111, 0b1111]


def test_listing_stops_beyond_the_limit() -> None:
    branches = graph_of(1002, [(0, k) for k in range(1, 1001)] + [(k, 1001) for k in range(1, 1001)])
    assert ideals(branches, 5000) is None
    assert ideals(graph_of(4, DIAMOND), 6) is not None
    assert ideals(graph_of(4, DIAMOND), 5) is None


def test_late_blocks_are_there_when_they_are_read() -> None:
    #  0 - 2 - 3, and 1 - 3 from the side
    assert ideals(graph_of(4, ((0, 2), (2, 3), (1, 3))), 100, late=frozenset({1})) == [0, 0b1, 0b101, 0b1111]


@given(graphs())
@examples(200)
def test_an_order_has_every_block_after_what_it_reads(profile: Profile) -> None:
    edges = profile.edges or ()
    line = line_of(graph_of(len(profile.blocks), edges), outputs(profile))
    place = {block: index for index, block in enumerate(line.order)}
    assert sorted(line.order) == list(range(len(profile.blocks)))
    assert all(place[source] < place[reader] for source, reader in edges)


@given(graphs())
@examples(200)
def test_one_tensor_crosses_the_places_of_an_order_that_are_cut(profile: Profile) -> None:
    line = line_of(graph_of(len(profile.blocks), profile.edges or ()), outputs(profile))
    assert line.single_tensor[0] == 0 and line.single_tensor[-1] == len(profile.blocks)
    assert list(line.single_tensor) == sorted(set(line.single_tensor))
    for place in line.single_tensor[1:-1]:
        before = frozenset(line.order[:place])
        read = {s for s, reader in profile.edges or () if s in before and reader not in before}
        assert len([block for block in read if outputs(profile)[block] > 0]) == 1


@given(graphs())
@examples(200)
def test_every_place_of_an_order_is_crossed_by_what_later_blocks_read(profile: Profile) -> None:
    order = line_of(graph_of(len(profile.blocks), profile.edges or ()), outputs(profile)).order
    found = crossing_bytes(graph_of(len(profile.blocks), profile.edges or ()), order, outputs(profile))
    assert found.tolist() == [crossing(profile, frozenset(order[:place])) for place in range(len(order) + 1)]


def test_a_residual_connection_is_not_cut_inside() -> None:
    #  0 - 1 -+- 2 - 3 -+- 5
    #         +--- 4 ---+
    line = line_of(graph_of(6, ((0, 1), (1, 2), (2, 3), (1, 4), (3, 5), (4, 5))), [8] * 6)
    assert line.order == (0, 1, 2, 3, 4, 5)
    assert line.single_tensor == (0, 1, 2, 6)


def test_an_output_of_no_bytes_does_not_count_as_crossing() -> None:
    skip = ((0, 1), (1, 2), (2, 3), (0, 3))
    assert line_of(graph_of(4, skip), [8, 8, 8, 8]).single_tensor == (0, 1, 4)
    assert line_of(graph_of(4, skip), [0, 8, 8, 8]).single_tensor == (0, 2, 3, 4)


def test_closures_hold_what_a_block_needs_and_what_needs_it() -> None:
    assert closures(graph_of(4, DIAMOND)) == ([0b1, 0b11, 0b101, 0b1111], [0b1111, 0b1010, 0b1100, 0b1000])


def test_a_cycle_and_the_blocks_downstream_of_it_are_named() -> None:
    assert on_or_behind_a_cycle(graph_of(4, ((0, 1), (1, 2), (2, 1), (2, 3)))) == [1, 2, 3]
    assert on_or_behind_a_cycle(graph_of(4, DIAMOND)) == []


@pytest.mark.parametrize("blocks", [1, 8, 9])
def test_membership_has_a_row_a_cut(blocks: int) -> None:
    rows = membership([0, 1 << blocks - 1], blocks)
    assert rows.tolist() == [[0.0] * blocks, [0.0] * (blocks - 1) + [1.0]]
    assert rows.dtype == np.float64
