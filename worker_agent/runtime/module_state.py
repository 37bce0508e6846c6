"""Module state: buffers, in which modules keep state that is not a parameter, such as statistics of the data.

`Noted` keeps the buffers for checkpoints. A schedule without a flush forwards microbatches of later batches before the
update that ends this one. Batch norm's statistics of those do not belong to the checkpoint, because a resumed run
forwards them again.

`Buffers` serves recomputation. A forward that runs a second time finds the buffers as the first one did: those of
spectral norm change with every forward, and scale the weight. The second run writes into copies, so every microbatch is
noted once.

`MinibatchStatistics` makes batch norm's running means and variances those of whole minibatches, as GPipe does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from worker_agent.models.values import parts_of

Snapshot = tuple[Tensor | None, ...]
"""The buffers' contents at one moment, in their order."""


class Noted:
    """The buffers of one stage: live, and as they were at the end of batches whose checkpoint is still to come.

    Batches are counted from the start of training; `done` of them were before this run. `is_due` answers whether this
    worker writes a checkpoint after a number of batches.
    """

    def __init__(self, buffers: Mapping[str, Tensor], done: int, is_due: Callable[[int], bool]) -> None:
        self.live = buffers
        self._taken = done
        self._is_due = is_due
        self._at_end: dict[int, Mapping[str, Tensor]] = {}

    def forward_of(self, batch: int) -> None:
        """A microbatch of this batch (from 0) is forwarded next. Keeps the state that this would change."""
        if self.live and batch > self._taken and batch not in self._at_end and self._is_due(batch):
            self._at_end[batch] = {name: tensor.detach().clone() for name, tensor in self.live.items()}

    def take(self, batches: int) -> Mapping[str, Tensor]:
        """The buffers for the checkpoint after this many batches."""
        self._taken = batches
        return self._at_end.pop(batches, self.live)


