"""Noted: what a stage's modules have noted about the data, as a checkpoint needs it.

A schedule without a flush forwards microbatches of later batches before the update that ends this one. What batch norm
noted of them is not of the checkpoint's batches: a resumed run forwards them again.
"""

from collections.abc import Callable, Mapping

from torch import Tensor


class Noted:
    """The buffers of one stage: live, and as they were at the end of batches whose checkpoint is still to come.

    Batches are counted from training's start, of which `done` were before this run. `is_due` says of a number of
    batches whether this worker writes a checkpoint after them.
    """

    def __init__(self, buffers: Mapping[str, Tensor], done: int, is_due: Callable[[int], bool]) -> None:
        self.live = buffers
        self._taken = done
        self._is_due = is_due
        self._at_end: dict[int, Mapping[str, Tensor]] = {}

    def forward_of(self, batch: int) -> None:
        """A microbatch of this batch (from 0) is forwarded next. Keeps what that would change."""
        if self.live and batch > self._taken and batch not in self._at_end and self._is_due(batch):
            self._at_end[batch] = {name: tensor.detach().clone() for name, tensor in self.live.items()}

    def take(self, batches: int) -> Mapping[str, Tensor]:
        """What the checkpoint after so many batches holds."""
        self._taken = batches
        return self._at_end.pop(batches, self.live)
