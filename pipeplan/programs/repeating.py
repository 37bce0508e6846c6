"""Repeating: the stream of a run of any length, from a few stored batches.

From the moment when the pipeline has filled until it drains, every batch equals the one before, except that the numbers
of its microbatches and weight versions are those of the next batch. This holds for all schedules, with a flush or
without, because microbatches are numbered over all replicas: microbatch k has the same replica and stage as the
microbatch with its place in the next batch.

batch          0    1    2    3    4    ...   n-3       n-2  n-1
taken from     0    1    2    2    2          2         3    4     (of 5 batches, of which the third is repeated)

Such a stream is still a sequence: an instruction is made on access.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import accumulate, chain
from typing import TypeAlias, overload

from pipeplan.programs.instructions import Instruction, Update, versions_needed
from pipeplan.programs.pipeline import Pipeline

Block: TypeAlias = tuple[Instruction, ...]
"""A worker's instructions from after one batch's last update to the next one's."""

AddCheckpoints: TypeAlias = Callable[[Iterable[Instruction]], Iterable[Instruction]]
"""Puts checkpoints into a batch's block where they are due."""

_Row: TypeAlias = tuple[Instruction, Callable[..., Instruction], tuple[tuple[int, int], ...] | None]
"""An instruction of the settled block: its kind, and its numbers, each with its growth from batch to batch."""


class Repeating(Sequence[Instruction]):
    """A worker's instructions in the batches of a pipeline, from the blocks of a run of a few batches.

    Block number `settled` is the one that is repeated. A batch makes `updates` weight versions. Every
    `checkpoint_every`-th batch, and the last, ends with `checkpoints` of them, which `add_checkpoints` puts there.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        pipeline: Pipeline,
        settled: int,
        updates: int,
        checkpoint_every: int = 0,
        checkpoints: int = 1,
        add_checkpoints: AddCheckpoints = iter,
    ) -> None:
        self._blocks = tuple(blocks)
        self._pipeline = pipeline
        self._settled = settled
        self._updates = updates
        self._every = checkpoint_every
        self._checkpoints = checkpoints
        self._add_checkpoints = add_checkpoints
        self._left_out = pipeline.batches - len(blocks)
        self._drain = settled + 1 + self._left_out
        self._before = (0, *accumulate(map(len, blocks)))

        # Most instructions hold only numbers: making them of these is several times as fast as `_later`.
        rows: list[_Row] = []
        for instruction in blocks[settled]:
            later = self._later(instruction, 1)
            values = [(getattr(instruction, field.name), getattr(later, field.name)) for field in fields(instruction)]
            growth = tuple((a, b - a) for a, b in values if type(a) is type(b) is int)
            rows.append((instruction, type(instruction), growth if len(growth) == len(values) else None))
        self._rows = tuple(rows)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The short run's instructions, without checkpoints: they keep every law that holds in all batches."""
        return self._blocks

    @property
    def settled(self) -> int:
        """The number of batches that fill the pipeline."""
        return self._settled

    @property
    def horizon(self) -> int:
        """Upper bound on the distance of two instructions that need the same weight version."""
        return self._before[-1] + self._checkpoints * len(self._blocks)

    def counts(self) -> Iterator[tuple[Instruction, int]]:
        """The stream's instructions except checkpoints, each with its number of repetitions."""
        for j, block in enumerate(self._blocks):
            yield from ((instruction, self._left_out + 1 if j == self._settled else 1) for instruction in block)

    def of_chunk(self, chunk: int) -> "Repeating":
        """The instructions of one of the rank's chunks."""
        return Repeating(
            [tuple(i for i in block if i.chunk == chunk) for block in self._blocks],
            pipeline=self._pipeline,
            settled=self._settled,
            updates=self._updates,
            checkpoint_every=self._every,
            checkpoints=1,
            add_checkpoints=self._add_checkpoints,
        )

    def __len__(self) -> int:
        return self.start(self._pipeline.batches)

    def __iter__(self) -> Iterator[Instruction]:
        for batch in range(self._pipeline.batches):
            yield from self._block(batch)

    @overload
    def __getitem__(self, index: int) -> Instruction: ...
    @overload
    def __getitem__(self, index: slice) -> Block: ...
    def __getitem__(self, index: int | slice) -> Instruction | Block:
        places = range(len(self))[index]
        if isinstance(places, int):
            batch = self._batch_at(places)
            return self._block(batch)[places - self.start(batch)]
        if not places:
            return ()
        low, high = min(places[0], places[-1]), max(places[0], places[-1])
        batches = range(self._batch_at(low), self._batch_at(high) + 1)
        offset = self.start(batches[0])
        around = tuple(chain.from_iterable(self._block(batch) for batch in batches))
        return tuple(around[place - offset] for place in places)

    def _batch_at(self, place: int) -> int:
        return bisect_right(range(self._pipeline.batches), place, key=self.start) - 1

    def start(self, batch: int) -> int:
        """The number of instructions before a batch of the run, counted from 0."""
        repeated = min(max(batch - self._settled, 0), self._left_out)
        without = self._before[batch - repeated] + repeated * len(self._rows)
        return without + self._checkpoints * self._checkpoints_before(batch)

    def _checkpoints_before(self, batch: int) -> int:
        """The number of earlier batches that end with checkpoints."""
        if not self._every:
            return 0
        first, last = self._pipeline.first_batch, self._pipeline.first_batch + batch
        ends = batch == self._pipeline.batches and last % self._every > 0
        return last // self._every - first // self._every + ends

    def _block(self, batch: int) -> Block:
        if batch < self._settled:
            block = self._blocks[batch]
        elif batch < self._drain:
            later = batch - self._settled
            block = tuple(
                self._later(first, later) if growth is None else kind(*[a + later * b for a, b in growth])
                for first, kind, growth in self._rows
            )
        else:
            block = tuple(self._later(i, self._left_out) for i in self._blocks[batch - self._left_out])
        if self._checkpoints_before(batch + 1) > self._checkpoints_before(batch):
            return tuple(self._add_checkpoints(block))
        return block

    def _later(self, instruction: Instruction, batches: int) -> Instruction:
        """The same instruction, `batches` batches later."""
        microbatches, versions = self._pipeline.batch_microbatches * batches, self._updates * batches
        made_of: Callable[..., Instruction] = type(instruction)
        values = []
        for field in fields(instruction):
            value = getattr(instruction, field.name)
            match field.name:
                case "microbatch":
                    value += microbatches
                case "microbatches":
                    value = tuple(k + microbatches for k in value)
                case "version":
                    value += versions
            values.append(value)
        return made_of(*values)


