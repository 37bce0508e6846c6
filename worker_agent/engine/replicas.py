"""Replicas: the gradient exchange among the replicas of a stage, or among workers that share weights.

Gradients are exchanged in buckets, each as soon as the backward has completed it (wait-free backpropagation, as in
torch's DistributedDataParallel). DistributedDataParallel cannot be used: a stage has several weight versions, and its
exchange may continue long after the backward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeplan.costs.collectives import BUCKET_BYTES, FIRST_BUCKET_BYTES
from pipeplan.errors import PipeplanError, RunFailedError
from worker_agent.engine.devices import let_gloo_wait
from worker_agent.models.spec import described

Bucket = tuple[int, ...]
"""Gradients of one dtype that are exchanged together, as indices into the stage's parameters."""


class ExchangeError(PipeplanError, RuntimeError):
    """An exchange could not begin: a replica is probably gone. The block that was running is not at fault."""


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
    if own is not None and dist.get_backend(own) == "gloo":
        let_gloo_wait()
    return own


def buckets_of(parameters: Sequence[Tensor]) -> tuple[Bucket, ...]:
    """The parameters from the last to the first, about as a backward completes them, in buckets.

    The buckets depend on the model alone. Over three replicas or more the rounding of a sum depends on the number's
    position in its bucket, and a resumed run must round as the first one did.
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


class GradientExchange:
    """The exchange of one set of gradients, bucket by bucket in the same order on every replica.

    With a `source`, all ranks get the gradients of that rank; without one, the mean over all ranks.
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
        self._all_there: list[bool] = []

    def take(self) -> None:
        """Starts to receive the source's gradients, without waiting for them."""
        for bucket in self._buckets:
            size = sum(self._parameters[place].numel() for place in bucket) + len(bucket)
            self._all_there.append(False)
            self._launch(self._parameters[bucket[0]].new_empty(size))

    def complete(self, place: int) -> None:
        """A gradient is complete. Launches the buckets whose turn it is."""
        self._missing[self._bucket_of[place]] -= 1
        while len(self._under_way) < len(self._buckets) and self._missing[len(self._under_way)] == 0:
            self._launch_next()

    def complete_all(self) -> None:
        """All gradients are complete, also those that no backward reached. Launches the remaining buckets."""
        while len(self._under_way) < len(self._buckets):
            self._launch_next()

    def wait(self) -> None:
        """Waits until all buckets are exchanged."""
        for work, _ in self._under_way:
            if work is not None:
                work.wait()

    @torch.no_grad()
    def gradients(self) -> list[Tensor | None]:
        """One for each parameter, as views of the buckets. None where no replica has one: the weight is not updated."""
        found: dict[int, Tensor | None] = {}
        for (_, flat), bucket, all_there in zip(self._under_way, self._buckets, self._all_there, strict=True):
            if self._source is None:
                flat /= self._group.size()
            gradients = unpacked(flat, [self._parameters[place] for place in bucket], all_there=all_there)
            found |= zip(bucket, gradients, strict=True)
        return [found[place] for place in range(len(self._parameters))]

    @torch.no_grad()
    def _launch_next(self) -> None:
        """Copies the next bucket's gradients into one buffer, frees their own memory and sends the buffer."""
        parameters = [self._parameters[place] for place in self._buckets[len(self._under_way)]]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._all_there.append(all(gradient is not None for gradient in gradients))
        self._launch(packed(gradients, parameters))

    def _launch(self, flat: Tensor) -> None:
        try:
            if self._source is None:
                work = dist.all_reduce(flat, group=self._group, async_op=True)
            else:
                work = dist.broadcast(flat, self._source, group=self._group, async_op=True)
        except RuntimeError as error:
            raise ExchangeError(described(error)) from error
        self._under_way.append((work, flat))


