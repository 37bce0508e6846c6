"""Missed: why a run was slower or faster than its plan predicted, in samples a second by cause.

The plan's streams are played again and again, each time with one more of its costs as measured:

    predicted        the plan's own costs
    compute          forwards, backwards, recomputation and updates as long as the run's, less what other programs took
    link             and transfers between stages and gradient exchanges as long as the run's
    other programs   and the time in which other programs kept a computing process from its processor
    checkpoints      and the time to write one, as far as the median batch has it; no price has checkpoints
    waiting          the rest of the gap: single delays that other ranks waited for, which no typical duration shows

Ranks that share a core wait for each other there. No other program takes that time: it counts as compute as far as a
typical duration shows it, and otherwise as waiting.

A cause's part is the difference between its play and the play before. The parts sum to the gap. A duration is the
median of its kind, as in calibration. The time of a few disturbances therefore counts as waiting, or, where processor
time was measured, as that of other programs.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from pipeplan.calibration.samples import MeasuredRun, exchange_samples, stage_samples, steps, transfer_samples
from pipeplan.documents.plan import Plan
from pipeplan.documents.stage_costs import StageCosts
from pipeplan.programs.instructions import (
    Checkpoint,
    Forward,
    Instruction,
    Recompute,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    Update,
    is_compute,
)
from pipeplan.programs.timeline import Timeline, batch_s
from pipeplan.simulation.play import simulate
from pipeplan.simulation.predict import program_of
from pipeplan.simulation.report import Compared, KindReport, Missed

_COST_OF = {
    "forward": "forward_s",
    "forward-after-update": "forward_s",
    "forward-without-graph": "forward_s",
    "recompute": "recompute_s",
    "backward": "backward_s",
    "backward-by-block": "backward_s",
    "backward-input": "backward_input_s",
    "backward-weight": "backward_weight_s",
    "update": "update_s",
}
"""The stage cost of which a kind of sample is an instance."""

_KINDS = ("forward", "recompute", "backward", "update", "checkpoint", "send", "receive", "exchange")

Differences = dict[tuple[int, str], float]
"""By stage and cost, its excess over the prediction in seconds."""


def missed(
    plan: Plan,
    predicted: Timeline,
    measured: Timeline,
    throughput: Compared,
    *,
    others_took: Sequence[float | None] = (),
) -> Missed:
    """The gap between predicted and measured throughput, by cause.

    `predicted` is the plan's play, whose first batch and number of batches the other plays share. `others_took` is, by
    rank, the share of compute time in which other programs kept its process from a processor. Plays at most four
    times.
    """
    expected, seen = (MeasuredRun(plan=plan, timeline=timeline) for timeline in (predicted, measured))
    lost = _lost_by_stage(seen, others_took)
    whole, own = _compute(expected, seen, lost)
    link = _link(expected, seen)

    taken = whole | link
    written = {key: taken.get(key, 0.0) + each_s for key, each_s in _checkpoints(seen).items()}
    plays = [plan.costs, *(_changed(plan.costs, each) for each in (own, own | link, taken, taken | written))]
    took_s = [batch_s(predicted)]
    for before, costs in pairwise(plays):
        if costs == before:
            took_s.append(took_s[-1])
        else:
            took_s.append(batch_s(simulate(program_of(plan, batches=predicted.batches), costs)))

    # In samples a second: the gap is divided in proportion to the seconds a batch.
    gap, size = throughput.measured - throughput.predicted, plan.batch_size
    gap_s = size / throughput.measured - size / throughput.predicted
    a_second = gap / gap_s if gap_s else -(throughput.predicted**2) / size
    compute, between, others, checkpoints = (a_second * (later - sooner) for sooner, later in pairwise(took_s))
    return Missed(
        compute=compute,
        link=between,
        waiting=gap - compute - between - others - checkpoints,
        other_programs=others if lost else None,
        checkpoints=checkpoints,
        kinds=kinds(predicted, measured),
    )


def costs_as_measured(
    plan: Plan, predicted: Timeline, measured: Timeline, others_took: Sequence[float | None]
) -> tuple[StageCosts, ...]:
    """The plan's costs with compute as long as in a run, less what other programs took of it."""
    expected, seen = (MeasuredRun(plan=plan, timeline=timeline) for timeline in (predicted, measured))
    _, own = _compute(expected, seen, _lost_by_stage(seen, others_took))
    return _changed(plan.costs, own)


def kinds(predicted: Timeline, measured: Timeline) -> tuple[KindReport, ...]:
    """Seconds a batch of each kind of instruction, the mean over the ranks. The last kind is the time in none."""
    before, after = _seconds_by_kind(predicted), _seconds_by_kind(measured)
    return tuple(
        KindReport(kind=kind, s_per_batch=Compared(predicted=before[kind], measured=after[kind]))
        for kind in before
        if before[kind] or after[kind]
    )


