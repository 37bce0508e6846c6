"""Graph: a model whose blocks read each other's outputs in any pattern, with its cuts and the bytes across them.

A cut is the set of the blocks before it. The set holds every block that its members read: it is a down-set, or ideal.
(The antichains of PipeDream's optimizer, SOSP 2019, are the maximal blocks of such sets.) Sets are whole numbers, bit v
for block v.

In a chain one tensor crosses a stage's end. In a graph all tensors that cross the cut do: a stage forwards what it does
not read.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.memory import passed_inputs
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Stage
from pipeplan.documents.profile import Profile
from pipeplan.documents.tied import TiedWeights

Edges = Iterable[tuple[int, int]]
"""(source, reader) pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """By block, the blocks whose outputs it reads, and those that read its own output."""

    reads: tuple[tuple[int, ...], ...]
    read_by: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.reads)


def graph_of(blocks: int, edges: Edges) -> Graph:
    """The graph of `blocks` blocks; a repeated edge counts once."""
    reads: list[list[int]] = [[] for _ in range(blocks)]
    read_by: list[list[int]] = [[] for _ in range(blocks)]
    for source, reader in dict.fromkeys(edges):
        reads[reader].append(source)
        read_by[source].append(reader)
    return Graph(reads=tuple(map(tuple, reads)), read_by=tuple(map(tuple, read_by)))


def on_or_behind_a_cycle(graph: Graph) -> list[int]:
    """The blocks that can never be computed, ascending."""
    computed = set(_sources_first(graph))
    return [block for block in range(len(graph)) if block not in computed]


def depths(graph: Graph) -> list[int]:
    """The number of blocks on the longest path to each, itself included. There must be no cycle."""
    depth = [1] * len(graph)
    for block in _sources_first(graph):
        for reader in graph.read_by[block]:
            depth[reader] = max(depth[reader], depth[block] + 1)
    return depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """All blocks in one topological order, and the places that only one tensor crosses.

    Place p is before the p-th block of the order; both ends are places, and no tensor crosses them.
    """

    order: tuple[int, ...]
    single_tensor: tuple[int, ...]


def line_of(graph: Graph, output_bytes: Sequence[float]) -> Line:
    """The order in which side inputs come as late as possible, cut wherever only one block's output is read later.

        a -- b -+- c -- d -+- e        a | b | c d f e: after d both d's and f's outputs would have to be sent
                +--- f ----+

    A chain is cut after every block, a residual connection before and after it. Outputs of no bytes do not count. The
    model's output is the block that ends the longest path. A block that does not lead to the output stands after the
    last block that it reads, and no cut separates the two.
    """
    depth = depths(graph)
    main = _leading_to_the_output(graph, depth)

    # A main block's home is its place among the main blocks. Any other block's home is that of the last main block that
    # it depends on (-1 for none): it is attached after that one.
    home = [-1] * len(graph)
    place = {block: index for index, block in enumerate(main)}
    attached: list[list[int]] = [[] for _ in range(len(main) + 1)]
    for block in sorted(range(len(graph)), key=lambda block: (depth[block], block)):
        home[block] = place.get(block, max((home[source] for source in graph.reads[block]), default=-1))
        if block not in place:
            attached[home[block] + 1].append(block)

    order, ends = list(attached[0]), []
    for block, loose in zip(main, attached[1:], strict=True):
        order += [block, *loose]
        ends.append(len(order))

    # By main block: the number of outputs read beyond it, and the sum of these outputs' block numbers. For a single
    # output, the sum is its block.
    crossing, sum_of_blocks = [0] * (len(main) + 1), [0] * (len(main) + 1)
    for block, readers in enumerate(graph.read_by):
        first = max(home[block], 0)
        last = max((home[reader] for reader in readers), default=first)
        if output_bytes[block] > 0 and last > first:
            crossing[first] += 1
            crossing[last] -= 1
            sum_of_blocks[first] += block
            sum_of_blocks[last] -= block
    alone = [outputs == 1 for outputs in accumulate(crossing[:-1])]

    # A single output must come from a block after the previous cut.
    places, cut_before = [0], -1
    for index, block in enumerate(accumulate(sum_of_blocks[:-1])):
        if alone[index] and home[block] > cut_before:
            places.append(ends[index])
            cut_before = index
    return Line(order=tuple(order), single_tensor=(*places, len(graph)))