def by_chunk(instructions: Sequence[Instruction], chunks: int) -> Sequence[Sequence[Instruction]]:
    """The instructions of each chunk."""
    if isinstance(instructions, Repeating):
        return [instructions.of_chunk(chunk) for chunk in range(chunks)]
    parts: list[list[Instruction]] = [[] for _ in range(chunks)]
    for instruction in instructions:
        parts[instruction.chunk].append(instruction)
    return [tuple(part) for part in parts]


def counted(instructions: Sequence[Instruction]) -> Iterable[tuple[Instruction, int]]:
    """Each instruction and its count, with any numbers; without a repeating stream's checkpoints."""
    return instructions.counts() if isinstance(instructions, Repeating) else ((i, 1) for i in instructions)


def shortened(instructions: Sequence[Instruction]) -> Sequence[Instruction]:
    """The short run's instructions where the stream repeats them, or the stream itself."""
    return tuple(chain.from_iterable(instructions.blocks)) if isinstance(instructions, Repeating) else instructions


def retirements(instructions: Sequence[Instruction]) -> Iterator[tuple[int, ...]]:
    """For each instruction in turn, the weight versions that no later instruction needs. The newest is never released.

    Looks ahead as far as the horizon of a repeating stream, and to the end of any other.
    """
    horizon = instructions.horizon if isinstance(instructions, Repeating) else len(instructions)
    following, ahead, needed, newest = iter(instructions), deque[Instruction](), Counter[int](), -1
    for new in following:
        ahead.append(new)
        for version in versions_needed(new):
            needed[version] += 1
        if len(ahead) > horizon:
            newest = _newest(ahead[0], newest)
            yield _given_up(ahead.popleft(), needed, newest)
    for instruction in ahead:
        newest = _newest(instruction, newest)
        yield _given_up(instruction, needed, newest)


def _newest(instruction: Instruction, newest: int) -> int:
    return instruction.version if type(instruction) is Update else newest


def _given_up(instruction: Instruction, needed: Counter[int], newest: int) -> tuple[int, ...]:
    over = []
    for version in versions_needed(instruction):
        left = needed[version] = needed[version] - 1
        if not left and version != newest:
            del needed[version]
            over.append(version)
    return tuple(over)
