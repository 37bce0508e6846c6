"""Tied: parameters that several stages hold. Each stage has a copy; their gradients are summed before every update.

All copies start from the same seed and take the same update of the same sum: they stay equal bit for bit, and the
checkpoint of every stage holds its copy under the parameter's one name in the whole model.
"""

from collections.abc import Iterable, Mapping

import torch.distributed as dist
from torch import nn

from pipeplan.documents.plan import Plan
from pipeplan.programs.program import Program
from worker_agent.models.chain import Chain

Stages = tuple[int, ...]


def stages_of(plan: Plan, chain: Chain) -> dict[nn.Parameter, Stages]:
    """The stages that hold each trainable parameter, in order."""
    homes: dict[nn.Parameter, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        own = {p for block in chain.blocks[stage.start : stage.stop] for p in block.parameters() if p.requires_grad}
        for parameter in own:
            homes.setdefault(parameter, []).append(index)
    return {parameter: tuple(stages) for parameter, stages in homes.items()}


def tied_groups(homes: Mapping[nn.Parameter, Stages]) -> tuple[Stages, ...]:
    """The groups of stages that share parameters."""
    return tuple(sorted({stages for stages in homes.values() if len(stages) > 1}))


def open_tied_groups(program: Program, tied: Iterable[Stages], rank: int) -> dict[Stages, dist.ProcessGroup]:
    """The process groups in which a rank sums shared parameters' gradients: one replica of each of the stages.

    Every rank makes all groups, in the same order.
    """
    ranks = {(stream.stage, stream.replica): stream.rank for stream in program.streams}
    own: dict[Stages, dist.ProcessGroup] = {}
    for stages in sorted(tied):
        for replica in range(program.pipeline.replicas[stages[0]]):
            members = [ranks[stage, replica] for stage in stages]
            group = dist.new_group(members, group_desc=f"stages {stages}, replica {replica}")
            if rank in members:
                own[stages] = group
    return own
