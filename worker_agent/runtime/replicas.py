"""Replicas: the gradient exchange among the workers that hold the same stage, or that share weights."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def open_replica_group(stages: Sequence[int], rank: int) -> dist.ProcessGroup | None:
    """The group of the ranks that hold this rank's stage (`stages` by rank); None where it is alone.

    Every rank makes all groups, in the same order.
    """
    own: dist.ProcessGroup | None = None
    for stage in sorted(set(stages)):
        members = [other for other, its in enumerate(stages) if its == stage]
        if len(members) > 1:
            group = dist.new_group(members, group_desc=f"replicas of stage {stage}")
            own = group if rank in members else own
    return own


def average(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The gradients' means over the group, as views of one flat buffer a dtype: one exchange each."""
    return _exchange(gradients, group, shares=group.size())


def total(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The gradients' sums over the group, the same bit for bit on all of it."""
    return _exchange(gradients, group, shares=1)


def _exchange(gradients: Sequence[Tensor], group: dist.ProcessGroup, *, shares: int) -> list[Tensor]:
    exchanged: list[Tensor] = list(gradients)
    for dtype in sorted({g.dtype for g in gradients}, key=str):
        chosen = [i for i, g in enumerate(gradients) if g.dtype == dtype]
        flat = torch.cat([gradients[i].reshape(-1) for i in chosen])
        dist.all_reduce(flat, group=group)
        if shares > 1:
            flat /= shares
        views = torch.split(flat, [gradients[i].numel() for i in chosen])
        for i, view in zip(chosen, views, strict=True):
            exchanged[i] = view.view_as(gradients[i])
    return exchanged
