"""Replicas: the gradient exchange among the workers that hold the same stage, or that share weights.

A stage's gradients go in buckets, each as soon as the backward has completed it (wait-free backpropagation; torch's own
DistributedDataParallel does the same). It is done here, and not by DistributedDataParallel, because a stage has several
weight versions, and because its exchange may go on until long after the backward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner_service.core.cost.all_reduce import BUCKET_BYTES, FIRST_BUCKET_BYTES
from planner_service.core.errors import RunFailedError

Bucket = tuple[int, ...]
"""Gradients of one dtype that are exchanged together: their places among the stage's parameters."""


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


def buckets_of(parameters: Sequence[Tensor]) -> tuple[Bucket, ...]:
    """The parameters from the last to the first, about as a backward completes them, in buckets.

    They depend on the model alone: sums over three replicas and more round by where in a bucket a number stands, so
    that a run that is resumed must have the same.
    """
    closed: list[Bucket] = []
    gathering: dict[torch.dtype, list[int]] = {}
    for place in reversed(range(len(parameters))):
        dtype = parameters[place].dtype
        bucket = gathering.setdefault(dtype, [])
        bucket.append(place)
        enough_bytes = BUCKET_BYTES if closed else FIRST_BUCKET_BYTES
        if sum(parameters[i].nbytes for i in bucket) >= enough_bytes:
            closed.append(tuple(gathering.pop(dtype)))
    return (*closed, *map(tuple, gathering.values()))


class Exchange:
    """A set of gradients on its way, bucket by bucket in the same order on every replica.

    With a `source` it is the gradients of that rank that all get; without, the mean of all.
    """

    def __init__(
        self, parameters: Sequence[Tensor], buckets: Sequence[Bucket], group: dist.ProcessGroup, source: int | None
    ) -> None:
        self._parameters = parameters
        self._buckets = buckets
        self._group = group
        self._source = source
        self._missing = [len(bucket) for bucket in buckets]
        self._bucket_of = {place: number for number, bucket in enumerate(buckets) for place in bucket}
        self._under_way: list[tuple[dist.Work | None, Tensor]] = []

    def take(self) -> None:
        """Waits for nothing: has room made for what the source sends."""
        for bucket in self._buckets:
            size = sum(self._parameters[place].numel() for place in bucket)
            self._launch(self._parameters[bucket[0]].new_empty(size))

    def complete(self, place: int) -> None:
        """A gradient is complete. Launches the buckets whose turn it is."""
        self._missing[self._bucket_of[place]] -= 1
        while len(self._under_way) < len(self._buckets) and self._missing[len(self._under_way)] == 0:
            self._launch_next()

    def complete_all(self) -> None:
        """All are complete; those that no backward reached are zero."""
        while len(self._under_way) < len(self._buckets):
            self._launch_next()

    def wait(self) -> None:
        """Until they are through."""
        for work, _ in self._under_way:
            if work is not None:
                work.wait()

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """By place, as views of the buckets."""
        found: dict[int, Tensor] = {}
        for (_, flat), bucket in zip(self._under_way, self._buckets, strict=True):
            if self._source is None:
                flat /= self._group.size()
            shapes = [self._parameters[place] for place in bucket]
            views = torch.split(flat, [parameter.numel() for parameter in shapes])
            for place, like, view in zip(bucket, shapes, views, strict=True):
                found[place] = view.view_as(like)
        return [found[place] for place in range(len(self._parameters))]

    @torch.no_grad()
    def _launch_next(self) -> None:
        """The gradients' own memory is given back as they are copied."""
        gradients = []
        for place in self._buckets[len(self._under_way)]:
            parameter = self._parameters[place]
            gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        self._launch(torch.cat([gradient.reshape(-1) for gradient in gradients]))

    def _launch(self, flat: Tensor) -> None:
        if self._source is None:
            work = dist.all_reduce(flat, group=self._group, async_op=True)
        else:
            work = dist.broadcast(flat, self._source, group=self._group, async_op=True)
        self._under_way.append((work, flat))


class Replicas:
    """The exchanges of one stage with its other replicas, by the version that they are for.

    Whether a backward adds to a gradient once, so that it is complete then, the first exchange finds out: it begins
    when its backward has ended. Where a block runs backwards inside its backward (reentrant checkpointing), some are
    added to several times, and all exchanges begin at the backward's end.
    """

    def __init__(self, group: dist.ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
        self.group = group
        self._parameters = tuple(parameters)
        self._buckets = buckets_of(parameters)
        self._exchanges: dict[int, Exchange] = {}
        self._added_once: bool | None = None

    @contextmanager
    def exchanging(self, version: int, leaves: Sequence[nn.Parameter], source: int | None) -> Iterator[None]:
        """While it is active a backward completes the leaves' gradients: those that are complete go on their way."""
        exchange, times = self._begin(version, leaves, source), [0] * len(leaves)

        def added(place: int, _leaf: Tensor) -> None:
            times[place] += 1
            if self._added_once:
                if times[place] > 1:
                    raise RunFailedError("a backward adds to a parameter's gradient twice, earlier ones did it once")
                exchange.complete(place)

        handles = [] if self._added_once is False else _on_each(leaves, added)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        exchange.complete_all()
        if self._added_once is None:
            self._added_once = max(times, default=0) <= 1

    @contextmanager
    def adding(
        self, version: int, leaves: Sequence[nn.Parameter], waiting: Mapping[nn.Parameter, int]
    ) -> Iterator[Callable[[nn.Parameter], None]]:
        """While it is active its user adds to the leaves' gradients, to those `waiting` so often, and calls what it is
        given for each time: gradients that are complete go on their way.
        """
        exchange, left = self._begin(version, leaves, None), dict(waiting)
        places = {leaf: place for place, leaf in enumerate(leaves)}

        def added(leaf: nn.Parameter) -> None:
            left[leaf] -= 1
            if left[leaf] == 0:
                exchange.complete(places[leaf])

        for leaf, place in places.items():
            if leaf not in left:
                exchange.complete(place)
        yield added
        exchange.complete_all()

    def give(self, version: int, leaves: Sequence[nn.Parameter], source: int | None) -> None:
        """The leaves' gradients are complete, all of them."""
        self._begin(version, leaves, source).complete_all()

    def expect(self, version: int, source: int) -> None:
        """Another rank's gradients are on their way, or will be."""
        self._begin(version, self._parameters, source).take()

    def _begin(self, version: int, leaves: Sequence[nn.Parameter], source: int | None) -> Exchange:
        exchange = self._exchanges[version] = Exchange(leaves, self._buckets, self.group, source)
        return exchange

    def is_under_way(self, version: int) -> bool:
        """Whether the exchange for a version has begun."""
        return version in self._exchanges

    def gradients(self, version: int, *, own: bool) -> list[Tensor]:
        """Waits for the exchange for a version, which is then over. This worker's `own` gradients it has: torch keeps
        what it still sends of them, which nobody writes to.
        """
        exchange = self._exchanges.pop(version)
        if not own:
            exchange.wait()
        return exchange.gradients()


def _on_each(
    leaves: Sequence[nn.Parameter], added: Callable[[int, Tensor], None]
) -> list[torch.utils.hooks.RemovableHandle]:
    return [
        leaf.register_post_accumulate_grad_hook(partial(added, place))  # type: ignore[no-untyped-call]
        for place, leaf in enumerate(leaves)
    ]


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
