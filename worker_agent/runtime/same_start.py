"""Same start: replicas of a stage, and stages that share weights, begin a run with the same values.

Each process builds its own copy. A factory that draws random numbers from anything but what `build_model` seeds gives
each copy other weights: their gradients would be averaged, and every copy would train something else.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan.errors import require
from worker_agent.engine.weights import Weights
from worker_agent.runtime.among_stages import Part, Stages

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Copy(Protocol):
    """A rank's copy of a stage."""

    weights: Weights
    among_stages: Part


def require_same_start(
    copies: Sequence[Copy], replicas: dist.ProcessGroup | None, tied: Mapping[Stages, dist.ProcessGroup]
) -> None:
    """Raises InvalidInputError, in all processes of a group, for the first weight that differs among them."""
    if replicas is not None:
        _require_same([slot for copy in copies for slot in _weights_of(copy)], replicas)
    for stages, group in sorted(tied.items()):
        named: dict[str, Tensor] = {}
        for copy in copies:
            homes = zip(_weights_of(copy), copy.among_stages.homes, strict=True)
            named |= {name: weight for (name, weight), home in homes if home == stages}
        _require_same(sorted(named.items()), group)


def _weights_of(copy: Copy) -> Iterable[tuple[str, Tensor]]:
    return [(slot.name, slot.parameter) for slot in copy.weights.slots]


def _require_same(named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    if not named:
        return
    sums = torch.stack([_sum_of_bits(weight.detach()) for _, weight in named])
    least, most = sums.clone(), sums
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    differs = (least != most).nonzero().flatten().tolist()
    rule = "must give a weight the same values in every process: random numbers from torch, numpy.random or random"
    require(not differs, "model", rule, named[differs[0]][0] if differs else None)


def _sum_of_bits(weight: Tensor) -> Tensor:
    """The sum of the elements' bits as integers: equal for equal weights, and hardly ever for others."""
    return weight.contiguous().view(_INTEGERS[weight.element_size()]).sum(dtype=torch.int64)
