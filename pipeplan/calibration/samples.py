"""Samples: the medians of each stage's instructions in a run's timeline, without its first batches.

An instruction's duration is the time from its start to the next one's start. The pause between two instructions is a
cost of executing them, and a plan's costs have no other place for it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import TypeAlias

from pipeplan.costs.memory import stages_by_rank
from pipeplan.documents.plan import Plan, Stage, Worker
from pipeplan.documents.profile import DeviceMemory
from pipeplan.errors import require
from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Recompute,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendGradient,
    Update,
)
from pipeplan.programs.timeline import Lane, Timeline

WARM_UP_SHARE = 0.1
"""The share of a run's batches that is ignored at its start; at least one batch, if there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A plan, and the timeline of its execution.

    `peak_resident_bytes`: every process's, by rank, if known; `device_memory`: likewise, if all had their own GPUs.
    """

    plan: Plan
    timeline: Timeline
    peak_resident_bytes: tuple[int, ...] = ()
    device_memory: tuple[DeviceMemory, ...] = ()

    def __post_init__(self) -> None:
        lanes = [Worker(stage=lane.stage, replica=lane.replica) for lane in self.timeline.lanes]
        rule = f"must be the {self.plan.workers} workers of the plan, by rank"
        require(lanes == list(self.plan.placement), "timeline.lanes", rule, len(lanes))
        updates = [_updates(lane) // self.plan.chunks for lane in self.timeline.lanes]
        rule = f"must hold an update of every stage for each of its {self.timeline.batches} batches"
        require(min(updates) >= self.timeline.batches, "timeline.lanes", rule, min(updates))
        for field in ("peak_resident_bytes", "device_memory"):
            known = len(getattr(self, field))
            require(known in (0, len(lanes)), field, "must have one entry for each worker, or none", known)

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank of a pipeline, by chunk: what stage an instruction of a lane is for."""
        return stages_by_rank(self.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One quantity, observed several times: median and interquartile range."""

    value: float
    spread: float
    count: int

    @property
    def relative_spread(self) -> float:
        """The spread as a share of the value; 0 if the value is 0."""
        return self.spread / self.value if self.value > 0 else 0.0


@dataclass(frozen=True, slots=True)
class SampledStep:
    """One instruction of a lane: when it began, and when the next one could."""

    instruction: Instruction
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """The time between."""
        return self.end_s - self.start_s


StageSamples = Mapping[tuple[int, str], Sample]
"""By stage and kind of instruction."""


def sample(values: Sequence[float], typical: Callable[[Sequence[float]], float] = median) -> Sample:
    """The median of at least one value, or another typical value, and the interquartile range."""
    lower, _, upper = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (0.0, 0.0, 0.0)
    return Sample(value=typical(values), spread=upper - lower, count=len(values))


def steps(lane: Lane) -> list[SampledStep]:
    """A worker's instructions."""
    events = list(lane.events())
    ends_s = [later.start_s for _, later in pairwise(events)] + [event.end_s for event in events[-1:]]
    return [
        SampledStep(event.instruction, event.start_s, max(end_s, event.end_s))
        for event, end_s in zip(events, ends_s, strict=True)
    ]


def settled(lane: Lane, batches: int) -> list[SampledStep]:
    """A worker's instructions after the warm-up batches."""
    if batches == 1:
        return steps(lane)
    skipped = max(int(batches * WARM_UP_SHARE), 1) * (_updates(lane) // batches)
    done = steps(lane)
    ends = [index for index, step in enumerate(done) if isinstance(step.instruction, Update)]
    return done[ends[skipped - 1] + 1 :]


def _updates(lane: Lane) -> int:
    return sum(isinstance(instruction, Update) for instruction in lane.instructions)


def stage_samples(run: MeasuredRun, typical: Callable[[Sequence[float]], float] = median) -> StageSamples:
    """The typical durations of every stage's computing and updating, all its replicas together, by kind:

    forward, forward-after-update (an update has just been through the caches), forward-without-graph (of a stage that
    recomputes), recompute, backward, backward-by-block (with the forward that it runs again), backward-input,
    backward-weight (a microbatch), update.
    """
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    stages = run.stages
    for lane in run.timeline.lanes:
        updated = False
        for step in settled(lane, run.timeline.batches):
            one = step.instruction
            if not isinstance(one, Compute | Update):
                continue
            stage = stages[lane.stage][one.chunk]
            kind = _kind(one, run.plan.stages[stage])
            if isinstance(one, Forward | Update):
                kind = "forward-after-update" if kind == "forward" and updated else kind
                updated = isinstance(one, Update)
            microbatches = len(one.microbatches) if isinstance(one, BackwardWeight) else 1
            found[stage, kind].append(step.duration_s / microbatches)
    return {key: sample(values, typical) for key, values in sorted(found.items())}


def _kind(one: Compute | Update, stage: Stage) -> str:
    match one:
        case Forward():
            return "forward-without-graph" if stage.recompute else "forward"
        case Recompute():
            return "recompute"
        case Backward():
            return "backward-by-block" if stage.recompute_unit == "block" else "backward"
        case BackwardInput():
            return "backward-input"
        case BackwardWeight():
            return "backward-weight"
        case Update():
            return "update"


def exchange_samples(run: MeasuredRun) -> Mapping[int, Sample]:
    """By stage the seconds of the gradient exchange, from the moment at which the last replica has reached it."""
    started: dict[tuple[int, int], list[float]] = defaultdict(list)
    ended: dict[tuple[int, int], list[float]] = defaultdict(list)
    stages = run.stages
    for lane in run.timeline.lanes:
        for step in settled(lane, run.timeline.batches):
            if isinstance(step.instruction, ReduceGradients):
                key = stages[lane.stage][step.instruction.chunk], step.instruction.version
                started[key].append(step.start_s)
                ended[key].append(step.end_s)
    by_stage: dict[int, list[float]] = defaultdict(list)
    for (stage, version), starts_s in started.items():
        by_stage[stage].append(max(median(ended[stage, version]) - max(starts_s), 0.0))
    return {stage: sample(values) for stage, values in sorted(by_stage.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSamples:
    """The observations of a run's sends and receives.

    By boundary (the stage before it). `send_s` and `found_s`: seconds of every send, and of every receive whose tensor
    had arrived before it began. `delays_s`: from a send's end to the end of a receive that waited for it.
    """

    send_s: Mapping[int, Sequence[float]]
    found_s: Mapping[int, Sequence[float]]
    delays_s: Mapping[int, Sample]

    @property
    def own_s(self) -> tuple[Mapping[int, Sequence[float]], Mapping[int, Sequence[float]]]:
        """A rank's own seconds for messages: of sends, and of receives that need not wait."""
        return self.send_s, self.found_s


_UNSEEN = Sample(value=float("inf"), spread=0.0, count=0)


_Message: TypeAlias = tuple[int, bool, int]
"""The boundary that a message crosses (the stage before it), whether it holds gradients, and its microbatch."""


def transfer_samples(run: MeasuredRun) -> TransferSamples:
    """The observations of a run's sends and receives, matched."""
    stages = run.stages
    sent_s: dict[_Message, float] = {}
    send_s, found_s = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    received: list[tuple[_Message, SampledStep]] = []
    for lane in run.timeline.lanes:
        for step in steps(lane):
            match step.instruction:
                case SendActivation() | SendGradient() as send:
                    sent_s[_message(send, stages[lane.stage][send.chunk])] = step.end_s
        for step in settled(lane, run.timeline.batches):
            match step.instruction:
                case SendActivation() | SendGradient() as send:
                    send_s[_message(send, stages[lane.stage][send.chunk])[0]].append(step.duration_s)
                case RecvActivation() | RecvGradient() as receive:
                    received.append((_message(receive, stages[lane.stage][receive.chunk]), step))
    matched = [(message, step, sent_s[message]) for message, step in received if message in sent_s]
    delays_s = _delays_s(matched)
    for (boundary, _, _), step, end_s in matched:
        if step.start_s - end_s > 2 * delays_s.get(boundary, _UNSEEN).value:
            found_s[boundary].append(step.duration_s)
    return TransferSamples(send_s=send_s, found_s=found_s, delays_s=delays_s)


def _message(end: SendActivation | RecvActivation | SendGradient | RecvGradient, stage: int) -> _Message:
    """The message of which this is one end, on this stage."""
    before = isinstance(end, RecvActivation | SendGradient)
    return stage - before, isinstance(end, SendGradient | RecvGradient), end.microbatch


def _delays_s(matched: Iterable[tuple[_Message, SampledStep, float]]) -> Mapping[int, Sample]:
    """By boundary the lower quartile of the delays of those receives that began before their tensor was sent.

    The clocks of two ranks have a small offset. The two directions of a boundary carry equal bytes: the mean of their
    delays is free of the offset. A boundary is left out where only one direction was observed.
    """
    delays_s: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for (boundary, gradients, _), step, end_s in matched:
        if step.start_s < end_s:
            delays_s[boundary, gradients].append(step.end_s - end_s)
    boundaries = sorted({boundary for boundary, _ in delays_s})
    return {
        boundary: Sample(
            value=max((_quick(delays_s[boundary, False]) + _quick(delays_s[boundary, True])) / 2, 0.0),
            spread=max(sample(delays_s[boundary, gradients]).spread for gradients in (False, True)),
            count=len(delays_s[boundary, False]) + len(delays_s[boundary, True]),
        )
        for boundary in boundaries
        if delays_s[boundary, False] and delays_s[boundary, True]
    }


def _quick(values: Sequence[float]) -> float:
    """The lower quartile: the values above it may have waited for a core or for another message."""
    return quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]
