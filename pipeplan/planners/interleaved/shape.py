"""Shape: a configuration whose ranks hold several stages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pipeplan.costs.memory import chunked_pipeline
from pipeplan.planners.problem import Options
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.registry import schedule_named


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedShape:
    """A configuration: everything but where the stages begin.

    `recompute`: on all ranks, on none, or (None) on those that do not fit otherwise.
    """

    schedule: str
    ranks: int
    chunks: int
    width: int
    microbatch_size: int
    microbatches: int
    recompute: bool | None = None

    @property
    def depth(self) -> int:
        """The number of stages."""
        return self.ranks * self.chunks

    @property
    def devices(self) -> int:
        """The number of devices used."""
        return self.ranks * self.width

    @property
    def batch_size(self) -> int:
        """The samples of a batch on all pipelines."""
        return self.width * self.microbatch_size * self.microbatches

    @property
    def laws(self) -> Schedule:
        """The schedule's laws."""
        return schedule_named(self.schedule)

    @property
    def modes(self) -> tuple[bool, ...]:
        """Without and with recomputation, as far as a rank may choose."""
        return (False, True) if self.recompute is None else (self.recompute,)

    @property
    def idle_steps(self) -> float:
        """A rank's idle time in a batch, in steps: the seconds that the slowest rank takes for a microbatch."""
        return self.laws.idle_steps(ranks=self.ranks, chunks=self.chunks)

    @property
    def bubble_fraction(self) -> float:
        """The share of idle time among equal ranks."""
        return self.idle_steps / (self.microbatches + self.idle_steps)

    def sample_s(self, step_s: float) -> float:
        """Seconds a sample, from the slowest rank's seconds a microbatch."""
        return step_s * (self.microbatches + self.idle_steps) / self.batch_size

    def step_s(self, sample_s: float) -> float:
        """The slowest rank's seconds a microbatch, from seconds a sample."""
        return sample_s * self.batch_size / (self.microbatches + self.idle_steps)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """A rank's stages, by chunk."""
        return _stages_by_rank(self.laws, self.ranks, self.chunks)[rank]


@lru_cache(maxsize=256)
def _stages_by_rank(laws: Schedule, ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    pipeline = chunked_pipeline(laws, ranks=ranks, chunks=chunks, microbatches=1)
    return tuple(tuple(pipeline.stage_of(rank, chunk) for chunk in range(chunks)) for rank in range(ranks))


MOST_CHUNKS = 8
"""Upper bound on a rank's stages, unless more are requested: fills shrink as 1 / chunks, while messages grow."""


def shapes_of(
    schedule: str, options: Options, *, devices: int, blocks: int, batches: Sequence[tuple[int, int]]
) -> Iterator[ChunkedShape]:
    """Every shape of a schedule that can run on at most `devices` devices, with a model of `blocks` blocks.

    `batches` are the microbatch sizes, with the samples of a batch over each.
    """
    laws = schedule_named(schedule)
    for ranks in range(1, min(devices, blocks) + 1):
        most = min(blocks // ranks, max(MOST_CHUNKS, options.chunks or 1))
        every = (2,) if laws.v_shaped else range(1, most + 1)
        for chunks in every:
            asked = options.stages in (None, ranks) and options.chunks in (None, chunks)
            if not asked or ranks * chunks > blocks:
                continue
            for width in range(1, devices // ranks + 1):
                for size, samples in batches:
                    microbatches, rest = divmod(samples, width)
                    if rest or not laws.takes(ranks=ranks, chunks=chunks, microbatches=microbatches):
                        continue
                    yield ChunkedShape(
                        schedule=schedule,
                        ranks=ranks,
                        chunks=chunks,
                        width=width,
                        microbatch_size=size,
                        microbatches=microbatches,
                        recompute=options.recompute,
                    )
