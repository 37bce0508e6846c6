"""Predict: plan in, streams and timeline out. The runtime executes the same streams; here the costs play them."""

from planner_service.core.plan import Plan
from planner_service.core.schedule.among_stages import AmongStages, exchange_among_stages
from planner_service.core.schedule.long_program import repeat, short_batches
from planner_service.core.schedule.overlap import overlap_exchanges
from planner_service.core.schedule.pipeline import pipeline_of
from planner_service.core.schedule.program import Program, build
from planner_service.core.simulate import simulate
from planner_service.core.split_backward import split_backward
from planner_service.core.timeline import Timeline


def program_of(
    plan: Plan,
    *,
    batches: int,
    first_batch: int = 0,
    checkpoint_every: int = 0,
    among_stages: AmongStages = AmongStages(),  # noqa: B008 (frozen)
) -> Program:
    """The plan's streams for the batches [first_batch, first_batch + batches), with 2BP's split if it has one.

    Exchanges among replicas overlap with what else there is to do.
    """
    pipeline = pipeline_of(plan, batches=batches, first_batch=first_batch)
    program = build(plan.schedule, pipeline, plan.placement, checkpoint_every=checkpoint_every)
    if plan.split_backward:
        program = split_backward(program, plan.costs, half_way=plan.split_backward_half_way)
    return overlap_exchanges(exchange_among_stages(program, among_stages))


def long_program_of(
    plan: Plan,
    *,
    batches: int,
    first_batch: int = 0,
    checkpoint_every: int = 0,
    among_stages: AmongStages = AmongStages(),  # noqa: B008 (frozen)
) -> Program:
    """The same streams, of which no more than a few batches are kept, however many there are."""
    pipeline = pipeline_of(plan, batches=batches, first_batch=first_batch)
    few = short_batches(pipeline)
    if batches <= few:
        return program_of(
            plan,
            batches=batches,
            first_batch=first_batch,
            checkpoint_every=checkpoint_every,
            among_stages=among_stages,
        )
    short = program_of(plan, batches=few, first_batch=first_batch, among_stages=among_stages)
    return repeat(short, batches=batches, checkpoint_every=checkpoint_every)


def predict(
    plan: Plan,
    *,
    batches: int,
    first_batch: int = 0,
    among_stages: AmongStages = AmongStages(),  # noqa: B008 (frozen)
) -> Timeline:
    """The timeline that the plan's costs give for so many batches."""
    program = program_of(plan, batches=batches, first_batch=first_batch, among_stages=among_stages)
    return simulate(program, plan.costs)
