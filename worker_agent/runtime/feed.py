"""Feed: the microbatches' inputs for a rank's first stage, and their targets for its last one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import torch
from torch import Tensor

from pipeplan.errors import require
from pipeplan.programs.instructions import Forward
from pipeplan.programs.program import Program, Stream
from worker_agent.models.batches import IGNORED, BatchForm
from worker_agent.models.data import Microbatch, MicrobatchSource, moved, open_data
from worker_agent.models.keywords import KeywordForm
from worker_agent.models.spec import user_code
from worker_agent.models.values import Value
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.status import Activity


class FeedSource(Protocol):
    """Microbatches by their number from 0."""

    def microbatch(self, index: int) -> Microbatch:
        """Inputs and targets."""


class TokenMeans:
    """Microbatches with the counts that make their losses add up to the mean over all labels of the batch.

    Each comes with two counts for `losses.default_loss`: the labels in its batch, and the `microbatches` in it, both
    over all replicas. A batch is read before its first microbatch is given, and is kept until it ends. Items
    without a label for every token by name pass unchanged.
    """

    def __init__(self, source: MicrobatchSource, microbatches: int) -> None:
        self._source = source
        self._microbatches = microbatches
        self._first = -1
        self._read: list[Microbatch] = []
        self._labels = 0

    def microbatch(self, index: int) -> Microbatch:
        """Inputs and targets."""
        first = index - index % self._microbatches
        if first != self._first or not self._read:
            inputs, targets = self._source.microbatch(index)
            if not self._source.labels_tokens:
                return inputs, targets
            self._read, self._first = [], first
            self._read = [self._source.microbatch(first + i) for i in range(self._microbatches)]
            tokens = [each for _, each in self._read if isinstance(each, Tensor)]
            self._labels = sum(int((each != IGNORED).sum()) for each in tokens)
            last = first + self._microbatches - 1
            rule = f"must have labels that are not {IGNORED} in a batch, and microbatches {first} to {last} have none"
            require(self._labels > 0, f"data.{first}.labels", rule, IGNORED)
        inputs, targets = self._read[index - first]
        return inputs, (targets, torch.tensor(self._labels), torch.tensor(self._microbatches))  # type: ignore[return-value]


class Busy(Protocol):
    """Records the host's activity."""

    def during(self, activity: Activity) -> AbstractContextManager[None]:
        """While it is active."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    number: int
    inputs: Value | None
    targets: Value | None
    there: torch.cuda.Event | None = None


class MicrobatchFeed:
    """Microbatches, numbered from 1, on the device and in the type in which the stages compute.

    `order` are the numbers in the order of their requests. With `ahead` the next microbatch is loaded as soon as the
    device has work, and is copied from pinned memory during that work. This happens on the same thread: the data's own
    code is always called in the same order.

    `digests` are, by number, those of the inputs of the first microbatch and of all that `compared` selects. Processes
    compare theirs.
    """

    def __init__(
        self,
        source: FeedSource,
        name: str,
        order: Iterator[int],
        *,
        device: torch.device,
        dtype: torch.dtype,
        busy: Busy,
        inputs: bool,
        targets: bool,
        ahead: bool,
        compared: Callable[[int], bool],
    ) -> None:
        self._source = source
        self._name = name
        self._order = order
        self._device = device
        self._dtype = dtype
        self._busy = busy
        self._inputs = inputs
        self._targets = targets
        self._ahead = ahead
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._current: _Loaded | None = None
        self._next: _Loaded | None = None
        self._compared = compared
        self.digests: dict[int, bytes] = {}

    def begin(self) -> None:
        """Loads the first microbatch."""
        self._current = self._load(next(self._order))

    def inputs(self, number: int) -> Value:
        """A microbatch's inputs."""
        inputs = self._taken(number).inputs
        assert inputs is not None
        return inputs

    def targets(self, number: int) -> Value:
        """A microbatch's targets."""
        targets = self._taken(number).targets
        assert targets is not None
        return targets

    def load_ahead(self) -> None:
        """Loads the next microbatch, unless it is loaded; called when the device has work."""
        if not self._ahead or self._next is not None:
            return
        number = next(self._order, None)
        if number is not None:
            same = self._current is not None and self._current.number == number
            self._next = self._current if same else self._load(number)

    def _taken(self, number: int) -> _Loaded:
        """The microbatch, ready for all later work of the current CUDA stream."""
        if self._next is not None and self._next.number == number:
            self._current, self._next = self._next, None
        elif self._current is None or self._current.number != number:
            if self._ahead:
                next(self._order, None)
            self._current = self._load(number)
        loaded = self._current
        if loaded.there is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(loaded.there)
            for tensor in (*_tensors(loaded.inputs), *_tensors(loaded.targets)):
                tensor.record_stream(stream)
        return loaded

    def _load(self, number: int) -> _Loaded:
        with self._busy.during(Activity.DATA), user_code(f"microbatch {number} of the data {self._name}"):
            inputs, targets = self._source.microbatch(number - 1)
        if not self.digests or self._compared(number):
            self.digests[number] = _digest(inputs)
        with torch.cuda.stream(self._copies):  # which does nothing where there is none
            there = (
                moved(inputs, self._device, self._dtype, pinned=self._copies is not None) if self._inputs else None,
                moved(targets, self._device, self._dtype, pinned=self._copies is not None) if self._targets else None,
            )
            return _Loaded(number, *there, None if self._copies is None else self._copies.record_event())


def _digest(inputs: Value) -> bytes:
    """Equal for equal inputs, in every process."""
    parts = blake2b(digest_size=16)
    for tensor in _tensors(inputs):
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        parts.update(plain.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return parts.digest()


def _tensors(value: Value | None) -> tuple[Tensor, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, Tensor) else value


def open_feed(
    job: RunJob,
    program: Program,
    stream: Stream,
    form: BatchForm | KeywordForm | None,
    device: torch.device,
    busy: Busy,
) -> MicrobatchFeed | None:
    """The first stage's inputs, or the last one's targets, with the first microbatch loaded; None for other stages.

    Each opens the data for itself, because a rank with both stages reads the data at two positions. Processes compare
    their inputs of batches 1, 2, 4, 8, ... and of the last one.
    """
    pipeline, first, last = program.pipeline, stream.stage == 0, stream.stage == job.plan.depth - 1
    if not (first or last):
        return None

    def compared(number: int) -> bool:
        batch = pipeline.batch_of(number) + 1
        return batch == job.steps or batch & (batch - 1) == 0

    with busy.during(Activity.DATA):  # it may read the last microbatch, to see that it is whole
        opened = open_data(
            job.data,
            microbatch_size=job.plan.microbatch_size,
            seed=job.seed,
            form=form,
            microbatches=job.steps * pipeline.batch_microbatches,
        )
    source: FeedSource = opened
    if last and job.loss is None:
        updates = (program.schedule.updates_a_batch(pipeline, stage) for stage in range(pipeline.depth))
        source = TokenMeans(opened, pipeline.batch_microbatches if all(n == 1 for n in updates) else 1)
    feed = MicrobatchFeed(
        source,
        job.data,
        (i.microbatch for i in stream.instructions if isinstance(i, Forward)),
        device=device,
        dtype=getattr(torch, job.plan.dtype),
        busy=busy,
        inputs=first,
        targets=last,
        ahead=device.type == "cuda",
        compared=compared,
    )
    feed.begin()
    return feed
