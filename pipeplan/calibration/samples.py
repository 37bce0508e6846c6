"""Samples: the medians of each stage's instructions in a run's timeline, without its first batches.

An instruction takes from its start to the start of the next one. The time between two instructions is the cost of
executing them, and a plan's costs have no other place for it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

from pipeplan.documents.plan import Plan, Worker
from pipeplan.documents.profile import DeviceMemory
from pipeplan.errors import require
from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
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
        rule = "must hold one stage a rank: the costs of several stages of a rank cannot be separated"
        require(self.plan.chunks == 1, "plan.chunks", rule, self.plan.chunks)
        lanes = [Worker(stage=lane.stage, replica=lane.replica) for lane in self.timeline.lanes]
        rule = f"must be the {self.plan.workers} workers of the plan, by rank"
        require(lanes == list(self.plan.placement), "timeline.lanes", rule, len(lanes))
        updates = [_updates(lane) for lane in self.timeline.lanes]
        rule = f"must hold an update on every worker for each of its {self.timeline.batches} batches"
        require(min(updates) >= self.timeline.batches, "timeline.lanes", rule, min(updates))
        for field in ("peak_resident_bytes", "device_memory"):
            known = len(getattr(self, field))
            require(known in (0, len(lanes)), field, "must have one entry for each worker, or none", known)


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
    for lane in run.timeline.lanes:
        recomputes, updated = run.plan.stages[lane.stage].recompute, False
        by_block = run.plan.stages[lane.stage].recompute_unit == "block"
        for step in settled(lane, run.timeline.batches):
            duration_s = step.duration_s
            match step.instruction:
                case Forward():
                    kind = "forward-after-update" if updated else "forward"
                    kind = "forward-without-graph" if recomputes else kind
                    updated = False
                case Recompute():
                    kind = "recompute"
                case Backward():
                    kind = "backward-by-block" if by_block else "backward"
                case BackwardInput():
                    kind = "backward-input"
                case BackwardWeight(microbatches=numbers):
                    kind, duration_s = "backward-weight", step.duration_s / len(numbers)
                case Update():
                    kind, updated = "update", True
                case _:
                    continue
            found[lane.stage, kind].append(duration_s)
    return {key: sample(values, typical) for key, values in sorted(found.items())}


def exchange_samples(run: MeasuredRun) -> Mapping[int, Sample]:
    """By stage the seconds of the gradient exchange, from the moment at which the last replica has reached it."""
    started: dict[tuple[int, int], list[float]] = defaultdict(list)
    ended: dict[tuple[int, int], list[float]] = defaultdict(list)
    for lane in run.timeline.lanes:
        for step in settled(lane, run.timeline.batches):
            if isinstance(step.instruction, ReduceGradients):
                key = lane.stage, step.instruction.version
                started[key].append(step.start_s)
                ended[key].append(step.end_s)
    by_stage: dict[int, list[float]] = defaultdict(list)
    for (stage, version), starts_s in started.items():
        by_stage[stage].append(max(median(ended[stage, version]) - max(starts_s), 0.0))
    return {stage: sample(values) for stage, values in sorted(by_stage.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSamples:
    """The observations of a run's sends and receives.

    `send_s` and `found_s`: seconds of every send, and of every receive whose tensor had arrived before it began.
    `delays_s`: by boundary (the stage before it), from a send's end to the end of a receive that waited for it.
    """

    send_s: tuple[float, ...]
    found_s: tuple[float, ...]
    delays_s: Mapping[int, Sample]


_UNSEEN = Sample(value=float("inf"), spread=0.0, count=0)


def transfer_samples(run: MeasuredRun) -> TransferSamples:
    """The observations of a run's sends and receives, matched."""
    sent_s: dict[tuple[int, int, bool, int], float] = {}
    send_s: list[float] = []
    received: list[tuple[tuple[int, int, bool, int], SampledStep]] = []
    for lane in run.timeline.lanes:
        for step in steps(lane):
            match step.instruction:
                case SendActivation(microbatch=k, peer=peer) | SendGradient(microbatch=k, peer=peer) as send:
                    sent_s[lane.rank, peer, isinstance(send, SendGradient), k] = step.end_s
        for step in settled(lane, run.timeline.batches):
            match step.instruction:
                case SendActivation() | SendGradient():
                    send_s.append(step.duration_s)
                case RecvActivation(microbatch=k, peer=peer) | RecvGradient(microbatch=k, peer=peer) as receive:
                    received.append(((peer, lane.rank, isinstance(receive, RecvGradient), k), step))
    matched = [(key, step, sent_s[key]) for key, step in received if key in sent_s]
    delays_s = _delays_s(run.plan, matched)
    found_s = [
        step.duration_s
        for (source, target, _, _), step, end_s in matched
        if step.start_s - end_s > 2 * delays_s.get(_boundary(run.plan, source, target), _UNSEEN).value
    ]
    return TransferSamples(send_s=tuple(send_s), found_s=tuple(found_s), delays_s=delays_s)


def _delays_s(
    plan: Plan, matched: Iterable[tuple[tuple[int, int, bool, int], SampledStep, float]]
) -> Mapping[int, Sample]:
    """By boundary the lower quartile of the delays of those receives that began before their tensor was sent.

    The clocks of two ranks start a little apart. The two directions of a boundary carry equal bytes: the mean of their
    delays is free of that difference. A boundary is left out where only one direction was seen.
    """
    delays_s: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for (source, target, gradients, _), step, end_s in matched:
        if step.start_s < end_s:
            delays_s[_boundary(plan, source, target), gradients].append(step.end_s - end_s)
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


def _boundary(plan: Plan, source: int, target: int) -> int:
    return min(plan.placement[source].stage, plan.placement[target].stage)


def _quick(values: Sequence[float]) -> float:
    """The lower quartile: the values above it may have waited for a core or for another message."""
    return quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]
