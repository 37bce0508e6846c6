"""The lines of PipeDream's graph.txt: nodes, and indented edges.

    node2 -- Conv2d(3, 64) -- forward_compute_time=8.5, backward_compute_time=12.1, activation_size=64.0, ...
    <tab>node2 -- node3

Times are milliseconds, sizes bytes; an output of several tensors is a list of sizes, `[6291456.0; 131072.0]`. Nodes
of a partitioned graph end in one more field, `stage_id=0`, which is left aside.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner_service.core.errors import InvalidInputError, require

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_STAGE = re.compile(r"stage_id=-?\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An operation of the model: milliseconds, and the bytes of its output and its weights. `line` counts from 1."""

    line: int
    name: str
    description: str
    forward_ms: float
    backward_ms: float
    output_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The nodes by name, in the order of the file, and for every node whose output it reads and who reads its own."""

    nodes: Mapping[str, Node]
    reads: Mapping[str, tuple[str, ...]]
    read_by: Mapping[str, tuple[str, ...]]


def parse_graph(text: str) -> Graph:
    """The graph of a file's text. Raises InvalidInputError naming the line."""
    nodes: dict[str, Node] = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if line[0].isspace():
            edges.append((number, *_edge(number, line)))
        else:
            node = _node(number, line)
            _require(node.name not in nodes, number, "must not define a node twice", node.name)
            nodes[node.name] = node
    require(bool(nodes), "file", "must hold at least one node", text[:60])
    for number, source, reader in edges:
        for end in (source, reader):
            _require(end in nodes, number, "must name a node that the file defines", end)
        _require(source != reader, number, "must join two nodes", source)
    return _graph(nodes, [(source, reader) for _, source, reader in edges])


def _graph(nodes: Mapping[str, Node], edges: Sequence[tuple[str, str]]) -> Graph:
    reads: dict[str, list[str]] = {name: [] for name in nodes}
    read_by: dict[str, list[str]] = {name: [] for name in nodes}
    for source, reader in dict.fromkeys(edges):
        reads[reader].append(source)
        read_by[source].append(reader)
    return Graph(
        nodes=nodes,
        reads={name: tuple(sources) for name, sources in reads.items()},
        read_by={name: tuple(readers) for name, readers in read_by.items()},
    )


def _edge(number: int, line: str) -> tuple[str, str]:
    ends = line.strip().split(" -- ")
    _require(len(ends) == 2, number, "must be `node -- node` where it is indented", line.strip())
    return ends[0], ends[1]


def _node(number: int, line: str) -> Node:
    parts = line.strip().split(" -- ")
    if len(parts) > 3 and _STAGE.fullmatch(parts[-1]):
        parts.pop()
    _require(len(parts) >= 3, number, "must be `name -- description -- times and sizes`", line.strip())
    values = dict(_values(number, parts[-1]))
    for field in _FIELDS:
        _require(field in values, number, f"must give {field}", parts[-1])
    return Node(
        line=number,
        name=parts[0],
        description=" -- ".join(parts[1:-1]),
        forward_ms=values["forward_compute_time"],
        backward_ms=values["backward_compute_time"],
        output_bytes=round(values["activation_size"]),
        weight_bytes=round(values["parameter_size"]),
    )


def _values(number: int, text: str) -> Iterator[tuple[str, float]]:
    for item in text.split(", "):
        key, found, value = item.partition("=")
        _require(bool(found) and key in _FIELDS, number, f"must be one of {', '.join(_FIELDS)}, as key=value", item)
        yield key, sum(_amount(number, key, part) for part in value.strip("[]").split(";"))


def _amount(number: int, key: str, text: str) -> float:
    rule = f"{key} must be a finite number of at least 0"
    try:
        amount = float(text)
    except ValueError as error:
        raise InvalidInputError(f"line {number}", rule, text) from error
    _require(math.isfinite(amount) and amount >= 0, number, rule, text)
    return amount


def _require(condition: bool, number: int, rule: str, value: object) -> None:
    require(condition, f"line {number}", rule, value)
