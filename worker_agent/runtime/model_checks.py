"""Model checks: a run's model is the plan's, and all copies of its weights begin with the same values.

Each process builds its own copy. If a factory draws random numbers from a source that `build_model` does not seed, the
copies have different weights. Their gradients would be averaged, and every copy would train another model. The first
and the last stage read the data for themselves, too: of data that differ, targets would be those of other inputs.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan.costs.tied import copied_bytes
from pipeplan.errors import require
from worker_agent.models.chain import Chain
from worker_agent.models.values import parts_of
from worker_agent.runtime.among_stages import TiedGroups
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.rank_part import RankPart

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_match(job: RunJob, chain: Chain) -> None:
    """Raises InvalidInputError if the plan is for another model.

    The number of blocks must agree. If the plan's profile is of the same factory or family, the bytes of the stages'
    weights must agree as well, because they follow from the options.
    """
    blocks = job.plan.stages[-1].stop
    require(len(chain.blocks) == blocks, "model", f"must have the plan's {blocks} blocks", len(chain.blocks))
    trained = any(parameter.requires_grad for parameter in chain.root.parameters())
    require(trained, "model", "must have a weight that is trained: all are frozen", job.model)
    named = {text.partition("?")[0] for text in (job.model, chain.spec)}
    profiled = (job.plan.model.spec or "").partition("?")[0] in named
    every, frozen = chain.weight_bytes(), chain.frozen_bytes()
    copies = chain.tied_weights() if job.plan.tied else ()  # not every profile has them
    for index, (stage, costs) in enumerate(zip(job.plan.stages, job.plan.costs, strict=True)):
        copied = sum(copied_bytes(copies, stage.start, stage.stop))
        whole = sum(every[stage.start : stage.stop]) + copied  # a profile of an earlier version counts frozen weights
        own, planned = whole - sum(frozen[stage.start : stage.stop]), costs.version_bytes
        rule = (
            f"must have the plan's {planned} bytes of weights in stage {index}; the plan is for {job.plan.model.spec}"
        )
        require(not profiled or planned in (0, own, whole), "model", rule, own)


def require_same_start(copies: Sequence[RankPart], replicas: dist.ProcessGroup | None, tied: TiedGroups) -> None:
    """Raises InvalidInputError, in all processes of a group, for the first weight that differs among them."""
    if replicas is not None:
        held = [named for copy in copies for named in (*_weights_of(copy), *copy.noted.live.items())]
        _require_same(held, replicas)
    for stages, group in sorted(tied.items()):
        named: dict[str, Tensor] = {}
        for copy in copies:
            homes = zip(_weights_of(copy), copy.among_stages.homes, strict=True)
            named |= {name: weight for (name, weight), home in homes if home == stages}
        _require_same(sorted(named.items()), group)


def require_same_data(digests: Sequence[tuple[int, bytes]], name: str) -> None:
    """Raises InvalidInputError, in all processes, if one has read other inputs than another as the same microbatch.

    `digests` are numbers of microbatches that this process has read, with the digests of their inputs.
    """
    every: list[Sequence[tuple[int, bytes]]] = [()] * dist.get_world_size()
    dist.all_gather_object(every, digests)
    rule = (
        "must give the same inputs in every process (random numbers from torch, numpy.random or random, or from seed)"
    )
    known: dict[int, bytes] = {}
    for number, digest in sorted(pair for pairs in every for pair in pairs):
        same = known.setdefault(number, digest) == digest
        require(same, "data", f"{rule}, and microbatch {number} differs", name)


def _weights_of(copy: RankPart) -> list[tuple[str, Tensor]]:
    return [(slot.name, slot.parameter) for slot in copy.weights.slots]


def _require_same(named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    if not named:
        return
    bits = [_bits(weight.detach()) for _, weight in named]
    most = torch.stack(bits)
    least = most.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    differs = (least != most).nonzero().flatten().tolist()
    rule = "must give a weight the same values in every process: random numbers from torch, numpy.random or random"
    require(not differs, "model", rule, named[differs[0]][0] if differs else None)


def _bits(weight: Tensor) -> Tensor:
    """The sum of its bits as whole numbers: equal for equal weights, and hardly ever for others."""
    sums = [torch.zeros((), dtype=torch.int64, device=weight.device if weight.device.type != "meta" else "cpu")]
    for part in parts_of(weight) or ():
        plain = part.int_repr() if part.is_quantized else torch.view_as_real(part) if part.is_complex() else part
        sums.append(plain.contiguous().view(_INTEGERS[plain.element_size()]).sum(dtype=torch.int64))
    return torch.stack(sums).sum()
