"""Least crossing: the cut of a graph between two sets that the fewest bytes cross.

By maximum flow (Ford and Fulkerson 1956): a block is before the cut if it can be reached from the source. Every output
is an arc from its block to a node that stands for all its readers. Arcs without a limit ensure that a block is before
the cut only together with what it reads.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeplan.costs.graph import Graph

UNLIMITED = 1 << 200
"""A number of bytes beyond all sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastCrossing:
    """The bytes of a minimum cut, and the blocks before it; None if it exceeds the limit."""

    size_bytes: int
    before: int | None


@dataclass(slots=True)
class _Network:
    """Arcs by number: an even one and the odd one after it are each other's reverse."""

    heads: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    arcs: list[list[int]] = field(default_factory=list)

    def node(self) -> int:
        self.arcs.append([])
        return len(self.arcs) - 1

    def join(self, tail: int, head: int, capacity: int) -> None:
        for start, end, size in ((tail, head, capacity), (head, tail, 0)):
            self.arcs[start].append(len(self.heads))
            self.heads.append(end)
            self.left.append(size)

    def reached(self, source: int, sink: int) -> dict[int, int]:
        """By node that can still be reached, the arc that leads there; the search ends when it reaches the sink."""
        by = {source: -1}
        queue = deque([source])
        while queue and sink not in by:
            for arc in self.arcs[queue.popleft()]:
                if self.left[arc] and (head := self.heads[arc]) not in by:
                    by[head] = arc
                    queue.append(head)
        return by

    def push(self, by: dict[int, int], sink: int) -> int:
        """Augments the flow along the path found, and returns the amount."""
        path = []
        node = sink
        while by[node] >= 0:
            path.append(by[node])
            node = self.heads[by[node] ^ 1]
        size = min(self.left[arc] for arc in path)
        for arc in path:
            self.left[arc] -= size
            self.left[arc ^ 1] += size
        return size


def least_crossing(
    graph: Graph, output_bytes: Sequence[int], inside: Sequence[bool], outside: Sequence[bool], limit_bytes: float
) -> LeastCrossing:
    """The minimum over all cuts with `inside` before and `outside` after them, if it is within the limit.

    `inside` contains what its members read, `outside` what reads its members. O(augmenting paths x arcs).
    """
    network = _Network()
    source, sink = network.node(), network.node()
    at = [source if first else sink if last else network.node() for first, last in zip(inside, outside, strict=True)]
    for block, node in enumerate(at):
        for read in graph.reads[block]:
            if node not in (source, sink) and at[read] != source:
                network.join(node, at[read], UNLIMITED)
        ends = {at[reader] for reader in graph.read_by[block]} - {source}
        if node != sink and ends and output_bytes[block] > 0:
            read_on = network.node()
            network.join(node, read_on, output_bytes[block])
            for end in sorted(ends):
                network.join(read_on, end, UNLIMITED)
    flow = 0
    while sink in (by := network.reached(source, sink)):
        flow += network.push(by, sink)
        if flow > limit_bytes:
            return LeastCrossing(size_bytes=flow, before=None)
    before = sum(1 << block for block, node in enumerate(at) if node in by)
    return LeastCrossing(size_bytes=flow, before=before)
