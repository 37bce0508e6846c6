"""The states of a graph, and stages put in an order."""

import numpy as np
import pytest
from hypothesis import given

from pipeplan.costs.graph import members
from pipeplan.documents.profile import Device, Model, Profile
from pipeplan.imports.pipedream_graph import import_pipedream_graph
from pipeplan.planners.pipedream.states import CutStates, cut_states
from tests.pipeplan.builders import Cell, profile
from tests.pipeplan.cli.commands import PROFILES
from tests.pipeplan.graphs import DIAMOND, crossing, cuts_by_definition, graph, graphs
from tests.properties import examples


def public(name: str) -> Profile:
    return import_pipedream_graph(
        (PROFILES / f"{name}.graph.txt").read_text(encoding="utf-8"),
        microbatch_size=1,
        model=Model(name=name),
        device=Device(name="gpu", memory_bytes=10**12),
        dtype="float32",
    )


def blocks_of(found: CutStates) -> list[frozenset[int]]:
    return [frozenset(members(found.cut(state))) for state in range(len(found.states))]


@given(graphs())
@examples(150)
def test_states_add_up_the_blocks_before_them(profile: Profile) -> None:
    found = cut_states(profile, 1)
    measured, states = profile.at(1), found.states
    sets = blocks_of(found)
    assert found.complete and set(sets) <= set(cuts_by_definition(profile))
    for state, inside in enumerate(sets):
        assert states.compute_s[state] == sum(measured[block].compute_s for block in inside)
        assert states.weight_bytes[state] == sum(profile.blocks[block].weight_bytes for block in inside)
        assert (
            states.added_bytes[state]
            == states.kept_before[state]
            == sum(measured[block].activation_bytes for block in inside)
        )
        assert states.boundary_bytes[state] == crossing(profile, inside)
        assert found.blocks_before[state] == len(inside)
    places = range(len(sets))
    before = [[a < b for b in places] for a in places] if states.before is None else states.before.tolist()
    assert before == [[a < b for b in sets] for a in sets]
    assert states.input_bytes[0] == sum(
        measured[block].input_bytes
        for block in range(len(measured))
        if block not in {r for _, r in profile.edges or ()}
    )


@given(graphs())
@examples(100)
def test_the_largest_workspace_between_two_states(profile: Profile) -> None:
    found = cut_states(profile, 1)
    sets, measured = blocks_of(found), profile.at(1)
    for a, first in enumerate(sets):
        for b, last in enumerate(sets):
            if first < last:
                largest = max(measured[block].workspace_bytes for block in last - first)
                table = found.states.transient_bytes
                assert (0 if table is None else table[a, b]) == largest


def test_blocks_from_the_side_that_cost_nothing_stand_with_their_reader() -> None:
    #  0 - 2 - 3, and 1 - 3: of the side only what costs something can be cut off
    free = Cell(forward_s=0, backward_s=0)
    edges = ((0, 2), (2, 3), (1, 3))
    assert len(cut_states(graph([Cell(), free, Cell(), Cell()], edges), 1).states) == 4
    assert len(cut_states(graph([Cell(), Cell(), Cell(), Cell()], edges), 1).states) == 7
    assert (
        len(
            cut_states(
                graph([Cell(), Cell(forward_s=0, backward_s=0, output_bytes=1), Cell(), Cell()], edges), 1
            ).states
        )
        == 7
    )


def test_stages_of_a_graph_stand_together_and_a_chain_in_its_own_order() -> None:
    found = cut_states(graph([Cell()] * 4, DIAMOND), 1)
    assert found.cuts == (0, 0b1, 0b11, 0b101, 0b111, 0b1111)
    assert found.order_of([0, 3, 5]) == (0, 2, 1, 3)
    assert found.order_of([0, 2, 5]) == (0, 1, 2, 3)
    chain = cut_states(profile([Cell()] * 3), 1)
    assert chain.states.before is None and chain.complete
    assert chain.order_of([0, 1, 3]) == (0, 1, 2)


def test_single_tensor_states_are_those_that_one_output_crosses() -> None:
    found = cut_states(graph([Cell(output_bytes=1)] * 4, DIAMOND), 1, cuts="single-tensor")
    assert found.complete and found.states.before is None
    assert found.blocks_before.tolist() == [0, 1, 4]
    assert found.states.boundary_bytes.tolist() == [0, 1, 0]


@pytest.mark.parametrize(("name", "states"), [("vgg16", 40), ("resnet50", 240)])
def test_public_profiles_have_as_many_states_as_in_the_authors_program(name: str, states: int) -> None:
    """It does not count the empty one."""
    assert len(cut_states(public(name), 1).states) == states + 1


def test_gnmt_has_fewer_states_than_in_the_authors_program_because_free_blocks_have_one_place() -> None:
    """That program has 99, which leave out that the decoder's embedding may come early."""
    assert len(cut_states(public("gnmt"), 1).states) == 48


def test_more_cuts_than_can_be_listed_are_the_places_of_one_order() -> None:
    branches = 1000
    edges = tuple((0, k) for k in range(1, branches + 1)) + tuple((k, branches + 1) for k in range(1, branches + 1))
    wide = graph([Cell(output_bytes=1)] * (branches + 2), edges)
    found = cut_states(wide, 1)
    assert not found.complete and len(found.states) == branches + 3
    assert found.states.boundary_bytes[1] == 1 and found.states.boundary_bytes[branches + 1] == branches
    assert found.order_of([0, 500, branches + 2]) == tuple(range(branches + 2))


def test_a_path_of_very_many_blocks_is_a_chain() -> None:
    blocks = 10_000
    path = graph([Cell(output_bytes=1)] * blocks, tuple((k, k + 1) for k in range(blocks - 1)))
    found = cut_states(path, 1)
    assert found.states.before is None and found.complete
    assert np.array_equal(found.blocks_before, np.arange(blocks + 1))
