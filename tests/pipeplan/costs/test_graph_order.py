"""The order of a graph in which the fewest bytes cross."""

from collections.abc import Iterator
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipeplan.costs import graph_order
from pipeplan.costs.graph import Graph, crossing_bytes, graph_of, line_of
from pipeplan.costs.graph_order import least_order
from tests.pipeplan.graphs import DIAMOND, Edges, edges_between
from tests.properties import examples


def every_order(graph: Graph, first: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """All orders that hold every block after what it reads, the smallest block numbers first."""
    if len(first) == len(graph):
        yield first
    for block in range(len(graph)):
        if block not in first and set(graph.reads[block]) <= set(first):
            yield from every_order(graph, (*first, block))


@st.composite
def sized_graphs(draw: st.DrawFn, *, blocks_at_most: int = 7) -> tuple[Graph, list[int]]:
    """A graph with the bytes of its outputs; some cost nothing, many are equal."""
    blocks = draw(st.integers(1, blocks_at_most))
    return graph_of(blocks, draw(edges_between(blocks))), draw(
        st.lists(st.integers(0, 4), min_size=blocks, max_size=blocks)
    )


def total(graph: Graph, output_bytes: list[int], order: tuple[int, ...]) -> float:
    return float(crossing_bytes(graph, order, output_bytes).sum())


@given(sized_graphs())
@examples(150)
def test_the_order_is_the_first_of_the_cheapest_that_keep_single_tensor_places(sized: tuple[Graph, list[int]]) -> None:
    graph, output_bytes = sized
    line = line_of(graph, output_bytes)
    places = [set(line.order[:place]) for place in line.single_tensor]
    keeping = [order for order in every_order(graph) if all(set(order[: len(before)]) == before for before in places)]
    least = min(total(graph, output_bytes, order) for order in keeping)
    expected = next(order for order in keeping if total(graph, output_bytes, order) == least)
    assert least_order(graph, output_bytes, line) == expected


def test_a_branch_is_finished_before_the_next_and_the_smallest_output_comes_first() -> None:
    """
    0 -+- 1 (4) - 2 (2) -+- 5
       +- 3 (4) - 4 (1) -+
    """
    graph = graph_of(6, ((0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)))
    output_bytes = [3, 4, 2, 4, 1, 0]
    assert least_order(graph, output_bytes, line_of(graph, output_bytes)) == (0, 3, 4, 1, 2, 5)


def test_the_profiles_own_order_is_kept_where_none_is_better() -> None:
    graph = graph_of(6, ((0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)))
    assert least_order(graph, [1] * 6, line_of(graph, [1] * 6)) == (0, 1, 2, 3, 4, 5)


def braided(branches: int, length: int) -> Edges:
    """Branches of equal length between a first and a last block, numbered across: 1 to `branches` begin them."""
    last = branches * length + 1
    heads = [(0, branch) for branch in range(1, branches + 1)]
    inner = [(block, block + branches) for block in range(1, last - branches)]
    return (*heads, *inner, *((block, last) for block in range(last - branches, last)))


def test_a_graph_of_too_many_cuts_has_an_order_no_worse_than_those_that_are_known() -> None:
    """30 branches of 10 blocks have 11^30 cuts; the branches are numbered across, so that their own order is poor."""
    graph = graph_of(302, braided(30, 10))
    output_bytes = [1 + block % 7 for block in range(302)]
    line = line_of(graph, output_bytes)
    found = least_order(graph, output_bytes, line)
    place = {block: index for index, block in enumerate(found)}
    assert sorted(found) == list(range(302))
    assert all(place[source] < place[reader] for source, reader in braided(30, 10))
    assert total(graph, output_bytes, found) <= total(graph, output_bytes, line.order)
    assert total(graph, output_bytes, found) < total(graph, output_bytes, tuple(range(302))) / 2


def test_too_many_blocks_between_two_places_keep_their_known_order() -> None:
    branches = graph_order.SEARCHED_AT_MOST
    graph = graph_of(2 * branches + 2, braided(branches, 2))
    output_bytes = [1] * len(graph)
    line = line_of(graph, output_bytes)
    totals = [total(graph, output_bytes, order) for order in (tuple(range(len(graph))), line.order)]
    assert total(graph, output_bytes, least_order(graph, output_bytes, line)) == min(totals)


def test_single_tensor_places_divide_the_order_of_a_long_chain_of_branches() -> None:
    graph = graph_of(301, [(3 * k + source, 3 * k + reader) for k in range(100) for source, reader in DIAMOND])
    output_bytes = [2 if block % 3 == 1 else 1 for block in range(301)]
    line = line_of(graph, output_bytes)
    found = least_order(graph, output_bytes, line)
    for start, stop in pairwise(line.single_tensor):
        assert set(found[start:stop]) == set(line.order[start:stop])
    assert found[:4] == (0, 2, 1, 3)
