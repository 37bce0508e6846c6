"""Batches: plays some batches of a plan's streams. One pipeline stands for all if they do the same at the same time."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from pipeplan.costs.memory import stages_by_rank
from pipeplan.costs.transfer import ranks_by_stage
from pipeplan.documents.engines import engine_named
from pipeplan.documents.plan import Plan
from pipeplan.programs.communicate import exchanging
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.program import Program
from pipeplan.programs.timeline import Timeline
from pipeplan.schedules.registry import BUILT_IN, build, schedule_named
from pipeplan.simulation.play import simulate
from pipeplan.simulation.predict import exchanging_among_stages, program_of, with_exchanges
from pipeplan.simulation.split_backward import split_backward
from pipeplan.simulation.total import Total, total


def played_batches(plan: Plan, batches: int) -> Total:
    """The totals of so many batches.

    If every rank is idle when the first one ends a batch, the next batch is the same: one is played, and counts as
    often as is asked for.
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
            )
    return _total(plan, batches)


def first_rank_ends_last(plan: Plan) -> bool:
    """Whether it probably does, for an engine that exchanges after the backward of a batch.

    The others end their backward earlier, by what a gradient takes from them to the first rank.
    """
    if not schedule_named(plan.schedule).flushes or engine_named(plan.engine).overlaps or plan.width is None:
        return False
    by_rank, costs = stages_by_rank(plan), plan.costs
    ends_s = [sum(costs[stage].reduce_s + costs[stage].update_s for stage in stages) for stages in by_rank]
    later_s = accumulate((own.backward_s + own.gradient_transfer_s for own in costs), initial=0.0)
    return all(end_s <= ends_s[0] + way_s for end_s, way_s in zip(ends_s, later_s, strict=False))


def _total(plan: Plan, batches: int) -> Total:
    """The totals of batches that are all played."""
    # 2BP looks at the whole streams, and others' schedules are checked on them.
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


def stands_for_all(plan: Plan) -> bool:
    """Whether one pipeline stands for all when the plan is played."""
    return plan.width is not None and schedule_named(plan.schedule).update != "replica"
