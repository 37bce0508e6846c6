"""PipeDream's graph.txt (see `graph_lines`) -> Profile: a graph with branches is cut into a chain of blocks.

The graph is laid out in an order in which every node stands behind what it reads, side inputs as late as possible. It
is cut behind every node through which all paths from what stands before it to what stands behind it pass: behind every
node of a chain, before and behind a residual connection, behind the last reader of a context that several layers read.

    a -- b -+- c -- d -+- e        blocks: a | b | c d f e: behind d both d's and f's outputs would have to be sent
            +--- f ----+

A node whose output nobody reads, other than the model's, belongs to the block of what it reads. What costs nothing to
send (an output of no bytes) is no path. Inputs stand for the data loader, which feeds any stage; as in PipeDream's own
optimizer their time is not the device's. They belong to the block that reads them.
"""

from collections.abc import Iterator, Sequence

from planner_service.core.errors import InvalidInputError
from planner_service.core.profile import Block, Device, Measurement, Model, Profile
from planner_service.imports.graph_lines import Graph, Node, parse_graph


def import_pipedream_graph(text: str, *, microbatch_size: int, model: Model, device: Device, dtype: str) -> Profile:
    """The profile of a graph file; one measurement a block, at the size that the file was measured with.

    A block's output is that of its last node, its input what the block before puts out (the data loader's bytes for
    the first), its activations are the outputs of all its nodes. Raises InvalidInputError for what is not such a file.
    """
    graph = parse_graph(text)
    depths = _depths(graph)
    order = _order(graph, depths)
    segments = _segments(graph, order)
    input_bytes = sum(graph.nodes[name].output_bytes for name in segments[0] if graph.nodes[name].is_input)
    blocks: list[Block] = []
    for segment, loose in zip(segments, _loose_ends(graph, depths, segments), strict=True):
        nodes = [graph.nodes[name] for name in segment]
        ends = [graph.nodes[name] for name in loose]
        blocks.append(_block(nodes, ends, input_bytes=input_bytes, microbatch_size=microbatch_size))
        input_bytes = nodes[-1].output_bytes
    return Profile(model=model, device=device, dtype=dtype, blocks=tuple(blocks))


def _depths(graph: Graph) -> dict[str, int]:
    """Nodes on the longest path to each, itself included, in an order in which sources come first."""
    unread = {name: len(sources) for name, sources in graph.reads.items()}
    ready = [name for name, count in unread.items() if count == 0]
    depths: dict[str, int] = {}
    while ready:
        name = ready.pop()
        depths[name] = 1 + max((depths[source] for source in graph.reads[name]), default=0)
        for reader in graph.read_by[name]:
            unread[reader] -= 1
            if unread[reader] == 0:
                ready.append(reader)
    for name in graph.nodes:
        if name not in depths:
            raise InvalidInputError("file", "must not hold a cycle", name)
    return depths


def _order(graph: Graph, depths: dict[str, int]) -> list[str]:
    """What leads to the model's output (the node that ends the longest path), everything behind what it reads.

    The deepest source of a node comes first, so that what feeds it from the side stands right before it.
    """
    output = max(depths, key=lambda name: (depths[name], name))
    order: dict[str, None] = {}
    stack = [(output, _deepest_first(graph, depths, output))]
    while stack:
        name, sources = stack[-1]
        source = next((s for s in sources if s not in order), None)
        if source is not None:
            stack.append((source, _deepest_first(graph, depths, source)))
        else:
            order[name] = None
            stack.pop()
    return list(order)


def _deepest_first(graph: Graph, depths: dict[str, int], name: str) -> Iterator[str]:
    return iter(sorted(graph.reads[name], key=lambda source: -depths[source]))


def _segments(graph: Graph, order: Sequence[str]) -> list[list[str]]:
    """The order, cut behind every node whose output alone is read further on."""
    position = {name: index for index, name in enumerate(order)}
    last_read: dict[str, int] = {}
    for name in order:
        if graph.nodes[name].output_bytes > 0 and not graph.nodes[name].is_input:
            last_read[name] = max((position[r] for r in graph.read_by[name] if r in position), default=-1)
    segments: list[list[str]] = [[]]
    crossing: set[str] = set()
    for index, name in enumerate(order):
        if segments[-1] and crossing == {segments[-1][-1]}:
            segments.append([])
        segments[-1].append(name)
        crossing = {other for other in (*crossing, name) if last_read.get(other, -1) > index}
    return segments


def _loose_ends(graph: Graph, depths: dict[str, int], segments: Sequence[Sequence[str]]) -> list[list[str]]:
    """By segment, the nodes that lead nowhere: with the last segment that they read from."""
    home = {name: index for index, segment in enumerate(segments) for name in segment}
    loose: list[list[str]] = [[] for _ in segments]
    for name in depths:
        if name not in home:
            home[name] = max((home[source] for source in graph.reads[name]), default=0)
            loose[home[name]].append(name)
    return loose


def _block(nodes: Sequence[Node], ends: Sequence[Node], *, input_bytes: int, microbatch_size: int) -> Block:
    named = [node for node in nodes if not node.is_input]
    computing = [*named, *(node for node in ends if not node.is_input)]
    return Block(
        name=_name(named or nodes),
        weight_bytes=sum(node.weight_bytes for node in computing),
        measurements=(
            Measurement(
                microbatch_size=microbatch_size,
                forward_s=sum(node.forward_ms for node in computing) / 1000,
                backward_s=sum(node.backward_ms for node in computing) / 1000,
                input_bytes=input_bytes,
                output_bytes=nodes[-1].output_bytes,
                activation_bytes=sum(node.output_bytes for node in computing),
            ),
        ),
    )


def _name(nodes: Sequence[Node]) -> str:
    """The node and what it does, or the first and the last node."""
    if len(nodes) > 1:
        return f"{nodes[0].name}..{nodes[-1].name}"
    return f"{nodes[0].name} {nodes[0].description.partition('(')[0]}".strip()
