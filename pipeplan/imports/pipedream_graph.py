"""PipeDream's graph.txt -> Profile: a block for every node, an edge for everything that a node reads.

The file's lines are nodes, and indented edges:

    node2 -- Conv2d(3, 64) -- forward_compute_time=8.5, backward_compute_time=12.1, activation_size=64.0, ...
    <tab>node2 -- node3

Times are milliseconds, sizes bytes; an output of several tensors is a list of sizes, `[6291456.0; 131072.0]`. Nodes
of a partitioned graph end in one more field, `stage_id=0`, which is ignored.

As in PipeDream's own optimizer (SOSP 2019), `Input` nodes that read nothing stand for the data loader. It feeds any
stage, and its time is not the device's: these nodes are left out, and their bytes are input of the first block that
reads them. `__getitem__` nodes that nobody reads are left out too. A block's activations are its output.

The file does not name the size of its minibatch. Where one dimension of an output is known to be the minibatch, the
output's bytes tell it (`implied_microbatch_size`).
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeplan.costs.graph import graph_of, line_of, on_or_behind_a_cycle
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.profile import DTYPE_BYTES, Block, Device, Model, Profile
from pipeplan.errors import InvalidInputError, require
from pipeplan.planners.on_chain import chain_of

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_STAGE = re.compile(r"stage_id=-?\d+")

_FLATTENED = re.compile(r"View\((?:-1|\d+)\)")
"""`x.view(x.size(0), -1)`, a row a sample: PipeDream does not write the first size."""

_LINEAR = re.compile(r"Linear\(in_features=([1-9]\d*), .*\)")
_RECURRENT = re.compile(r"(?:LSTM|GRU|RNN)\(\d+, ([1-9]\d*)(?:, num_layers=([1-9]\d*))?(.*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An operation of the model: milliseconds, and the bytes of its weights and of the tensors of its output.

    `line` counts from 1.
    """

    line: int
    name: str
    description: str
    forward_ms: float
    backward_ms: float
    tensor_bytes: tuple[float, ...]
    weight_bytes: int

    @property
    def output_bytes(self) -> int:
        """All tensors of the output together."""
        return round(sum(self.tensor_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedGraph:
    """The nodes by name, in the order of the file, and for every node whose output it reads and who reads its own."""

    nodes: Mapping[str, Node]
    reads: Mapping[str, tuple[str, ...]]
    read_by: Mapping[str, tuple[str, ...]]


def parse_graph(text: str) -> ParsedGraph:
    """The graph of a file's text. Raises InvalidInputError naming the line."""
    nodes: dict[str, Node] = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if line[0].isspace():
            ends = line.strip().split(" -- ")
            _require(len(ends) == 2, number, "must be `node -- node` where it is indented", line.strip())
            edges.append((number, ends[0], ends[1]))
        else:
            node = _node(number, line)
            _require(node.name not in nodes, number, "must not define a node twice", node.name)
            nodes[node.name] = node
    require(bool(nodes), "file", "must hold at least one node", text[:60])
    for number, source, reader in edges:
        for end in (source, reader):
            _require(end in nodes, number, "must name a node that the file defines", end)
        _require(source != reader, number, "must join two nodes", source)

    reads: dict[str, list[str]] = {name: [] for name in nodes}
    read_by: dict[str, list[str]] = {name: [] for name in nodes}
    for source, reader in dict.fromkeys((source, reader) for _, source, reader in edges):
        reads[reader].append(source)
        read_by[source].append(reader)
    return ParsedGraph(
        nodes=nodes,
        reads={name: tuple(sources) for name, sources in reads.items()},
        read_by={name: tuple(readers) for name, readers in read_by.items()},
    )


def _node(number: int, line: str) -> Node:
    """A node's line; the amounts of a list are those of several tensors."""
    parts = line.strip().split(" -- ")
    if len(parts) > 3 and _STAGE.fullmatch(parts[-1]):
        parts.pop()
    _require(len(parts) >= 3, number, "must be `name -- description -- times and sizes`", line.strip())
    values: dict[str, tuple[float, ...]] = {}
    for item in parts[-1].split(", "):
        key, found, value = item.partition("=")
        _require(bool(found) and key in _FIELDS, number, f"must be one of {', '.join(_FIELDS)}, as key=value", item)
        rule, amounts = f"{key} must be a finite number of at least 0", []
        for text in value.strip("[]").split(";"):
            try:
                amount = float(text)
            except ValueError as error:
                raise InvalidInputError(f"line {number}", rule, text) from error
            _require(math.isfinite(amount) and amount >= 0, number, rule, text)
            amounts.append(amount)
        values[key] = tuple(amounts)
    for field in _FIELDS:
        _require(field in values, number, f"must give {field}", parts[-1])
    return Node(
        line=number,
        name=parts[0],
        description=" -- ".join(parts[1:-1]),
        forward_ms=sum(values["forward_compute_time"]),
        backward_ms=sum(values["backward_compute_time"]),
        tensor_bytes=values["activation_size"],
        weight_bytes=round(sum(values["parameter_size"])),
    )


def _require(condition: bool, number: int, rule: str, value: object) -> None:
    require(condition, f"line {number}", rule, value)


def implied_microbatch_size(graph: ParsedGraph, dtype: str) -> int:
    """The minibatch that the file was measured with. Raises InvalidInputError if the file does not imply one size.

    Two outputs have the minibatch and the model's own sizes as their only dimensions: what is flattened into rows for
    a `Linear`, minibatch x in_features; and the state of a recurrent layer, layers x minibatch x hidden size.
    """
    found = {elements / of_sample for elements, of_sample in _of_minibatches(graph, DTYPE_BYTES[dtype])}
    sizes = sorted(found)
    implied_once = len(sizes) == 1 and sizes[0] >= 1 and sizes[0].is_integer()
    implied = f"implies {' and '.join(f'{size:g}' for size in sizes)}" if sizes else "does not imply it"
    require(implied_once, "microbatch_size", f"must be given (--microbatch-size): the file {implied}", None)
    return int(sizes[0])


def _of_minibatches(graph: ParsedGraph, element_bytes: int) -> Iterator[tuple[float, int]]:
    """How many numbers a tensor with known dimensions has, and how many of them belong to a sample."""
    for node in graph.nodes.values():
        if linear := _LINEAR.fullmatch(node.description):
            for source in (graph.nodes[name] for name in graph.reads[node.name]):
                if _FLATTENED.fullmatch(source.description):
                    yield source.output_bytes / element_bytes, int(linear[1])
        elif (recurrent := _RECURRENT.fullmatch(node.description)) and len(node.tensor_bytes) > 1:
            layers = int(recurrent[2] or 1) * (2 if "bidirectional=True" in recurrent[3] else 1)
            yield node.tensor_bytes[1] / element_bytes, layers * int(recurrent[1])


def import_pipedream_graph(
    text: str,
    *,
    microbatch_size: int | None,
    model: Model,
    device: Device,
    dtype: str,
    single_tensor: bool = False,
) -> Profile:
    """The profile of a graph file; one measurement a block, at the size that the file was measured with.

    `microbatch_size` None stands for the size that the file implies. Blocks are in the order of
    `pipeplan.costs.graph.line_of`. With `single_tensor` the profile is a chain, whose blocks merge everything between
    two places that one tensor crosses. Raises InvalidInputError for any other file, with the line if possible.
    """
    graph = parse_graph(text)
    size = implied_microbatch_size(graph, dtype) if microbatch_size is None else microbatch_size
    nodes = _blocks_in_order(graph)
    place = {node.name: index for index, node in enumerate(nodes)}
    blocks = []
    fed: set[str] = set()
    for node in nodes:
        sources = [graph.nodes[name] for name in graph.reads[node.name]]
        loaders = {source.name for source in sources if _is_loader(graph, source)}
        read_before = loaders & fed
        fed |= loaders
        measurement = Measurement(
            microbatch_size=size,
            forward_s=node.forward_ms / 1000,
            backward_s=node.backward_ms / 1000,
            input_bytes=sum(source.output_bytes for source in sources if source.name not in read_before),
            output_bytes=node.output_bytes,
            activation_bytes=node.output_bytes,
        )
        name = f"{node.name} {node.description.partition('(')[0]}".strip()
        blocks.append(Block(name=name, weight_bytes=node.weight_bytes, measurements=(measurement,)))
    edges = tuple(
        (place[source], place[node.name])
        for node in nodes
        for source in sorted(graph.reads[node.name], key=lambda name: place.get(name, -1))
        if source in place
    )
    profile = Profile(model=model, device=device, dtype=dtype, blocks=tuple(blocks), edges=edges)
    return chain_of(profile) if single_tensor else profile


def _blocks_in_order(graph: ParsedGraph) -> list[Node]:
    """The nodes that are blocks, in the order in which a device computes them."""
    kept = [
        node
        for node in graph.nodes.values()
        if not _is_loader(graph, node)
        and not (node.description.startswith("__getitem__") and not graph.read_by[node.name])
    ]
    require(bool(kept), "file", "must hold at least one node besides its inputs", ", ".join(list(graph.nodes)[:5]))
    number = {node.name: index for index, node in enumerate(kept)}
    edges = [(number[s], number[node.name]) for node in kept for s in graph.reads[node.name] if s in number]
    numbered = graph_of(len(kept), edges)
    for index in on_or_behind_a_cycle(numbered):
        raise InvalidInputError(
            f"line {kept[index].line}", "must not be on a cycle, or downstream of one", kept[index].name
        )
    return [kept[index] for index in line_of(numbered, [node.output_bytes for node in kept]).order]


def _is_loader(graph: ParsedGraph, node: Node) -> bool:
    return node.description.startswith("Input") and not graph.reads[node.name]