@dataclass(slots=True)
class _Copied:
    """A buffer as it was last seen, and its copy. `silent`: its changes are not counted, as through `.data`."""

    buffer: Tensor
    version: int
    copy: Tensor
    silent: bool | None = None

    def holds(self, buffer: Tensor) -> bool:
        """Whether the copy equals the buffer now. The first time that the counts agree, the contents are compared."""
        if self.buffer is not buffer or self.version != buffer._version or self.silent:
            return False
        if self.silent is None:
            self.silent = not _equal(self.copy, buffer)
        return not self.silent


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same; not if torch cannot tell their parts."""
    parts, others = parts_of(one), parts_of(other)
    if parts is None or others is None or len(parts) != len(others):
        return False
    return all(torch.equal(each, beside) for each, beside in zip(parts, others, strict=True))


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


class _Moments:
    """The statistics so far of a minibatch, of all batch norms whose statistics have the same type, side by side.

    `means` are the means of the values, and `squares` the sums of their squared distances from these, both in float32
    or better. `counts` holds how many values each norm has had. The norms write a microbatch's statistics into `lent`.
    """

    def __init__(self, norms: Sequence[_BatchNorm], dtype: torch.dtype, device: torch.device) -> None:
        self.norms = tuple(norms)
        self._channels = torch.tensor([norm.num_features for norm in norms], device=device)
        channels, precise = sum(norm.num_features for norm in norms), torch.promote_types(dtype, torch.float32)
        self.means, self.squares = (torch.zeros(channels, dtype=precise, device=device) for _ in range(2))
        self.counts = [0.0] * len(norms)
        self._written = torch.zeros(2, channels, dtype=dtype, device=device)
        ends = list(accumulate(norm.num_features for norm in norms))
        self.places = [slice(end - norm.num_features, end) for norm, end in zip(norms, ends, strict=True)]
        # Through `data` each view counts its own changes: a graph that keeps one ignores writes of other norms.
        self.lent: dict[_BatchNorm, dict[str, Tensor | None]] = {
            norm: {name: None if buffer is None else torch.zeros_like(buffer) for name, buffer in norm._buffers.items()}
            | {"running_mean": self._written[0, place].data, "running_var": self._written[1, place].data}
            for norm, place in zip(norms, self.places, strict=True)
        }

    def take(self, noted: Mapping[_BatchNorm, int]) -> None:
        """Adds the statistics in `lent`, each of this many values (Chan, Golub and LeVeque 1979), and empties them."""
        counts = [float(noted.get(norm, 0)) for norm in self.norms]
        if not any(counts):
            return
        totals = [before + count for before, count in zip(self.counts, counts, strict=True)]
        shares = [count / total if total else 0.0 for count, total in zip(counts, totals, strict=True)]
        means, variances = self._written.to(self.means.dtype)
        apart = means - self.means
        new_squares = variances * self._by_channel([count - 1.0 for count in counts])
        between = [before * share for before, share in zip(self.counts, shares, strict=True)]
        # those that did not run wrote zeros, and have a share of 0
        self.means = self.means + apart * self._by_channel(shares)
        self.squares = self.squares + new_squares + apart.square() * self._by_channel(between)
        self.counts = totals
        self.forget()

    def forget(self) -> None:
        """Empties the statistics in `lent`."""
        self._written.data.zero_()

    def merge(self, group: dist.ProcessGroup) -> None:
        """Adds the moments of all others in the group; all have the same ones afterwards."""
        own = self._by_channel(self.counts)
        sums = torch.stack([self.means * own, own])
        dist.all_reduce(sums, group=group)
        means = sums[0] / sums[1].clamp(min=1.0)
        squares = self.squares + (self.means - means).square() * own
        dist.all_reduce(squares, group=group)
        self.means, self.squares = means, squares
        self.counts = [float(sums[1, place.start]) for place in self.places]

    def clear(self) -> None:
        """A new minibatch."""
        self.means, self.squares = torch.zeros_like(self.means), torch.zeros_like(self.squares)
        self.counts = [0.0] * len(self.norms)

    def _by_channel(self, of_norms: Sequence[float]) -> Tensor:
        """A number of each norm, for each of its channels."""
        numbers = torch.tensor(of_norms, dtype=self.means.dtype, device=self.means.device)
        return numbers.repeat_interleave(self._channels, output_size=self.means.numel())


class MinibatchStatistics:
    """Running statistics of batch norm over whole minibatches; a microbatch is still normalised by its own statistics.

    GPipe normalises by the microbatch in training, and keeps the moving averages that an evaluation uses over the whole
    minibatch (Huang et al. 2019, section 2). A minibatch is that of all replicas.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._noting = False
        self._noted: dict[_BatchNorm, int] = {}
        self._own: dict[_BatchNorm, tuple[dict[str, Tensor | None], float | None]] = {}
        modules = dict.fromkeys(module for block in blocks for module in block.modules())  # one may be in several
        norms: dict[tuple[torch.dtype, torch.device], list[_BatchNorm]] = {}
        for norm in modules:
            if isinstance(norm, _BatchNorm) and norm.running_mean is not None:
                norms.setdefault((norm.running_mean.dtype, norm.running_mean.device), []).append(norm)
                norm.register_forward_pre_hook(self._lend)
                norm.register_forward_hook(self._give_back)
        self._moments = [_Moments(own, *kind) for kind, own in norms.items()]
        self.lent = {norm: lent for moments in self._moments for norm, lent in moments.lent.items()}

    def settle(self) -> None:
        """Collects the records of earlier forwards, to `undo` only the next one."""
        self._take()

    def undo(self) -> None:
        """Forgets the records of a forward that did not end."""
        for norm in tuple(self._own):
            _set(norm, *self._own.pop(norm))
        self._noted.clear()
        for moments in self._moments:
            moments.forget()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While it is active, batch norms report their inputs' statistics and leave their running statistics alone."""
        self._noting = True
        try:
            yield
        finally:
            self._noting = False

    def merge(self, group: dist.ProcessGroup) -> None:
        """Makes the replicas' statistics one."""
        self._take()
        for moments in self._moments:
            moments.merge(group)

    @torch.no_grad()
    def end_minibatch(self) -> None:
        """Moves the running statistics on by one minibatch, with the layers' own momentum."""
        self._take()
        for moments in self._moments:
            for norm, place, count in zip(moments.norms, moments.places, moments.counts, strict=True):
                if not count:
                    continue
                assert norm.running_mean is not None and norm.running_var is not None
                assert norm.num_batches_tracked is not None
                norm.num_batches_tracked += 1
                momentum = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
                variances = moments.squares[place] / (count - 1)
                norm.running_mean.lerp_(moments.means[place].to(norm.running_mean.dtype), momentum)
                norm.running_var.lerp_(variances.to(norm.running_var.dtype), momentum)
            moments.clear()

    def _lend(self, norm: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        """Lends the layer empty statistics and a momentum of 1: they then become the microbatch's own.

        The tensors are the same for every microbatch: its graph keeps them, and no backward in training reads them.
        They are emptied through `data`, where autograd does not check for changes in place.
        """
        if not (self._noting and norm.training):
            return
        if norm in self._noted:  # the next microbatch: it would overwrite the record
            self._take()
        self._noted[norm] = inputs[0].numel() // inputs[0].shape[1]
        self._own[norm] = norm._buffers, norm.momentum
        _set(norm, self.lent[norm], 1.0)

    def _give_back(self, norm: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Gives the layer its own statistics back."""
        if norm in self._own:
            _set(norm, *self._own.pop(norm))

    @torch.no_grad()
    def _take(self) -> None:
        """Collects the records of all layers: once a microbatch and not layer by layer, as each call takes time."""
        for moments in self._moments:
            moments.take(self._noted)
        self._noted.clear()


class Before:
    """Buffers, statistics and inputs as they are before a forward: it can be undone, and run once more."""

    def __init__(
        self, blocks: Sequence[nn.Module], inputs: Sequence[Tensor], statistics: MinibatchStatistics | None
    ) -> None:
        self._statistics = statistics
        if statistics:
            statistics.settle()
        modules = dict.fromkeys(module for block in blocks for module in block.modules())
        own = [(module._buffers, name, b) for module in modules for name, b in module._buffers.items()]
        self._places = [(buffers, name, b) for buffers, name, b in own if b is not None and parts_of(b)]
        self._copies = {id(b): b.detach().clone() for _, _, b in self._places}
        self._inputs = [(t, t.detach().clone()) for t in inputs]

    def restore(self) -> None:
        """Undoes the forward."""
        if self._statistics:
            self._statistics.undo()
        for buffers, name, buffer in self._places:
            buffers[name] = self._copies[id(buffer)]
        for tensor, copy in self._inputs:
            tensor.data.copy_(copy)


def _set(norm: _BatchNorm, buffers: dict[str, Tensor | None], momentum: float | None) -> None:
    """Sets both without the module's `__setattr__`, which looks for parameters and takes longer than a small layer."""
    object.__setattr__(norm, "_buffers", buffers)
    object.__setattr__(norm, "momentum", momentum)
