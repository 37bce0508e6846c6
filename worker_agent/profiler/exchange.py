"""Exchange: the time that averaging gradients among all ranks adds to the backward that completes them.

It runs a run's own code. The figure therefore includes all costs of an exchange: gradients are packed and unpacked,
the processor of a rank also moves its messages, and every rank waits for the slowest one. Work that overlaps the
backward without delaying it does not count.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from worker_agent.engine.replicas import Replicas, open_replica_group
from worker_agent.profiler.autocast import Autocast
from worker_agent.profiler.links import settle
from worker_agent.profiler.times import BlockCrossing, nothing_around, pass_backward, prepare_gradients, sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """The bytes of each block's gradients that took part, and the seconds that the exchange added."""

    bytes_by_block: tuple[int, ...]
    added_s: float


def measure_exchange(
    blocks: Sequence[nn.Module],
    forward: Callable[[int], list[BlockCrossing]],
    device: torch.device,
    *,
    rounds: int,
    autocast: Autocast | None = None,
) -> Exchanged | None:
    """The median backward with an exchange less the median one without, in turn; None where nothing is trained.

    Collective. `forward` is called untimed with the number of the round. The first round of each kind does not count:
    it makes connections, and detects when gradients are complete.
    """
    parameters = sampled(prepare_gradients(blocks))
    group = open_replica_group([0] * dist.get_world_size(), dist.get_rank())
    if not parameters or group is None:
        return None
    replicas = Replicas(group, parameters)
    alone_s, exchanging_s = [], []
    for number in range(rounds + 1):
        alone_s.append(_backward_s(forward(2 * number), device, autocast))
        exchanging_s.append(_backward_s(forward(2 * number + 1), device, autocast, replicas, parameters))
    left, sizes = set(parameters), []
    for block in blocks:  # a parameter that several share counts in the first
        own = left.intersection(block.parameters())
        sizes.append(sum(parameter.nbytes for parameter in own))
        left -= own
    added_s = max(median(exchanging_s[1:]) - median(alone_s[1:]), 0.0)
    return Exchanged(bytes_by_block=tuple(sizes), added_s=added_s)


def _backward_s(
    crossings: list[BlockCrossing],
    device: torch.device,
    autocast: Autocast | None,
    replicas: Replicas | None = None,
    parameters: Sequence[nn.Parameter] = (),
) -> float:
    """A backward that all ranks start together, with the exchange among `replicas` where they are given."""
    settle(device)
    dist.barrier()
    start_s = time.perf_counter()
    if replicas is None:
        pass_backward(crossings, nothing_around, autocast)
    else:
        with replicas.exchanging(0, parameters, None):
            pass_backward(crossings, nothing_around, autocast)
        replicas.gradients(0, own=False)
    settle(device)
    end_s = time.perf_counter()
    for parameter in parameters:  # the exchange has taken them
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return end_s - start_s
