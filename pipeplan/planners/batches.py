"""Batches: plays some batches of a plan's streams. One pipeline stands for all if they do the same at the same time.

Without a flush the first batches are not like the later ones: an exchange may fall behind for many batches before it
holds up a rank. A play is steady when all ranks and exchanges come later by the same time from batch to batch, or from
period to period of several batches. Nothing else decides what follows, which is then the same for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.costs.memory import stages_by_rank
from pipeplan.costs.transfer import ranks_by_stage
from pipeplan.documents.engines import engine_named
from pipeplan.documents.plan import Plan
from pipeplan.programs.communicate import exchanging
from pipeplan.programs.pipeline import Pipeline, pipeline_of
from pipeplan.programs.program import Program, settled_batches
from pipeplan.programs.timeline import Timeline, steady_batch_s
from pipeplan.schedules.registry import BUILT_IN, build, schedule_named
from pipeplan.simulation.play import simulate
from pipeplan.simulation.predict import exchanging_among_stages, program_of, with_exchanges
from pipeplan.simulation.split_backward import split_backward
from pipeplan.simulation.total import Total, total

EQUAL = 1e-8
"""Batches whose times differ by no more than this share count as equal: sums round differently."""

MANY, ALIKE = 192, 1e-3
"""Times that do not repeat in `MANY` microbatches are steady if no event's mean differs by more than the share `ALIKE`.
"""


@dataclass(frozen=True, slots=True)
class Pace:
    """The seconds of a batch, and whether they are those of all later batches."""

    batch_s: float
    steady: bool


def pace(plan: Plan, played: Total) -> Pace:
    """The pace of a play of four batches at least, of a schedule without a flush.

    If the last batches repeat, it is the mean over a period. If they do not, it is the mean over all batches but those
    that fill and drain the pipeline (`steady_batch_s`): steady if these are many, and no event falls behind.
    """
    batches = len(played.batch_ends_s)
    behind = settled_batches(pipeline_of(plan, batches=batches)) - 1  # what a batch depends on; as many drain it
    events_s = played.events_s[: max(batches - behind, 2)]
    last = len(events_s) - 1
    period = _period(events_s, behind)
    if period:
        return Pace((played.batch_ends_s[last] - played.batch_ends_s[last - period]) / period, steady=True)
    batch_s = steady_batch_s(played.batch_ends_s, plan.optimal_in_flight)
    half = last // 2
    means_s = (events_s[last] - events_s[last - half]) / max(half, 1)
    alike = float(np.abs(means_s - batch_s).max()) <= ALIKE * batch_s
    return Pace(batch_s, steady=bool(alike and last * minibatches(plan) >= MANY))


def _period(events_s: FloatArray, behind: int) -> int:
    """The fewest batches after which all events repeat, for as many batches as one depends on; 0 if they do not."""
    stop = len(events_s)
    for period in range(1, stop // 2 + 1):
        rows = max(period, behind)
        if rows + period > stop:
            break
        for some in (1, rows):  # the last batch alone rules out most periods
            later_s = events_s[stop - some :] - events_s[stop - some - period : stop - period]
            if np.ptp(later_s) > EQUAL * later_s.max():
                break
        else:
            return period
    return 0


def played_batches(plan: Plan, batches: int) -> Total:
    """The totals of `batches` batches.

    If every rank is idle when the first one ends a batch, the next batch is the same: one is played, and counts
    `batches` times.
    """
    if batches > 1 and first_rank_ends_last(plan):
        once = _total(plan, 1)
        end_s = once.batch_ends_s[0]
        if once.span_s <= end_s:
            return Total(
                batch_ends_s=tuple(end_s * batch for batch in range(1, batches + 1)),
                span_s=end_s * batches,
                busy_s=tuple(busy_s * batches for busy_s in once.busy_s),
                peak_bytes=once.peak_bytes,
                events_s=np.add.outer(end_s * np.arange(batches), once.events_s[0]),
            )
    return _total(plan, batches)


def first_rank_ends_last(plan: Plan) -> bool:
    """Whether the first rank probably ends last, for an engine that exchanges after the backward of a batch.

    The others end their backward earlier, by a gradient's transfer time from them to the first rank.
    """
    if not schedule_named(plan.schedule).flushes or engine_named(plan.engine).overlaps or plan.width is None:
        return False
    by_rank, costs = stages_by_rank(plan), plan.costs
    ends_s = [sum(costs[stage].reduce_s + costs[stage].update_s for stage in stages) for stages in by_rank]
    later_s = accumulate((own.backward_s + own.gradient_transfer_s for own in costs), initial=0.0)
    return all(end_s <= ends_s[0] + way_s for end_s, way_s in zip(ends_s, later_s, strict=False))


def _total(plan: Plan, batches: int) -> Total:
    """The totals of batches that are all played."""
    # 2BP reads the whole streams, and other engines' schedules are checked on them.
    implied = plan.schedule in BUILT_IN and not plan.split_backward
    return total(_program(plan, batches, implied=implied), plan.costs, _devices(plan), implied=implied)


def one_pipeline(plan: Plan, *, batches: int) -> Timeline:
    """The timeline of one pipeline that stands for all, on their devices: a lane for every stage.

    Replicas of equal width do the same at the same time, so what one sends stands for what all send, through all their
    ports. Where the stages' replicas differ, and where they take turns (ASP), all workers are played.
    """
    return simulate(_program(plan, batches), plan.costs, _devices(plan))


def _program(plan: Plan, batches: int, *, implied: bool = False) -> Program:
    """The streams of one pipeline that stands for all, or of all workers; their transfers may be `implied`."""
    if not stands_for_all(plan):
        return program_of(plan, batches=batches, implied=implied)
    pipeline = Pipeline(
        replicas=(1,) * plan.depth,
        microbatches=plan.microbatches,
        batches=batches,
        recompute=tuple(stage.recompute for stage in plan.stages),
        recompute_units=tuple(stage.recompute_unit for stage in plan.stages),
        chunks=plan.chunks,
    )
    program = build(plan.schedule, pipeline, implied=implied)
    if plan.replicas[0] > 1:  # a stage exchanges the gradients of all the replicas for which it stands
        streams = (replace(each, instructions=tuple(exchanging(each.instructions))) for each in program.streams)
        program = replace(program, streams=tuple(streams))
    if plan.split_backward:
        program = split_backward(program, plan.costs, _devices(plan), half_way=plan.split_backward_half_way)
    return with_exchanges(exchanging_among_stages(program, plan), plan)


def _devices(plan: Plan) -> Sequence[Sequence[int]]:
    """The devices of the ranks that are played."""
    return ranks_by_stage(plan.placement) if stands_for_all(plan) else ()


def minibatches(plan: Plan) -> int:
    """The minibatches of a batch that are played: those of one pipeline if it represents all."""
    return plan.microbatches if stands_for_all(plan) else plan.microbatches * lcm(*plan.replicas)


def stands_for_all(plan: Plan) -> bool:
    """Whether one pipeline stands for all when the plan is played."""
    return plan.width is not None and schedule_named(plan.schedule).update != "replica"