def crossing_bytes(graph: Graph, order: Sequence[int], output_bytes: Sequence[float]) -> FloatArray:
    """The bytes that cross each place of an order: of every output before it that a later block reads, counted once."""
    place = places_of(order).tolist()
    change = np.zeros(len(graph) + 1)
    for block, readers in enumerate(graph.read_by):
        if readers:
            change[place[block] + 1] += output_bytes[block]
            change[max(place[reader] for reader in readers) + 1] -= output_bytes[block]
    crossing = np.cumsum(change)
    crossing[-1] = 0.0
    return crossing


def ideals(graph: Graph, limit: int, *, late: frozenset[int] = frozenset()) -> list[int] | None:
    """All cuts, the empty and the full one included, by size and then by value; None where there are more than `limit`.

    `late` blocks, which must read late ones only, are in a cut if a member reads them (and in the full cut).
    """
    everything = (1 << len(graph)) - 1
    if len(graph) - len(late) >= limit:
        return None
    needed = [sum(1 << source for source in sources if source not in late) for sources in graph.reads]
    found = {0}
    stack = [(0, tuple(block for block in range(len(graph)) if block not in late and not needed[block]))]
    while stack:
        before, ready = stack.pop()
        for block in ready:
            after = before | 1 << block
            if after in found:
                continue
            found.add(after)
            if len(found) > limit:
                return None
            opened = (reader for reader in graph.read_by[block] if not needed[reader] & ~after)
            stack.append((after, (*(other for other in ready if other != block), *opened)))
    found.remove(everything & ~sum(1 << block for block in late))
    cuts = {everything, *(with_late(graph, cut, late) for cut in found)}
    return sorted(cuts, key=lambda cut: (cut.bit_count(), cut))


def with_late(graph: Graph, cut: int, late: frozenset[int]) -> int:
    """The cut with the late blocks that its members read. Every block must stand after the blocks that it reads."""
    for block in sorted(late, reverse=True):
        if any(cut >> reader & 1 for reader in graph.read_by[block]):
            cut |= 1 << block
    return cut


def members(cut: int) -> list[int]:
    """The blocks of a cut, ascending."""
    text = bin(cut)[:1:-1]
    return [block for block, bit in enumerate(text) if bit == "1"]


def membership(cuts: Sequence[int], blocks: int) -> FloatArray:
    """A row a cut, a column a block: 1 for a member."""
    width = -(-blocks // 8)
    packed = np.frombuffer(b"".join(cut.to_bytes(width, "little") for cut in cuts), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(cuts), width), axis=1, bitorder="little")
    return np.asarray(bits[:, :blocks], dtype=np.float64)


def crossing_by_cut(graph: Graph, inside: FloatArray, output_bytes: FloatArray) -> FloatArray:
    """By cut (a row of `membership`), the bytes of its blocks' outputs that a block beyond it reads."""
    sources = [block for block, readers in enumerate(graph.read_by) if readers and output_bytes[block] > 0]
    if not sources:
        return np.zeros(len(inside))
    readers = [graph.read_by[block] for block in sources]
    starts = np.cumsum([0, *map(len, readers[:-1])])
    all_read = np.minimum.reduceat(inside[:, [reader for each in readers for reader in each]], starts, axis=1)
    return np.asarray((inside[:, sources] - all_read) @ output_bytes[sources])


def places_of(order: Sequence[int]) -> IntArray:
    """By block its place in the order."""
    place = np.empty(len(order), dtype=np.int64)
    place[np.asarray(order)] = np.arange(len(order))
    return place


