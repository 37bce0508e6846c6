"""Replicas: the gradient exchange among the workers that hold the same stage."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def open_replica_group(stages: Sequence[int], rank: int) -> dist.ProcessGroup | None:
    """The group of the ranks that hold this rank's stage (`stages` by rank); None where it is alone."""
    members = [other for other, stage in enumerate(stages) if stage == stages[rank]]
    if len(members) == 1:
        return None
    description = f"replicas of stage {stages[rank]}"
    group: dist.ProcessGroup = dist.new_group(members, use_local_synchronization=True, group_desc=description)
    return group


def average(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The gradients' means over the group, as views of one flat buffer a dtype: one exchange each."""
    averaged: list[Tensor] = list(gradients)
    for dtype in sorted({g.dtype for g in gradients}, key=str):
        chosen = [i for i, g in enumerate(gradients) if g.dtype == dtype]
        flat = torch.cat([gradients[i].reshape(-1) for i in chosen])
        dist.all_reduce(flat, group=group)
        flat /= group.size()
        views = torch.split(flat, [gradients[i].numel() for i in chosen])
        for i, view in zip(chosen, views, strict=True):
            averaged[i] = view.view_as(gradients[i])
    return averaged
