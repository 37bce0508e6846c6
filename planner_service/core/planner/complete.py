"""Complete: what a planner decided -> the whole plan, with its costs and what its streams give when played."""

from dataclasses import dataclass, replace
from math import lcm

from planner_service.core.cost.estimate import estimate
from planner_service.core.identity import content_id
from planner_service.core.plan import Alternative, Plan, Simulated, Stage, Worker
from planner_service.core.planner.problem import Problem
from planner_service.core.schedule.pipeline import Pipeline
from planner_service.core.schedule.program import build
from planner_service.core.simulate import simulate
from planner_service.core.stage_costs import StageCosts
from planner_service.core.throughput import throughput_samples_per_s

SIMULATED_INSTRUCTIONS = 20_000
"""A plan whose batches have more instructions than this is not played: a fraction of a second, no more."""

_BATCHES = 4
"""What is played of a schedule with a flush: its batches are alike, the first fills and is not counted."""

_TIMES_FILLED = 16
"""How often the pipeline is filled by a schedule without a flush, whose start and end differ from the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a planner has to say for itself; everything else of a plan follows from it and the problem."""

    planner: str
    cost_model: str
    stages: tuple[Stage, ...]
    placement: tuple[Worker, ...]
    schedule: str
    microbatch_size: int
    microbatches: int
    batch_size: int
    time_per_microbatch_s: float
    throughput_samples_per_s: float
    bubble_fraction: float
    optimal_in_flight: int
    configurations_considered: int
    alternatives: tuple[Alternative, ...] = ()


def complete(problem: Problem, decision: Decision) -> Plan:
    """The plan. `simulated` is left out where playing it would take longer than planning it."""
    options = problem.options
    costs = estimate(
        problem.profile,
        problem.cluster,
        decision.stages,
        decision.placement,
        microbatch_size=decision.microbatch_size,
        optimizer=options.optimizer,
        recompute_factor=options.recompute_factor,
    )
    plan = Plan(
        planner=decision.planner,
        cost_model=decision.cost_model,
        model=problem.profile.model,
        dtype=problem.profile.dtype,
        profile_id=content_id(problem.profile),
        cluster_id=content_id(problem.cluster),
        batch_size=decision.batch_size,
        stages=decision.stages,
        costs=costs,
        placement=decision.placement,
        schedule=decision.schedule,
        microbatch_size=decision.microbatch_size,
        microbatches=decision.microbatches,
        optimizer=options.optimizer,
        memory_accounting=options.memory,
        time_per_microbatch_s=decision.time_per_microbatch_s,
        throughput_samples_per_s=decision.throughput_samples_per_s,
        bubble_fraction=decision.bubble_fraction,
        optimal_in_flight=decision.optimal_in_flight,
        configurations_considered=decision.configurations_considered,
        alternatives=decision.alternatives,
    )
    return replace(plan, simulated=play(plan))


def play(plan: Plan) -> Simulated | None:
    """What the plan's streams give over enough batches for a steady state; None where they are too long.

    Replicas of equal width do the same at the same time: one pipeline is played, which pays for the exchange of
    gradients when it updates.
    """
    width = plan.width or 1
    replicas = (1,) * plan.depth if plan.width else plan.replicas
    batches = _batches_to_play(plan, replicas)
    if batches == 0:
        return None
    recompute = tuple(stage.recompute for stage in plan.stages)
    pipeline = Pipeline(replicas=replicas, microbatches=plan.microbatches, batches=batches, recompute=recompute)
    costs = [_exchanging(stage) for stage in plan.costs] if plan.width else plan.costs
    timeline = simulate(build(plan.schedule, pipeline, () if plan.width else plan.placement), costs)
    lanes = [worker.stage if plan.width else rank for rank, worker in enumerate(plan.placement)]
    busy_fraction = timeline.busy_fraction
    return Simulated(
        batches=batches,
        throughput_samples_per_s=throughput_samples_per_s(timeline) * width,
        bubble_fraction=timeline.bubble_fraction,
        busy_fraction=tuple(busy_fraction[lane] for lane in lanes),
        peak_memory_bytes=tuple(timeline.lanes[lane].peak_memory_bytes for lane in lanes),
    )


def _exchanging(costs: StageCosts) -> StageCosts:
    """The costs of a stage that stands for all its replicas."""
    return replace(costs, update_s=costs.update_s + costs.reduce_s)


def _batches_to_play(plan: Plan, replicas: tuple[int, ...]) -> int:
    """The batches wanted, fewer (but the least) if those are too long, 0 if even the least are."""
    minibatches = plan.microbatches * lcm(*replicas)
    instructions = sum(_instructions_a_batch(plan, minibatches, stage) for stage in range(plan.depth))
    affordable = SIMULATED_INSTRUCTIONS // instructions
    wanted = _BATCHES
    if plan.schedule in ("pipedream", "pipedream-2bw"):
        wanted = max(_BATCHES, -(-_TIMES_FILLED * plan.optimal_in_flight * replicas[0] // minibatches))
    return min(wanted, affordable) if affordable >= _BATCHES else 0


def _instructions_a_batch(plan: Plan, minibatches: int, stage: int) -> int:
    """Forward, backward, two sends and two receives a minibatch, and exchange and update a worker and batch."""
    per_minibatch = 7 if plan.stages[stage].recompute else 6
    updates = minibatches if plan.schedule == "pipedream" else 1
    return per_minibatch * minibatches + 2 * updates
