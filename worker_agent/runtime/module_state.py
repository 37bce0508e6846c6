"""Module state: what modules keep beside their parameters, in buffers, and note about the data that passes them.

`Noted` is what a checkpoint needs of it. A schedule without a flush forwards microbatches of later batches before the
update that ends this one. What batch norm noted of them is not of the checkpoint's batches: a resumed run forwards them
again.

`Buffers` is what recomputation needs of it. A forward that runs a second time finds the buffers as the first one did:
those of spectral norm change with every forward, and scale the weight. What the second one writes goes into copies:
every microbatch is noted once.

`MinibatchStatistics` makes batch norm's running means and variances those of whole minibatches, as GPipe does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Snapshot = tuple[Tensor | None, ...]
"""What the buffers were at one moment, in their order."""


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


@dataclass(slots=True)
class _Copied:
    """A buffer as it was last seen, and its copy. `silent`: it changes without being counted, as through `.data`."""

    buffer: Tensor
    version: int
    copy: Tensor
    silent: bool | None = None

    def holds(self, buffer: Tensor) -> bool:
        """Whether the copy is what the buffer is now. The first time that it seems so, the contents are compared."""
        if self.buffer is not buffer or self.version != buffer._version or self.silent:
            return False
        if self.silent is None:
            self.silent = not torch.equal(self.copy, buffer)
        return not self.silent


class Buffers:
    """The buffers of some blocks. Snapshots share the copy of a buffer for as long as nothing changes it."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        modules = dict.fromkeys(module for block in blocks for module in block.modules())
        self._places = [(module._buffers, name) for module in modules for name in module._buffers]
        self._copied: dict[int, _Copied] = {}

    @torch.no_grad()
    def snapshot(self) -> Snapshot:
        """The buffers now."""
        copies: dict[Tensor, Tensor] = {}  # a buffer that several modules hold is copied once
        snapshot: list[Tensor | None] = []
        for place, (buffers, name) in enumerate(self._places):
            buffer = buffers[name]
            if buffer is not None and buffer not in copies:
                known = self._copied.get(place)
                if known is None or not known.holds(buffer):
                    silent = known.silent if known is not None and known.buffer is buffer else None
                    known = self._copied[place] = _Copied(buffer, buffer._version, buffer.clone(), silent)
                copies[buffer] = known.copy
            snapshot.append(None if buffer is None else copies[buffer])
        return tuple(snapshot)

    @contextmanager
    def as_of(self, snapshot: Snapshot) -> Iterator[None]:
        """While it is active, the modules' buffers are copies of a snapshot's; afterwards they are as they were."""
        own = [buffers[name] for buffers, name in self._places]
        copies: dict[int, Tensor] = {}
        for (buffers, name), then in zip(self._places, snapshot, strict=True):
            buffers[name] = None if then is None else copies.setdefault(id(then), then.clone())
        try:
            yield
        finally:
            for (buffers, name), now in zip(self._places, own, strict=True):
                buffers[name] = now


@dataclass(slots=True)
class Moments:
    """How many values a channel has had, their means, and the sums of their squared distances from these."""

    count: float
    means: Tensor
    squares: Tensor

    def add(self, count: float, means: Tensor, squares: Tensor) -> None:
        """Adds those of other values (Chan, Golub and LeVeque 1979)."""
        total, apart = self.count + count, means - self.means
        self.means = self.means + apart * (count / total)
        self.squares = self.squares + squares + apart.square() * (self.count * count / total)
        self.count = total

    def merge(self, group: dist.ProcessGroup) -> None:
        """Adds the moments of all others in the group; all have the same ones afterwards."""
        sums = torch.cat([self.means * self.count, self.means.new_tensor([self.count])])
        dist.all_reduce(sums, group=group)
        means = sums[:-1] / sums[-1]
        squares = self.squares + (self.means - means).square() * self.count
        dist.all_reduce(squares, group=group)
        self.count, self.means, self.squares = float(sums[-1]), means, squares


class MinibatchStatistics:
    """Running statistics of batch norm over whole minibatches; a microbatch is still normalised by its own statistics.

    GPipe normalises by the microbatch in training, and keeps the moving averages that an evaluation uses over the whole
    minibatch (Huang et al. 2019, section 2). A minibatch is that of all replicas.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._moments: dict[_BatchNorm, Moments] = {}
        self._noting = False
        self._own: dict[_BatchNorm, tuple[dict[str, Tensor | None], float | None]] = {}
        modules = dict.fromkeys(module for block in blocks for module in block.modules())  # one may be in several
        self._norms = [m for m in modules if isinstance(m, _BatchNorm) and m.track_running_stats]
        self.lent = {
            norm: {name: None if buffer is None else torch.zeros_like(buffer) for name, buffer in norm._buffers.items()}
            for norm in self._norms
        }
        for norm in self._norms:
            norm.register_forward_pre_hook(self._lend)
            norm.register_forward_hook(self._take)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While it is active, batch norms report what passes them and leave their running statistics alone."""
        self._noting = True
        try:
            yield
        finally:
            self._noting = False

    def merge(self, group: dist.ProcessGroup) -> None:
        """Makes the replicas' statistics one."""
        for norm in self._norms:
            if norm in self._moments:
                self._moments[norm].merge(group)

    @torch.no_grad()
    def end_minibatch(self) -> None:
        """Moves the running statistics on by one minibatch, with the layers' own momentum."""
        for norm, moments in self._moments.items():
            assert norm.running_mean is not None and norm.running_var is not None
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked += 1
            momentum = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            variances = moments.squares / (moments.count - 1)
            norm.running_mean.lerp_(moments.means.to(norm.running_mean.dtype), momentum)
            norm.running_var.lerp_(variances.to(norm.running_var.dtype), momentum)
        self._moments.clear()

    def _lend(self, norm: _BatchNorm, inputs: Any) -> None:
        """Lends the layer empty statistics and a momentum of 1: what it then holds is the microbatch's own.

        The same tensors for every microbatch: its graph keeps them, and no backward in training reads them. So they are
        emptied through `data`, of which autograd's check for changes in place learns nothing.
        """
        if self._noting and norm.training:
            self._own[norm] = dict(norm._buffers), norm.momentum
            for name, lent in self.lent[norm].items():
                norm._buffers[name] = lent
                if lent is not None:
                    lent.data.zero_()
            norm.momentum = 1.0

    @torch.no_grad()
    def _take(self, norm: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Takes the microbatch's statistics, and gives the layer its own ones back."""
        if norm not in self._own:
            return
        means, variances = norm.running_mean, norm.running_var
        assert means is not None and variances is not None
        buffers, norm.momentum = self._own.pop(norm)
        norm._buffers.update(buffers)
        count = inputs[0].numel() // inputs[0].shape[1]
        precise = torch.promote_types(means.dtype, torch.float32)
        means, squares = means.to(precise, copy=True), variances.to(precise) * (count - 1)
        if norm in self._moments:
            self._moments[norm].add(count, means, squares)
        else:
            self._moments[norm] = Moments(count, means, squares)
