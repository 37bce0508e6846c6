"""Autocast: every block is profiled under it as it computes in a run, which casts each weight once a version."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from pipeplan.protocol.training import FIRST_LOSS_SCALE
from worker_agent.engine.casts import Casts


class Autocast:
    """Autocast's copies of the blocks' weights on a device, by block, and the loss scale of a run in this type."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device, dtype: torch.dtype) -> None:
        self.device_type = device.type
        self.dtype = dtype
        self._kept: list[dict[int, Tensor]] = [{} for _ in blocks]
        self.casts = tuple(Casts(block.parameters) for block in blocks)
        self.loss_scale = FIRST_LOSS_SCALE if dtype is torch.float16 else 1.0

    def kept_copy(self, block: int, tensor: Tensor) -> bool:
        """Whether a tensor in a block's graph is the copy of a weight, or a view of it. All microbatches share it."""
        weight = self.casts[block].weight_of(tensor)
        if weight is None or 2 * tensor.untyped_storage().nbytes() > weight.nbytes:
            return False
        self._kept[block][id(weight)] = weight
        return True

    def cast_anew(self, blocks: Sequence[int]) -> None:
        """Casts the weights that `kept_copy` has met, as every new version does."""
        for block in blocks:
            self.casts[block].forget()
            for weight in self._kept[block].values():
                weight.detach().to(self.dtype)


def entering(autocast: Autocast | None, block: int) -> AbstractContextManager[None]:
    """The context of a block's forward, which is none without autocast."""
    return autocast.casts[block].using(autocast.device_type, autocast.dtype) if autocast else nullcontext()
