"""Links: bandwidth and latency between the ranks of a process group, by sending messages there and back.

Latency is half a tiny message's round trip. Bandwidth is that of big messages, without the latency: the median over
their sizes of bytes / (half a round trip - latency). Of the repetitions, on the wall clock, the lower quartile counts:
above it are those that waited for a core, which is not the link's doing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import Tensor

from worker_agent.engine.replicas import average

TINY_BYTES = 1024
BIG_BYTES = (2**20, 4 * 2**20, 16 * 2**20)
COPIED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What lies between two neighbouring ranks, one way."""

    bandwidth_bytes_per_s: float
    latency_s: float


def measure_links(device: torch.device, *, repeats: int = 10) -> Link | None:
    """The link from this rank to the next one; None on the last rank. Collective: one pair after the other.

    A rank that is alone measures how fast it copies its own memory, with no latency: the most that a link to itself
    could do.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return Link(bandwidth_bytes_per_s=_copy_bytes_per_s(device, repeats), latency_s=0.0)
    found = None
    for left in range(ranks - 1):
        if rank in (left, left + 1):
            link = _measure_pair(left, left + 1, device, repeats)
            found = link if rank == left else found
        dist.barrier()
    return found


def _measure_pair(left: int, right: int, device: torch.device, repeats: int) -> Link:
    latency_s = _one_way_s(TINY_BYTES, left, right, device, 5 * repeats)
    rates = []
    for size_bytes in BIG_BYTES:
        one_way_s = _one_way_s(size_bytes, left, right, device, repeats)
        rates.append(size_bytes / (one_way_s - latency_s if one_way_s > latency_s else one_way_s))
    return Link(bandwidth_bytes_per_s=median(rates), latency_s=latency_s)


def _one_way_s(size_bytes: int, left: int, right: int, device: torch.device, repeats: int) -> float:
    """Half a round trip of a message; the first trip, in which connections are made, is not counted."""
    message = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    trips_s = []
    for _ in range(repeats + 1):
        _settle(device)
        start_s = time.perf_counter()
        _round_trip(message, left, right)
        _settle(device)
        trips_s.append(time.perf_counter() - start_s)
    return _typical_s(trips_s[1:]) / 2


def _round_trip(message: Tensor, left: int, right: int) -> None:
    if dist.get_rank() == left:
        dist.send(message, right)
        dist.recv(message, right)
    else:
        dist.recv(message, left)
        dist.send(message, left)


def measure_handing_over(size_bytes: int, device: torch.device, *, repeats: int = 20) -> float | None:
    """Seconds that handing a message over, or taking one that has arrived, costs the rank itself.

    The first two ranks measure: one sends, the other takes. None on all others. Collective.
    """
    message = torch.zeros(max(size_bytes, 1), dtype=torch.uint8, device=device)
    taken_s = [_hand_over_s(message) for _ in range(repeats + 1)]
    found_s = [seconds for seconds in taken_s[1:] if seconds is not None]
    return median(found_s) if found_s else None


def _hand_over_s(message: Tensor) -> float | None:
    """One message from rank 0 to rank 1. The receive is posted before, and waited for after the message is through."""
    rank = dist.get_rank()
    expected = dist.irecv(message, 0) if rank == 1 else None
    _settle(message.device)
    dist.barrier()
    start_s = time.perf_counter()
    sent = dist.isend(message, 1) if rank == 0 else None
    sending_s = time.perf_counter() - start_s
    if sent is not None:
        sent.wait()
    dist.barrier()
    start_s = time.perf_counter()
    if expected is not None:
        expected.wait()
    taking_s = time.perf_counter() - start_s
    dist.barrier()
    return {0: sending_s, 1: taking_s}.get(rank)


def measure_exchange(tensors: Sequence[Tensor], device: torch.device, *, repeats: int = 5) -> float:
    """Seconds in which all ranks average these tensors, as a stage's replicas do with gradients. Collective."""
    everybody = dist.new_group(group_desc="all ranks")
    seconds = []
    for _ in range(repeats + 1):
        _settle(device)
        dist.barrier()
        start_s = time.perf_counter()
        average(tensors, everybody)
        _settle(device)
        seconds.append(time.perf_counter() - start_s)
    return _typical_s(seconds[1:])


def _copy_bytes_per_s(device: torch.device, repeats: int) -> float:
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copies_s = []
    for _ in range(repeats):
        _settle(device)
        start_s = time.perf_counter()
        target.copy_(source)
        _settle(device)
        copies_s.append(time.perf_counter() - start_s)
    return COPIED_BYTES / _typical_s(copies_s)


def _typical_s(repetitions_s: list[float]) -> float:
    return quantiles(repetitions_s, n=4, method="inclusive")[0]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
