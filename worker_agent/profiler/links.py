"""Links: bandwidth and latency between the ranks of a process group, by sending messages there and back.

Latency is half a tiny message's round trip. Bandwidth is that of big messages, without the latency: the median over
their sizes of bytes / (half a round trip - latency). The lower quartile of the repetitions counts, by the wall
clock: longer ones waited for a core, which is not the link's fault.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles

import torch
import torch.distributed as dist

from worker_agent.engine.channel import Inbox, Outbox
from worker_agent.engine.lines import PAYLOAD, ChannelEdge, Lines, open_lines

TINY_BYTES = 1024
BIG_BYTES = (2**20, 4 * 2**20, 16 * 2**20)
COPIED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link between two neighbouring ranks, in one direction."""

    bandwidth_bytes_per_s: float
    latency_s: float


def measure_links(device: torch.device, *, repeats: int = 10) -> Link | None:
    """The link from this rank to the next one; None on the last rank. Collective: one pair after the other.

    A rank that is alone measures how fast it copies its own memory, with no latency: the upper bound of a link to
    itself.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        copies_s = []
        for _ in range(repeats):
            settle(device)
            start_s = time.perf_counter()
            target.copy_(source)
            settle(device)
            copies_s.append(time.perf_counter() - start_s)
        return Link(bandwidth_bytes_per_s=COPIED_BYTES / _typical_s(copies_s), latency_s=0.0)

    edges = {ChannelEdge(left, left + 1, gradients=False) for left in range(ranks - 1)}
    lines = open_lines(edges | {edge.back for edge in edges}, rank)
    found = None
    for left in range(ranks - 1):
        if rank in (left, left + 1):
            edge = ChannelEdge(left, left + 1, gradients=False)
            latency_s = _one_way_s(TINY_BYTES, lines, edge, device, 5 * repeats)
            rates = []
            for size_bytes in BIG_BYTES:
                one_way_s = _one_way_s(size_bytes, lines, edge, device, repeats)
                rates.append(size_bytes / (one_way_s - latency_s if one_way_s > latency_s else one_way_s))
            if rank == left:
                found = Link(bandwidth_bytes_per_s=median(rates), latency_s=latency_s)
        dist.barrier()
    return found


def measure_handing_over(
    size_bytes: int, device: torch.device, *, before_each: Callable[[int], None], rounds: int = 10
) -> float | None:
    """Seconds that it costs the rank itself to hand a message over, or to take one that has arrived: the median.

    The first two ranks measure, through the channel of a run: one sends, the other takes. None on all others.
    Collective. `before_each` is called untimed with the number of the round, to compute as a run does in between:
    the message then finds neither code nor data in the caches. The first round does not count.
    """
    rank, edge = dist.get_rank(), ChannelEdge(0, 1, gradients=False)
    hosts = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", group_desc="hosts")
    lines = open_lines([edge], rank)
    message = torch.zeros(max(size_bytes, 1), dtype=torch.uint8, device=device)
    outbox = Outbox(edge, lines[edge], messages=rounds + 1, window=1) if rank == 0 else None
    inbox = Inbox(edge, lines[edge], messages=rounds + 1, device=device) if rank == 1 else None
    own_s = []
    for number in range(rounds + 1):
        before_each(number)
        settle(device)
        if outbox:
            start_s = time.perf_counter()
            outbox.send([message])
            own_s.append(time.perf_counter() - start_s)
        dist.barrier(hosts)
        if inbox:
            start_s = time.perf_counter()
            taken = inbox.receive()
            own_s.append(time.perf_counter() - start_s)
            inbox.release(taken)
    if outbox:
        outbox.flush()
    return median(own_s[1:]) if own_s else None


def _one_way_s(size_bytes: int, lines: Lines, edge: ChannelEdge, device: torch.device, repeats: int) -> float:
    """Half a round trip over an edge and back. The first trip, in which connections are made, does not count."""
    message = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    trips_s = []
    for _ in range(repeats + 1):
        settle(device)
        start_s = time.perf_counter()
        for one in (edge, edge.back):
            wire, tag = lines[one].tensors, one.tag(PAYLOAD)
            sends = one.source == dist.get_rank()
            work = wire.send(message, one.target, tag) if sends else wire.receive(message, one.source, tag)
            if work is not None:
                work.wait()
        settle(device)
        trips_s.append(time.perf_counter() - start_s)
    return _typical_s(trips_s[1:]) / 2


def _typical_s(repetitions_s: list[float]) -> float:
    return quantiles(repetitions_s, n=4, method="inclusive")[0]


def settle(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
