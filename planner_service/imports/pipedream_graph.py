"""PipeDream's graph.txt (see `graph_lines`) -> Profile: a block a node, an edge for everything that one reads.

As PipeDream's own optimizer (SOSP 2019) does it: `Input` nodes that read nothing stand for the data loader, which feeds
any stage, and their time is not the device's; they are left out, their bytes are the input of the first block that
reads them. `__getitem__` nodes that nobody reads are left out too. A block's activations are its output.
"""

from collections.abc import Mapping, Sequence

from planner_service.core.errors import InvalidInputError, require
from planner_service.core.graph import graph_of, line_of, on_or_behind_a_cycle
from planner_service.core.planner.on_chain import chain_of
from planner_service.core.profile import Block, Device, Measurement, Model, Profile
from planner_service.imports.graph_lines import Graph, Node, parse_graph


def import_pipedream_graph(
    text: str,
    *,
    microbatch_size: int,
    model: Model,
    device: Device,
    dtype: str,
    single_tensor: bool = False,
) -> Profile:
    """The profile of a graph file; one measurement a block, at the size that the file was measured with.

    Blocks stand in the order of `core.graph.line_of`. With `single_tensor` the profile is a chain, whose blocks are
    what lies between two places that one tensor crosses. Raises InvalidInputError, naming the line where it can, for
    what is not such a file.
    """
    graph = parse_graph(text)
    nodes = _in_order(graph, _kept(graph))
    place = {node.name: index for index, node in enumerate(nodes)}
    fed = _fed(graph, nodes)
    profile = Profile(
        model=model,
        device=device,
        dtype=dtype,
        blocks=tuple(_block(graph, node, fed[node.name], microbatch_size) for node in nodes),
        edges=tuple(
            (place[source], place[node.name])
            for node in nodes
            for source in sorted(graph.reads[node.name], key=lambda name: place.get(name, -1))
            if source in place
        ),
    )
    return chain_of(profile) if single_tensor else profile


def _kept(graph: Graph) -> list[Node]:
    kept = [node for node in graph.nodes.values() if not (_is_loader(graph, node) or _is_unread_item(graph, node))]
    require(bool(kept), "file", "must hold at least one node besides its inputs", ", ".join(list(graph.nodes)[:5]))
    return kept


def _is_loader(graph: Graph, node: Node) -> bool:
    return node.description.startswith("Input") and not graph.reads[node.name]


def _is_unread_item(graph: Graph, node: Node) -> bool:
    return node.description.startswith("__getitem__") and not graph.read_by[node.name]


def _in_order(graph: Graph, kept: Sequence[Node]) -> list[Node]:
    number = {node.name: index for index, node in enumerate(kept)}
    edges = [(number[s], number[node.name]) for node in kept for s in graph.reads[node.name] if s in number]
    numbered = graph_of(len(kept), edges)
    for index in on_or_behind_a_cycle(numbered):
        raise InvalidInputError(f"line {kept[index].line}", "must not be on a cycle, or behind one", kept[index].name)
    return [kept[index] for index in line_of(numbered, [node.output_bytes for node in kept]).order]


def _fed(graph: Graph, nodes: Sequence[Node]) -> Mapping[str, int]:
    """By node the bytes of the data loader's tensors that it is the first to read."""
    fed = dict.fromkeys((node.name for node in nodes), 0)
    seen: set[str] = set()
    for node in nodes:
        for source in graph.reads[node.name]:
            if _is_loader(graph, graph.nodes[source]) and source not in seen:
                seen.add(source)
                fed[node.name] += graph.nodes[source].output_bytes
    return fed


def _block(graph: Graph, node: Node, fed_bytes: int, microbatch_size: int) -> Block:
    read = [graph.nodes[source] for source in graph.reads[node.name]]
    return Block(
        name=f"{node.name} {node.description.partition('(')[0]}".strip(),
        weight_bytes=node.weight_bytes,
        measurements=(
            Measurement(
                microbatch_size=microbatch_size,
                forward_s=node.forward_ms / 1000,
                backward_s=node.backward_ms / 1000,
                input_bytes=fed_bytes + sum(other.output_bytes for other in read if not _is_loader(graph, other)),
                output_bytes=node.output_bytes,
                activation_bytes=node.output_bytes,
            ),
        ),
    )