def closures(graph: Graph) -> tuple[list[int], list[int]]:
    """By block: the block with all that it depends on, which is a cut, and the block with all that depends on it.

    Every block must stand after the blocks that it reads.
    """
    forwards = range(len(graph))
    return _closed(graph.reads, forwards), _closed(graph.read_by, reversed(forwards))


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Bytes that a stage keeps as its input, that it receives from the stage before, and that it sends to the next.

    `kept_output_bytes` is the part of the sent bytes among the stage's activations.
    A stage that recomputes by block keeps the inputs of all its blocks, but a forwarded tensor only once.
    The first stage receives nothing and the last one sends nothing; their values are unused.
    """

    input_bytes: int
    received_bytes: int
    sent_bytes: int
    kept_output_bytes: int


def in_order(profile: Profile, order: Sequence[int]) -> Profile:
    """The profile with its blocks in an order of stages, where edges no longer count."""
    places = places_of(order).tolist()

    def placed(every: Sequence[TiedWeights]) -> tuple[TiedWeights, ...]:
        return tuple(replace(t, block=places[t.block], also=tuple(places[block] for block in t.also)) for t in every)

    blocks = tuple(profile.blocks[block] for block in order)
    return replace(
        profile, blocks=blocks, edges=None, tied=placed(profile.tied), tied_frozen=placed(profile.tied_frozen)
    )


def boundaries(
    profile: Profile, microbatch_size: int, stages: Sequence[Stage], order: Sequence[int] | None
) -> list[Boundary]:
    """Every stage's boundary; [start, stop) are places in the order, or blocks of a chain."""
    measured = profile.at(microbatch_size)
    if order is None or profile.edges is None:
        inputs, passed = [block.input_bytes for block in measured], passed_inputs(measured)
        received = [0, *(block.output_bytes for block in measured)]
        kept = [0, *(block.kept_output_bytes for block in measured)]
    else:
        graph = graph_of(len(measured), profile.edges)
        received = [int(size) for size in crossing_bytes(graph, order, [block.output_bytes for block in measured])]
        inputs, passed = [loaded_bytes(graph, measured), *received[1:-1]], [0] * len(measured)
        kept = [0] * len(received)
    kept_until = [stage.stop if stage.recompute_unit == "block" else stage.start + 1 for stage in stages]
    return [
        Boundary(
            input_bytes=sum(inputs[stage.start : until]) - sum(passed[stage.start + 1 : until]),
            received_bytes=received[stage.start],
            sent_bytes=received[stage.stop],
            kept_output_bytes=kept[stage.stop],
        )
        for stage, until in zip(stages, kept_until, strict=True)
    ]


def loaded_bytes(graph: Graph, measured: Sequence[Measurement]) -> int:
    """The bytes from the data loader: the inputs of the blocks that read no other."""
    return sum(block.input_bytes for block, reads in zip(measured, graph.reads, strict=True) if not reads)


def _sources_first(graph: Graph) -> list[int]:
    """The blocks, each after those that it reads; without those on a cycle or downstream of one."""
    missing = [len(sources) for sources in graph.reads]
    ready = [block for block, count in enumerate(missing) if count == 0]
    for block in ready:
        for reader in graph.read_by[block]:
            missing[reader] -= 1
            if missing[reader] == 0:
                ready.append(reader)
    return ready


def _leading_to_the_output(graph: Graph, depth: Sequence[int]) -> list[int]:
    """The blocks that lead to the model's output. A block's deepest source comes first, the others right before it."""
    output = max(range(len(graph)), key=lambda block: (depth[block], block))
    order: dict[int, None] = {}
    stack = [(output, _deepest_first(graph, depth, output))]
    while stack:
        block, sources = stack[-1]
        source = next((s for s in sources if s not in order), None)
        if source is None:
            order[block] = None
            stack.pop()
        else:
            stack.append((source, _deepest_first(graph, depth, source)))
    return list(order)


def _deepest_first(graph: Graph, depth: Sequence[int], block: int) -> Iterator[int]:
    return iter(sorted(graph.reads[block], key=lambda source: (-depth[source], source)))


def _closed(neighbours: Sequence[Sequence[int]], order: Iterable[int]) -> list[int]:
    closed = [0] * len(neighbours)
    for block in order:
        own = 1 << block
        for other in neighbours[block]:
            own |= closed[other]
        closed[block] = own
    return closed
