"""Predict: plan in, timeline out. The same streams that the runtime executes, played with the plan's costs."""

from planner_service.core.plan import Plan
from planner_service.core.schedule.program import program_of
from planner_service.core.simulate import simulate
from planner_service.core.timeline import Timeline


def predict(plan: Plan, *, batches: int, first_batch: int = 0) -> Timeline:
    """The timeline that the plan's costs give for so many batches."""
    return simulate(program_of(plan, batches=batches, first_batch=first_batch), plan.costs)
