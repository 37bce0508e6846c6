"""Graph order: a graph's blocks in one line that may be cut at every place, with as few bytes crossing as possible.

A line of n blocks has n + 1 cuts. The graph may have many more, and the line's order decides which of them are lost.
This order minimises the sum of the bytes that cross all places. A branch, once begun, is finished before the next. The
branch with the smallest output comes first. A side input comes as late as possible.

        a -+- b (4 bytes) - c (1 byte) -+- f        a b c d e f: few bytes cross after c and after e
           +- d (4 bytes) - e (1 byte) -+           a b d c e f: 8 bytes cross after d
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pipeplan.costs.graph import Graph, Line, crossing_bytes

STEPS = 1_000_000
"""Upper bound on the blocks examined for all cuts of a graph: hundredths of a second, two seconds at most."""

SEARCHED_AT_MOST = 500
"""Upper bound on the blocks between two places that one tensor crosses; if there are more, they keep their order."""


def least_order(graph: Graph, output_bytes: Sequence[int], line: Line) -> tuple[int, ...]:
    """The order with the fewest bytes crossing, summed over its places, that keeps the line's single-tensor places.

    Ties prefer smaller block numbers first. The result is optimal while the cuts between two of these places are few
    (`STEPS`). If there are more, the search follows the cuts from which the rest of the line is the cheapest. The
    result is never worse than the line's order, nor than the graph's own between these places.
    """
    parts = [line.order[start:stop] for start, stop in pairwise(line.single_tensor)]
    own = tuple(block for part in parts for block in sorted(part))
    place = {block: index for index, block in enumerate(line.order)}
    found = tuple(block for part in parts for block in _least(graph, output_bytes, place, part))
    return min((found, own, line.order), key=lambda order: crossing_bytes(graph, order, output_bytes).sum())


def _least(graph: Graph, output_bytes: Sequence[int], place: Mapping[int, int], part: Sequence[int]) -> list[int]:
    """The order of the consecutive blocks of a part, by dynamic programming from its last place to its first.

    Sets of blocks after a place are whole numbers, bit i for the i-th of the part's blocks in the profile's order.
    `place` is that of every block in a line that has the part's blocks in a row.
    """
    blocks = sorted(part)
    if not 1 < len(blocks) <= SEARCHED_AT_MOST:
        return blocks
    bit = {block: 1 << index for index, block in enumerate(blocks)}
    stop = max(place[block] for block in blocks) + 1
    readers = {block: sum(bit.get(reader, 0) for reader in graph.read_by[block]) for block in blocks}
    read = [bool(graph.read_by[block]) for block in blocks]

    # By block, the outputs that it reads and no later part reads, with their readers in this part.
    ending: list[list[tuple[int, int]]] = []
    for block in blocks:
        last = [source for source in graph.reads[block] if all(place[r] < stop for r in graph.read_by[source])]
        ending.append([(output_bytes[s], sum(bit.get(r, 0) for r in graph.read_by[s])) for s in last])

    # By set after a place: the bytes that cross from there on, and at the place; by the number of its blocks.
    followed = max(STEPS // (len(graph) * len(blocks)), 1)
    layers: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for _ in blocks:
        cheapest = sorted(layers[-1].items(), key=lambda item: (item[1], item[0]))[:followed]
        layer: dict[int, tuple[int, int]] = {}
        for after, (onwards, crossing) in cheapest:
            for index, block in enumerate(blocks):
                own = 1 << index
                if after & own or readers[block] & ~after:
                    continue
                here = crossing - (output_bytes[block] if read[index] else 0)
                here += sum(size for size, all_readers in ending[index] if not all_readers & after)
                known = layer.get(after | own)
                if known is None or onwards + here < known[0]:
                    layer[after | own] = (onwards + here, here)
        layers.append(layer)

    order, after = list[int](), (1 << len(blocks)) - 1
    for layer, rest in zip(reversed(layers[1:]), reversed(layers[:-1]), strict=True):
        onwards, here = layer[after]
        following = (index for index in range(len(blocks)) if after >> index & 1)
        first = next(i for i in following if rest.get(after & ~(1 << i), (None, 0))[0] == onwards - here)
        order.append(blocks[first])
        after &= ~(1 << first)
    return order
