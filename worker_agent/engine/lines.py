"""Lines: which wires carry the messages between stages. Each directed edge has one for tensors and one for notices.

Two processes of one node read tensors from each other's memory (`same_node`). All others send them by gloo, where all
edges share the group of all ranks, and tags distinguish their messages: each further group would have its own
connections, and threads that wake up a hundred times a second. Both move only tensors in the host's memory: a GPU's are
copied to the host and back.

NCCL moves a GPU's tensors itself. It has no tags: every edge has a group for its tensors.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from worker_agent.engine.devices import let_gloo_wait
from worker_agent.engine.same_node import SameNode, open_same_node
from worker_agent.engine.wires import GroupWire, Wire

RECEIVES_AHEAD = 2

RIDING_BYTES, RIDING_NEAR_BYTES = 256 * 2**10, 64 * 2**10
"""Tensors of at most this many bytes travel in their notice, by gloo and on one node: copying them takes less time than
a separate message."""

TIMEOUT_S = 1800.0
"""How long torch waits for another rank by default."""

PAYLOAD, NOTICE, LAYOUT = range(3)
"""The parts of an edge."""


@dataclass(frozen=True, slots=True, order=True)
class ChannelEdge:
    """A directed edge between two ranks. Activations and gradients have edges of their own.

    So has every `stage` of the sender: ranks that hold several stages send each other tensors of several shapes.
    """

    source: int
    target: int
    gradients: bool
    stage: int = 0

    @property
    def back(self) -> "ChannelEdge":
        return ChannelEdge(self.target, self.source, gradients=not self.gradients, stage=self.stage)

    def other(self, rank: int) -> int:
        return self.target if rank == self.source else self.source

    def tag(self, part: int) -> int:
        """Distinguishes its messages from those of other edges between the two ranks, and its parts from each other."""
        return 3 * (2 * self.stage + self.gradients) + part


@dataclass(frozen=True, slots=True)
class ChannelLines:
    """The lines of an edge: one for its tensors, and one for their notices, which go from host to host.

    With `through_host` tensors also travel from host to host, and up to `riding_bytes` of them in their notice. `ahead`
    is how many of them may be posted before their size is known.
    """

    tensors: Wire
    notices: Wire
    through_host: bool = True
    ahead: int = RECEIVES_AHEAD
    riding_bytes: int = 0


Lines = Mapping[ChannelEdge, ChannelLines]
"""A rank's lines, by their edges."""


def open_lines(edges: Iterable[ChannelEdge], rank: int, *, timeout_s: float = TIMEOUT_S) -> Lines:
    """The lines of the edges that touch a rank. Every rank makes all groups, in the same order.

    Host tensors go through memory between ranks of one node, else by gloo. `timeout_s` bounds
    every wait for another rank.

    NCCL receives a message into memory of exactly its size, so the size must be known before a receive is posted. The
    first use of an NCCL group waits for the other rank. Therefore all edges meet here, before any instruction.
    """
    edges = sorted(edges)
    own = [edge for edge in edges if rank in (edge.source, edge.target)]
    by_nccl = dist.get_backend() == "nccl"
    hosts = _made(dist.new_group(backend="gloo", group_desc="notices") if by_nccl else dist.group.WORLD)
    if not by_nccl:
        let_gloo_wait()
    near = open_same_node(sorted({edge.other(rank) for edge in own}), rank, hosts, timeout_s)
    far = GroupWire(hosts)
    host_wires: dict[ChannelEdge, Wire] = {edge: near if near.reaches(edge.other(rank)) else far for edge in own}
    if not by_nccl:
        riding = {near: RIDING_NEAR_BYTES, far: RIDING_BYTES}
        return {edge: ChannelLines(wire, wire, riding_bytes=riding[wire]) for edge, wire in host_wires.items()}
    of_edges = {}
    for edge in edges:
        group = dist.new_group([edge.source, edge.target], group_desc=str(edge))
        if edge in host_wires:
            of_edges[edge] = ChannelLines(GroupWire(_made(group)), host_wires[edge], through_host=False, ahead=0)
    meet(of_edges, rank, torch.device("cuda", torch.cuda.current_device()))
    return of_edges


def near_ranks(lines: Lines, rank: int) -> tuple[int, ...]:
    """The ranks whose memory this one reads, as they read its."""
    near = {edge.other(rank) for edge, of_edge in lines.items() if isinstance(of_edge.notices, SameNode)}
    return tuple(sorted(near))


def meet(lines: Mapping[ChannelEdge, ChannelLines], rank: int, device: torch.device) -> None:
    """Sends a byte over every edge, in an order that all ranks share: no two ranks wait for each other."""
    for edge in sorted(lines):
        wire, byte = lines[edge].tensors, torch.zeros(1, dtype=torch.uint8, device=device)
        sends = edge.source == rank
        work = wire.send(byte, edge.target, edge.tag(PAYLOAD)) if sends else None
        work = work if sends else wire.receive(byte, edge.source, edge.tag(PAYLOAD))
        if work is not None:
            work.wait()


def _made(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None, "this rank is in the group, and the ranks have met"
    return group