def _seconds_by_kind(timeline: Timeline) -> dict[str, float]:
    found = dict.fromkeys(_KINDS, 0.0)
    share = 1 / len(timeline.lanes) / timeline.batches
    for lane in timeline.lanes:
        for event in lane.events():
            found[_kind(event.instruction)] += share * (event.end_s - event.start_s)
    return found | {"idle": max(timeline.makespan_s / timeline.batches - sum(found.values()), 0.0)}


def _kind(instruction: Instruction) -> str:
    match instruction:
        case Forward():
            return "forward"
        case Recompute():
            return "recompute"
        case _ if is_compute(instruction):
            return "backward"
        case SendActivation() | SendGradient():
            return "send"
        case RecvActivation() | RecvGradient():
            return "receive"
        case Update():
            return "update"
        case Checkpoint():
            return "checkpoint"
        case _:
            return "exchange"


def _lost_by_stage(seen: MeasuredRun, others_took: Sequence[float | None]) -> dict[int, float]:
    """By stage the mean share of its replicas' compute time that other programs took; empty where one is unknown."""
    shares = defaultdict(list)
    for lane, share in zip(seen.timeline.lanes, others_took, strict=bool(others_took)):
        if share is None:
            return {}
        for stage in seen.stages[lane.stage]:
            shares[stage].append(share)
    return {stage: fmean(its) for stage, its in shares.items()}


def _compute(expected: MeasuredRun, seen: MeasuredRun, lost: dict[int, float]) -> tuple[Differences, Differences]:
    """The excess of compute over the prediction: with the time that other programs took, and without it.

    A stage's own work is never more than the median: if other programs delayed only a few instructions, the median does
    not show it.
    """
    typical, usual = stage_samples(expected), stage_samples(seen)
    mean = stage_samples(seen, typical=fmean)
    whole: Differences = {}
    own: Differences = {}
    weights: dict[tuple[int, str], int] = defaultdict(int)
    for (stage, kind), sampled in usual.items():
        weights[stage, _COST_OF[kind]] += sampled.count
    for (stage, kind), sampled in usual.items():
        if (stage, kind) not in typical:
            continue
        key = stage, _COST_OF[kind]
        taken_s = lost.get(stage, 0.0) * mean[stage, kind].value if kind != "update" else 0.0
        own_s = min(sampled.value, mean[stage, kind].value - taken_s) if lost else sampled.value
        share = sampled.count / weights[key]
        own[key] = own.get(key, 0.0) + share * (own_s - typical[stage, kind].value)
        whole[key] = whole.get(key, 0.0) + share * (own_s + taken_s - typical[stage, kind].value)
    return whole, own


def _link(expected: MeasuredRun, seen: MeasuredRun) -> Differences:
    """The excess of transfers between stages, and of exchanges, over the prediction."""
    found: Differences = {}
    known, delays = transfer_samples(expected).delays_s, transfer_samples(seen).delays_s
    for boundary in known.keys() & delays.keys():
        longer_s = delays[boundary].value - known[boundary].value
        found[boundary, "activation_transfer_s"] = longer_s
        found[boundary + 1, "gradient_transfer_s"] = longer_s
    predicted, exchanged = exchange_samples(expected), exchange_samples(seen)
    for stage in predicted.keys() & exchanged.keys():
        longer_s = exchanged[stage].value - predicted[stage].value
        found[stage, "reduce_s"] = longer_s
        found[stage, "reduce_tail_s"] = longer_s
    return found


def _checkpoints(seen: MeasuredRun) -> Differences:
    """The time that checkpoints add to a stage's updates, as far as the median time between two batches' ends has it.

    All of it if most batches end with a checkpoint, half of it if half of them do, else nothing. One of a stage's
    replicas writes, and the others wait for it: the longest counts.
    """
    found: Differences = {}
    batches = seen.timeline.batches
    for lane in seen.timeline.lanes:
        done = steps(lane)
        for chunk, stage in enumerate(seen.stages[lane.stage]):
            own = [step for step in done if step.instruction.chunk == chunk]
            updates = [index for index, step in enumerate(own) if isinstance(step.instruction, Update)]
            written_s = [step.duration_s for step in own[: updates[-1]] if isinstance(step.instruction, Checkpoint)]
            if written_s and 2 * len(written_s) >= batches - 1:
                share = 1.0 if 2 * len(written_s) > batches - 1 else 0.5
                added_s = share * median(written_s) / (len(updates) // batches)
                found[stage, "update_s"] = max(found.get((stage, "update_s"), 0.0), added_s)
    return found


def _changed(costs: Sequence[StageCosts], differences: Differences) -> tuple[StageCosts, ...]:
    """The costs, each increased by its difference; none falls below 0."""
    found = list(costs)
    for (stage, name), longer_s in sorted(differences.items()):
        value_s = getattr(found[stage], name)
        if value_s is not None:
            found[stage] = replace(found[stage], **{name: max(value_s + longer_s, 0.0)})
    return tuple(found)
