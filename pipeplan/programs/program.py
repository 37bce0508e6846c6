"""Program: the streams of all workers; and the program of any number of batches, made from a short one that repeats."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from pipeplan.documents.plan import Worker
from pipeplan.documents.tied import TiedStages
from pipeplan.programs.instructions import Checkpoint, Instruction, Update
from pipeplan.programs.pipeline import Pipeline, ends_with_checkpoint
from pipeplan.programs.repeating import Repeating, by_chunk, shortened
from pipeplan.programs.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What one rank executes, in order. `stage` is that of its chunk 0: the only one, for most schedules."""

    rank: int
    stage: int
    replica: int
    instructions: Sequence[Instruction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """All workers' streams, by rank. `tied` has the seconds of the exchanges between stages that share weights."""

    schedule: Schedule
    pipeline: Pipeline
    streams: tuple[Stream, ...]
    tied: tuple[TiedStages, ...] = ()

    def stage_streams(self, stream: Stream) -> tuple[Stream, ...]:
        """A rank's stream as one stream for each of its stages, by chunk: what each holds and computes by itself."""
        if self.pipeline.chunks == 1:
            return (stream,)
        parts = by_chunk(stream.instructions, self.pipeline.chunks)
        return tuple(
            replace(stream, stage=self.pipeline.stage_of(stream.stage, chunk), instructions=instructions)
            for chunk, instructions in enumerate(parts)
        )


def pipelines_in_a_row(replicas: Sequence[int]) -> tuple[Worker, ...]:
    """The placement that numbers replica 0 of every stage first, then replica 1, and so on."""
    return tuple(
        _worker(stage, replica)
        for replica in range(max(replicas))
        for stage, count in enumerate(replicas)
        if replica < count
    )


def stages_in_a_row(replicas: Sequence[int]) -> tuple[Worker, ...]:
    """The placement that numbers all replicas of stage 0 first, then those of stage 1, and so on."""
    return tuple(_worker(stage, replica) for stage, count in enumerate(replicas) for replica in range(count))


@lru_cache(maxsize=2**14)
def _worker(stage: int, replica: int) -> Worker:
    """A worker, which placements share."""
    return Worker(stage=stage, replica=replica)


def checkpoint(
    instructions: Iterable[Instruction], schedule: Schedule, pipeline: Pipeline, stage: int, every: int
) -> Iterator[Instruction]:
    """Adds a checkpoint after each `every`-th batch, and after the pipeline's last update."""
    updates = schedule.updates_a_batch(pipeline, stage)
    behind = schedule.versions_behind(pipeline, stage)
    for instruction in instructions:
        yield instruction
        if isinstance(instruction, Update) and instruction.version % updates == 0:
            batches_done = instruction.version // updates
            if ends_with_checkpoint(pipeline, batches_done, every):
                yield Checkpoint(instruction.version, max(instruction.version - behind, 0), instruction.chunk)


def settled_batches(pipeline: Pipeline) -> int:
    """The number of batches that fill the pipeline; as many at the end drain it. All batches between them are equal.

    The pipeline is full when as many microbatches have begun as the stage with most of them, all its replicas together,
    has in flight. Under PipeDream these microbatches run on version 0; under 2BW the first two batches do.
    """
    most = max(pipeline.in_flight_limit(stage) * pipeline.replicas[stage] for stage in range(pipeline.depth))
    return 2 - (-most // pipeline.batch_microbatches)


def short_batches(pipeline: Pipeline) -> int:
    """The fewest batches of a program that can be repeated: fill, one batch, and drain."""
    return 2 * settled_batches(pipeline) + 1


def repeat(short: Program, *, batches: int, checkpoint_every: int = 0) -> Program:
    """The program of `batches` batches, from a short one of `short_batches` batches without checkpoints.

    It equals, instruction by instruction, the result of `build` and the passes for as many batches.
    """
    pipeline = replace(short.pipeline, batches=batches)
    streams = []
    for stream in short.streams:
        # A block ends with its batch's last update.
        updates = short.schedule.updates_a_batch(pipeline, stream.stage)
        ends = [
            index + 1
            for index, i in enumerate(stream.instructions)
            if isinstance(i, Update) and i.version % updates == 0 and i.chunk == pipeline.chunks - 1
        ]
        repeating = Repeating(
            [tuple(stream.instructions[start:end]) for start, end in zip([0, *ends], ends, strict=False)],
            pipeline=pipeline,
            settled=settled_batches(pipeline),
            updates=updates,
            checkpoint_every=checkpoint_every,
            checkpoints=pipeline.chunks,
            add_checkpoints=partial(
                checkpoint, schedule=short.schedule, pipeline=pipeline, stage=stream.stage, every=checkpoint_every
            ),
        )
        streams.append(replace(stream, instructions=repeating))
    return replace(short, pipeline=pipeline, streams=tuple(streams))


def brief(program: Program) -> Program:
    """A program of few batches that represents this one: itself, unless its batches repeat."""
    batches = min(program.pipeline.batches, short_batches(program.pipeline))
    if not any(isinstance(stream.instructions, Repeating) for stream in program.streams):
        return program
    streams = (replace(stream, instructions=shortened(stream.instructions)) for stream in program.streams)
    return replace(program, pipeline=replace(program.pipeline, batches=batches), streams=tuple(streams))
