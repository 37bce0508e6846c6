"""Lines: which wires carry the messages between stages. Each directed edge has one for tensors and one for notices.

With gloo all edges share the group of all ranks, and tags tell their messages apart. Each further group would have its
own connections, and threads that wake up a hundred times a second. NCCL has no tags: there every edge has a group for
its tensors.

Gloo moves only tensors in the host's memory: a GPU's tensors are copied to the host and back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from worker_agent.engine.devices import let_gloo_wait
from worker_agent.engine.wires import GroupWire, Wire

RECEIVES_AHEAD = 2

RIDING_BYTES = 256 * 2**10
"""Tensors of at most this many bytes travel in their notice: copying them takes less time than a separate message."""

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


def open_lines(edges: Iterable[ChannelEdge], rank: int) -> Lines:
    """The lines of the edges that touch a rank. Every rank makes all groups, in the same order.

    NCCL receives a message into memory of exactly its size, so the size must be known before a receive is posted. The
    first use of an NCCL group waits for the other rank. Therefore all edges meet here, before any instruction.
    """
    if dist.get_backend() != "nccl":
        let_gloo_wait()
        world = GroupWire(_made(dist.group.WORLD))
        lines = ChannelLines(world, world, riding_bytes=RIDING_BYTES)
        return {edge: lines for edge in edges if rank in (edge.source, edge.target)}
    notices = GroupWire(_made(dist.new_group(backend="gloo", group_desc="notices")))
    of_edges = {}
    for edge in sorted(edges):
        group = dist.new_group([edge.source, edge.target], group_desc=str(edge))
        if rank in (edge.source, edge.target):
            of_edges[edge] = ChannelLines(GroupWire(_made(group)), notices, through_host=False, ahead=0)
    meet(of_edges, rank, torch.device("cuda", torch.cuda.current_device()))
    return of_edges


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
