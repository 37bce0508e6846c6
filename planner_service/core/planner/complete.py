"""Complete: what a planner decided -> the whole plan, with its costs and what its streams give when played."""

from dataclasses import dataclass, replace

from planner_service.core.cost.estimate import estimate
from planner_service.core.cost.memory import keeps_master_weights
from planner_service.core.identity import known_id
from planner_service.core.plan import Alternative, Certificate, Plan, Stage, Worker
from planner_service.core.planner.play import play
from planner_service.core.planner.problem import Problem
from planner_service.core.stage_costs import StageCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a planner has to say for itself; everything else of a plan follows from it and the problem.

    `devices` are those of the ranks, where devices in between stay idle. `order` are a graph's blocks as the stages
    hold them.
    """

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
    certificate: Certificate | None = None
    devices: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None


def complete(problem: Problem, decision: Decision) -> Plan:
    """The plan. `simulated` is left out where playing it would take longer than planning it."""
    options = problem.options
    master_weights = keeps_master_weights(problem.profile.dtype, options.master_weights)
    plan = Plan(
        planner=decision.planner,
        cost_model=decision.cost_model,
        model=problem.profile.model,
        dtype=problem.profile.dtype,
        profile_id=known_id(problem.profile),
        cluster_id=known_id(problem.cluster),
        batch_size=decision.batch_size,
        stages=decision.stages,
        costs=_costs(problem, decision, master_weights=master_weights),
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
        order=None if problem.profile.edges is None else decision.order,
        certificate=decision.certificate,
        master_weights=master_weights,
        estimated=problem.profile.estimated,
        interpolated=decision.microbatch_size not in problem.profile.microbatch_sizes,
        warnings=problem.warnings,
    )
    return replace(plan, simulated=play(plan))


def _costs(problem: Problem, decision: Decision, *, master_weights: bool) -> tuple[StageCosts, ...]:
    """Every stage's, from the profile of the type of its devices."""
    options = problem.options
    on_type = {
        name: estimate(
            problem.profile_on(name),
            problem.cluster,
            decision.stages,
            decision.placement,
            microbatch_size=decision.microbatch_size,
            optimizer=options.optimizer,
            schedule=decision.schedule,
            recompute_factor=options.recompute_factor,
            master_weights=master_weights,
            devices=decision.devices,
            order=decision.order,
        )
        for name in {stage.device for stage in decision.stages}
    }
    return tuple(on_type[stage.device][index] for index, stage in enumerate(decision.stages))
