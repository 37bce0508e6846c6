"""Among stages: what a worker agrees on with the other stages before an update."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan.errors import RunFailedError
from worker_agent.runtime.late import Late
from worker_agent.runtime.loss_scale import LossScale
from worker_agent.runtime.replicas import total
from worker_agent.runtime.tied import Stages
from worker_agent.runtime.weights import Weights

_ALMOST_NOTHING = 1e-6
"""What torch's clip_grad_norm_ adds to a norm before it divides by it."""


class AmongStages:
    """The exchanges of one worker with the other stages, and what follows from them for its next update.

    `homes` are the stages that hold each weight, `groups` this worker's partners by the stages that share some.
    `counted` says of every weight whether its gradient counts here: of replicas and of stages that share it, one does.
    Gradients of a norm above `clip_norm` are scaled to it. With a `loss_scale` gradients are divided by it, and updates
    left out where they overflowed.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        homes: Sequence[Stages],
        groups: Mapping[Stages, dist.ProcessGroup],
        counted: Sequence[bool],
        clip_norm: float | None,
        loss_scale: LossScale | None,
        device: torch.device,
        late: Late,
    ) -> None:
        self._weights = weights
        self._homes = tuple(homes)
        self._groups = groups
        self._counted = tuple(counted)
        self._clip_norm = clip_norm
        self._loss_scale = loss_scale
        self._device = device
        self._late = late

    def sum_tied(self, stages: Stages) -> None:
        """Replaces the gradients of the weights that these stages share by their sums, in the order of their names."""
        gradients = self._weights.gradients()
        shared = [index for index, its in enumerate(self._homes) if its == stages]
        shared.sort(key=lambda index: self._weights.slots[index].name)
        slots = self._weights.slots
        sums = total(
            [gradients[index] for index in shared], [slots[index].parameter for index in shared], self._groups[stages]
        )
        for index, gradient in zip(shared, sums, strict=True):
            gradients[index] = gradient
        self._weights.set_gradients(gradients)

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by."""
        return self._loss_scale.scale if self._loss_scale else 1.0

    def agree_on_norm(self) -> None:
        """Scales what the next update takes by the norm of the whole model's mean gradient, or has it left out.

        With a loss scale the host must know whether an update is left out, and waits for the norm. Without one the
        device scales by itself; where the norm is not a number a RunFailedError follows on all ranks.
        """
        pairs = zip(self._weights.gradients(), self._counted, strict=True)
        squares = squared_norm((g for g, counted in pairs if counted and g is not None), self._device)
        dist.all_reduce(squares)
        norm = squares.sqrt() / self.loss_scale
        if self._loss_scale is None:
            self._weights.scale_gradients(self._clipping(norm))
            self._late.add(norm, _require_finite)
        elif math.isfinite(float(norm)):
            self._weights.scale_gradients(self._clipping(norm) / self.loss_scale)
            self._loss_scale.grow()
        else:
            self._weights.skip_update()
            self._loss_scale.shrink()

    def _clipping(self, norm: Tensor) -> Tensor:
        most = 1.0 if self._clip_norm is None else self._clip_norm / (norm + _ALMOST_NOTHING)
        return torch.clamp(torch.as_tensor(most, dtype=norm.dtype, device=norm.device), max=1.0)


def _require_finite(norm: float) -> None:
    if not math.isfinite(norm):
        raise RunFailedError(f"the gradient's norm is {norm}: try a lower learning rate")


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of all squares in float64; a tensor's own norm is taken in float32 at least."""
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        at_least = torch.promote_types(gradient.dtype, torch.float32)
        squares += torch.linalg.vector_norm(gradient, dtype=at_least).double().square()
    return squares
