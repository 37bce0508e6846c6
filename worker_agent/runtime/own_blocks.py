"""Own blocks: the blocks of each stage of a rank, with copies of the weights that several of these stages share.

Every stage trains its own copy of a shared weight, whether the other stage is on another rank or on this one, because
each stage has its own weight versions, optimizer states and checkpoint. The copies keep the name of the weight in the
whole model.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipeplan.documents.plan import Plan
from worker_agent.models.chain import Chain
from worker_agent.runtime.among_stages import Stages, stages_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnBlocks:
    """The blocks of one stage, the names of their tensors in the whole model, and the stages that hold each weight."""

    blocks: tuple[nn.Module, ...]
    names: Mapping[Tensor, str]
    homes: Mapping[nn.Parameter, Stages]


def own_blocks(plan: Plan, chain: Chain, stages: Sequence[int]) -> tuple[OwnBlocks, ...]:
    """The blocks of these stages, which are on one rank, with their contents. Changes the chain's modules."""
    for stage in stages:
        chain.materialise(plan.stages[stage].start, plan.stages[stage].stop)
    names, homes = chain.names(), stages_of(plan, chain)

    found: list[OwnBlocks] = []
    modules: set[nn.Module] = set()
    for stage in stages:
        blocks = chain.blocks[plan.stages[stage].start : plan.stages[stage].stop]
        earlier = {p for before in found for block in before.blocks for p in block.parameters() if p.requires_grad}
        shared = earlier.intersection(p for block in blocks for p in block.parameters())
        copies = {weight: nn.Parameter(weight.detach().clone()) for weight in shared}
        for weight, copy in copies.items():
            copy.__dict__.update(weight.__dict__)
        found.append(
            OwnBlocks(
                blocks=_with_copies(blocks, copies, modules),
                names=names | {copy: names[weight] for weight, copy in copies.items()},
                homes=homes | {copy: homes[weight] for weight, copy in copies.items()},
            )
        )
        modules.update(module for block in blocks for module in block.modules())
    return tuple(found)


def _with_copies(
    blocks: Sequence[nn.Module], copies: Mapping[nn.Parameter, nn.Parameter], others: set[nn.Module]
) -> tuple[nn.Module, ...]:
    """The blocks with copies in place of some weights.

    It also copies the modules that `others` holds as well. All other tensors stay the same objects.
    """
    tensors = {tensor for block in blocks for tensor in (*block.parameters(), *block.buffers())}
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors} | {id(p): copy for p, copy in copies.items()}

    def own(module: nn.Module) -> nn.Module:
        if not any(p in copies for p in module.parameters()):
            return module
        if module in others:
            return deepcopy(module, memo)
        for name, part in list(module.named_children()):
            setattr(module, name, own(part))
        for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if weight in copies:
                setattr(module, name, copies[weight])  # not through `__dict__`: some modules intercept assignments
        return module

    return tuple(own(block) for block in blocks)