class Replicas:
    """The exchanges of one stage among its replicas, by the weight version that they are for.

    A gradient can be sent during the backward only if the backward adds to it once. The first exchange, which begins
    after its backward, checks this. If a block runs backwards inside its backward (reentrant checkpointing), some
    gradients are added to several times, and every exchange begins after the backward.
    """

    def __init__(self, group: dist.ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
        self.group = group
        self._parameters = tuple(parameters)
        self._buckets = buckets_of(parameters)
        self._exchanges: dict[int, GradientExchange] = {}
        self._added_once: bool | None = None

    @contextmanager
    def exchanging(self, version: int, leaves: Sequence[nn.Parameter], source: int | None) -> Iterator[None]:
        """Sends the leaves' gradients as the backward that runs in this context completes them."""
        exchange, times = self._begin(version, leaves, source), [0] * len(leaves)

        def added(place: int, _leaf: Tensor) -> None:
            times[place] += 1
            if self._added_once:
                if times[place] > 1:
                    raise RunFailedError("a backward adds to a parameter's gradient twice, earlier ones did it once")
                exchange.complete(place)

        handles: list[torch.utils.hooks.RemovableHandle] = []
        if self._added_once is not False:
            handles = [
                leaf.register_post_accumulate_grad_hook(partial(added, place))  # type: ignore[no-untyped-call]
                for place, leaf in enumerate(leaves)
            ]
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
        """Sends the leaves' gradients while p2, in this context, completes them.

        `waiting` is the number of p2's additions to each leaf. p2 calls the yielded function after each addition.
        Leaves that are not in `waiting` are complete from the start.
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
        """Sends the leaves' gradients, all of which are complete."""
        self._begin(version, leaves, source).complete_all()

    def expect(self, version: int, source: int) -> None:
        self._begin(version, self._parameters, source).take()

    def _begin(self, version: int, leaves: Sequence[nn.Parameter], source: int | None) -> GradientExchange:
        exchange = self._exchanges[version] = GradientExchange(leaves, self._buckets, self.group, source)
        return exchange

    def is_under_way(self, version: int) -> bool:
        return version in self._exchanges

    def gradients(self, version: int, *, own: bool) -> list[Tensor | None]:
        """The gradients of a version, whose exchange ends here. Waits for it unless they are this worker's `own`.

        torch keeps a worker's own gradients alive while it still sends them, and no code writes to them.
        """
        exchange = self._exchanges.pop(version)
        if not own:
            exchange.wait()
        return exchange.gradients()


def packed(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    """Gradients as one flat tensor of their parameters' dtype, with zeros for a gradient that is None.

    At its end is a number for each gradient: 1 if it is there, 0 if it is None. Sums in float32 are rounded here, once,
    to the dtype that is exchanged.
    """
    there = parameters[0].new_tensor([0.0 if gradient is None else 1.0 for gradient in gradients])
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([*((torch.zeros_like(p) if g is None else g.to(p.dtype)).reshape(-1) for g, p in pairs), there])


def unpacked(flat: Tensor, parameters: Sequence[Tensor], *, all_there: bool) -> list[Tensor | None]:
    """The gradients of a packed tensor that was summed over a group, as views: None where no rank had one.

    With `all_there` the numbers at the end are not read: on a GPU reading them would wait for the device.
    """
    *views, there = torch.split(flat, [*(parameter.numel() for parameter in parameters), len(parameters)])
    reached = [True] * len(parameters) if all_there else [number > 0 for number in there.tolist()]
    triples = zip(views, parameters, reached, strict=True)
    return [view.view_as(parameter) if has else None for view, parameter, has in triples]


def average(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The tensors' means over the group, as views of one flat buffer for each dtype: one exchange each."""
    found: dict[int, Tensor] = {}
    for chosen in _by_dtype(tensors):
        flat = torch.cat([tensors[i].reshape(-1) for i in chosen])
        dist.all_reduce(flat, group=group)
        flat /= group.size()
        views = torch.split(flat, [tensors[i].numel() for i in chosen])
        found |= {i: view.view_as(tensors[i]) for i, view in zip(chosen, views, strict=True)}
    return [found[i] for i in range(len(tensors))]


def total(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Tensor | None]:
    """The gradients' sums over the group, equal bit for bit on all its ranks; None where no rank has one."""
    found: dict[int, Tensor | None] = {}
    for chosen in _by_dtype(parameters):
        own, shapes = [gradients[i] for i in chosen], [parameters[i] for i in chosen]
        flat = packed(own, shapes)
        dist.all_reduce(flat, group=group)
        found |= zip(chosen, unpacked(flat, shapes, all_there=all(g is not None for g in own)), strict=True)
    return [found[i] for i in range(len(gradients))]


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    dtypes = sorted({tensor.dtype for tensor in tensors}, key=str)
    return [[i for i, tensor in enumerate(tensors) if tensor.dtype == dtype] for dtype in dtypes]
