"""Report: a run, and how it compares with what its plan predicted. Two timelines in, one document out."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar, TypeAlias

from pipeplan.documents.names import STRICT, require_line
from pipeplan.documents.profile import DeviceMemory
from pipeplan.errors import LARGEST_AMOUNT, require, require_amount, require_count
from pipeplan.programs.timeline import Lane, LaneSummary, Summary, Timeline

Played: TypeAlias = Timeline | Summary
"""The timeline of a plan's batches: every instruction, or a summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One quantity, predicted and measured."""

    predicted: float
    measured: float

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        for field, value in (("predicted", self.predicted), ("measured", self.measured)):
            require(abs(value) <= LARGEST_AMOUNT, field, f"must be within {LARGEST_AMOUNT:g} of 0", value)

    @property
    def error(self) -> float:
        """(measured - predicted) / predicted; 0 if both are 0."""
        if self.predicted == 0:
            return 0.0 if self.measured == 0 else float("inf")
        return (self.measured - self.predicted) / self.predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One stage: compute seconds a batch, the mean over its replicas, and the most bytes that one of them held.

    `peak_memory_bytes` is None where the runtime could not count all that a worker held.
    """

    stage: int
    busy_s_per_batch: Compared
    peak_memory_bytes: Compared | None

    __pydantic_config__: ClassVar = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One process: bytes of tensors held at the peak, as the runtime counts them (None: it kept tensors whose bytes
    cannot be counted), and its largest resident size.

    That is the host's memory. `device_memory` is its use of a GPU of its own, None without a GPU.
    `off_processor_fraction`: the share of its compute time in which the process was not on a processor, because others
    were; None of a GPU, and of a process that computes with several threads.
    `deferred_share`: how much of the time of its split backwards was p2's, 0 where nothing could be deferred; None
    where no backward was split.
    `compute_spread`: how much longer the compute of a batch took in the slowest eighth of the run than in the fastest,
    by their medians (0.1: a tenth); None of a run that was too short for this.
    `reads_memory_of`: the ranks of its node whose memory it read for messages between hosts; gloo moved all others.
    """

    rank: int
    stage: int
    replica: int
    peak_memory_bytes: int | None
    peak_resident_bytes: int
    device_memory: DeviceMemory | None = None
    off_processor_fraction: float | None = None
    deferred_share: float | None = None
    compute_spread: float | None = None
    reads_memory_of: tuple[int, ...] = ()

    __pydantic_config__: ClassVar = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class KindReport:
    """One kind of instruction, the mean over the ranks: forward, recompute, backward, update, send, receive (with
    waiting for what it receives), exchange, and idle, the time in none of them. All together are a batch's time.
    """

    kind: str
    s_per_batch: Compared

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_line("kind", self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """Why a run's throughput differs from the prediction: each cause's contribution, in samples/s, negative if it
    slowed the run.

    The parts sum to measured - predicted (`calibration.missed` says how they are found). `other_programs` is None if no
    rank knows its time on a processor; it is then included in the other parts. `checkpoints` is 0 where fewer than half
    of the batches end with one: throughput is that of the median batch.
    """

    compute: float
    link: float
    waiting: float
    other_programs: float | None
    kinds: tuple[KindReport, ...]
    checkpoints: float = 0.0

    __pydantic_config__: ClassVar = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Repredicted:
    """The prediction that a run's first `batches` give, which took `elapsed_s`, beside what all batches measured.

    Compute takes what it took there, less what other programs took of it.
    """

    batches: int
    elapsed_s: float
    throughput_samples_per_s: Compared

    __pydantic_config__: ClassVar = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a run measured. `losses` has one entry a step, from `first_step` on. `earlier_losses` are those of the steps
    before, which other starts of the run have done, as far back as they are known.

    `repredicted` is None of runs with fewer than three batches.
    """

    schedule: str
    first_step: int
    steps: int
    batch_size: int
    losses: tuple[float, ...]
    elapsed_s: float
    throughput_samples_per_s: Compared
    bubble_fraction: Compared
    stages: tuple[StageReport, ...]
    ranks: tuple[RankReport, ...]
    missed: Missed | None = None
    repredicted: Repredicted | None = None
    earlier_losses: tuple[float, ...] = ()

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_line("schedule", self.schedule)
        require_count("first_step", self.first_step, at_least=0)
        require_count("steps", self.steps)
        require_count("batch_size", self.batch_size)
        rule = f"must be at most {self.first_step}, as many as the steps before first_step"
        require(len(self.earlier_losses) <= self.first_step, "earlier_losses", rule, len(self.earlier_losses))
        require_amount("elapsed_s", self.elapsed_s)
        rate = self.throughput_samples_per_s
        require_amount("throughput_samples_per_s.predicted", rate.predicted, positive=True)
        require_amount("throughput_samples_per_s.measured", rate.measured)

    @property
    def first_loss_step(self) -> int:
        """The first step whose loss is known."""
        return self.first_step - len(self.earlier_losses)


def compare_stages(predicted: Played, measured: Played) -> tuple[StageReport, ...]:
    """Per stage, compute a batch and the peak memory in both timelines."""
    found = []
    for stage in sorted({lane.stage for lane in measured.lanes}):
        peaks = [[lane.peak_memory_bytes for lane in _lanes(played, stage)] for played in (predicted, measured)]
        known = [[float(peak) for peak in each if peak is not None] for each in peaks]
        busy = Compared(predicted=_busy_s_per_batch(predicted, stage), measured=_busy_s_per_batch(measured, stage))
        held = Compared(predicted=max(known[0]), measured=max(known[1])) if known == peaks else None
        found.append(StageReport(stage=stage, busy_s_per_batch=busy, peak_memory_bytes=held))
    return tuple(found)


def _lanes(played: Played, stage: int) -> Sequence[Lane | LaneSummary]:
    return [lane for lane in played.lanes if lane.stage == stage]


def _busy_s_per_batch(played: Played, stage: int) -> float:
    return fmean(lane.busy_s for lane in _lanes(played, stage)) / played.batches


def report_run(
    *,
    schedule: str,
    predicted: Summary,
    measured: Summary,
    first_step: int,
    losses: tuple[float, ...],
    ranks: tuple[RankReport, ...],
) -> RunReport:
    """A run's report: its measurements beside the plan's predictions for as many batches."""
    return RunReport(
        schedule=schedule,
        first_step=first_step,
        steps=measured.batches,
        batch_size=measured.batch_size,
        losses=losses,
        elapsed_s=measured.makespan_s,
        throughput_samples_per_s=Compared(
            predicted=predicted.throughput_samples_per_s, measured=measured.throughput_samples_per_s
        ),
        bubble_fraction=Compared(predicted=predicted.bubble_fraction, measured=measured.bubble_fraction),
        stages=compare_stages(predicted, measured),
        ranks=ranks,
    )
