"""Small graphs, and strategies that draw them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from hypothesis import strategies as st

from pipeplan.documents.profile import Profile
from tests.pipeplan.builders import Cell, cells, profile

Edges = tuple[tuple[int, int], ...]

DIAMOND: Edges = ((0, 1), (0, 2), (1, 3), (2, 3))
"""
0 -+- 1 -+- 3
   +- 2 -+
"""


def graph(blocks: Sequence[Cell], edges: Edges, *, sizes: Sequence[int] = (1,), input_bytes: int = 0) -> Profile:
    """The cells as a graph; every block's input is what it reads, or what the data loader hands over."""
    chain = profile(blocks, sizes=sizes)
    reads = {reader: [source for source, other in edges if other == reader] for _, reader in edges}
    changed = []
    for index, block in enumerate(chain.blocks):
        measurements = tuple(
            replace(
                m,
                input_bytes=m.microbatch_size * sum((blocks[s].output_bytes for s in reads.get(index, [])), 0)
                if index in reads
                else m.microbatch_size * input_bytes,
            )
            for m in block.measurements
        )
        changed.append(replace(block, measurements=measurements))
    return replace(chain, blocks=tuple(changed), edges=edges)


@st.composite
def edges_between(draw: st.DrawFn, blocks: int) -> Edges:
    """Any of the pairs of so many blocks."""
    return tuple(pair for pair in combinations(range(blocks), 2) if draw(st.booleans()))


@st.composite
def graphs(draw: st.DrawFn, *, blocks_at_most: int = 7) -> Profile:
    """Any pattern of edges, disconnected parts and dangling ends included."""
    some = draw(st.lists(cells(), min_size=1, max_size=blocks_at_most))
    drawn = [replace(cell, shared_bytes=None, kept_output_bytes=0, passed_bytes=0) for cell in some]
    edges = draw(edges_between(len(drawn)))
    return graph(drawn, edges, input_bytes=draw(st.integers(0, 3)))


def cuts_by_definition(profile: Profile) -> list[frozenset[int]]:
    """All sets of blocks that hold all that their members read."""
    blocks = range(len(profile.blocks))
    return [
        frozenset(chosen)
        for size in range(len(blocks) + 1)
        for chosen in combinations(blocks, size)
        if all(source in chosen for source, reader in profile.edges or () if reader in chosen)
    ]


def crossing(profile: Profile, inside: frozenset[int]) -> int:
    """The outputs of blocks inside that one outside reads, each once."""
    read = {source for source, reader in profile.edges or () if source in inside and reader not in inside}
    return sum(profile.blocks[block].measurements[0].output_bytes for block in read)
