"""Loss scale: keeps small gradients above what float16 can hold (Micikevicius et al. 2018, section 3.2).

The loss is multiplied by it, the gradients are divided by it before the update. An update whose gradients overflowed is
left out, on all stages, and the scale is halved; after many good ones it is doubled.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeplan.errors import RunFailedError, require

INITIAL = 2.0**16
GROWTH_STEPS = 2000
"""So many good updates in a row double the scale. With the initial one, the numbers of torch's GradScaler."""

LEAST = 2.0**-16
"""No loss has to be made so small: a gradient that still overflows is not a matter of scale."""


class LossScale:
    """The scale of the loss of the batches that come, the same on every rank; part of a checkpoint."""

    def __init__(self, initial: float) -> None:
        self.scale = initial
        self._good_steps = 0

    def grow(self) -> None:
        """After an update with finite gradients."""
        self._good_steps += 1
        if self._good_steps == GROWTH_STEPS:
            self.scale, self._good_steps = 2.0 * self.scale, 0

    def shrink(self) -> None:
        """After one that was left out. Raises RunFailedError if that leads nowhere."""
        self.scale, self._good_steps = self.scale / 2.0, 0
        if self.scale < LEAST:
            raise RunFailedError(f"gradients overflow with a loss scale of {2.0 * self.scale:g}: they are not finite")

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it."""
        numbers = {"scale": self.scale, "good_steps": float(self._good_steps)}
        return {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets it to what `tensors` gave. Raises InvalidInputError for a checkpoint without one."""
        require("scale" in tensors, "resume", "must be a checkpoint of a run with a loss scale", sorted(tensors))
        self.scale, self._good_steps = float(tensors["scale"]), int(tensors["good_steps"])
