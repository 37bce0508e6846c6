"""Play: a plan's streams, played with its costs as far as that takes no longer than planning."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm

from planner_service.core.cost.transfer import ranks_by_stage
from planner_service.core.plan import Plan, Simulated
from planner_service.core.predict import predict
from planner_service.core.schedule.instructions import Instruction, ReduceGradients, Update
from planner_service.core.schedule.pipeline import Pipeline
from planner_service.core.schedule.program import Program, Stream, build
from planner_service.core.simulate import simulate
from planner_service.core.stage_costs import StageCosts
from planner_service.core.throughput import throughput_samples_per_s
from planner_service.core.timeline import Timeline

SIMULATED_INSTRUCTIONS = 20_000
"""A plan whose batches have more instructions than this is not played: a fraction of a second, no more."""

_BATCHES = 4
"""What is played of a schedule with a flush: its batches are alike, the first fills and is not counted."""

_TIMES_FILLED = 16
"""How often the pipeline is filled by a schedule without a flush, whose start and end differ from the rest."""


def play(plan: Plan) -> Simulated | None:
    """What the plan's streams give over enough batches for a steady state; None where they are too long."""
    batches = _batches_to_play(plan)
    if batches == 0:
        return None
    timeline = one_pipeline(plan, batches=batches)
    lanes = [worker.stage if plan.width else rank for rank, worker in enumerate(plan.placement)]
    busy_fraction = timeline.busy_fraction
    peak_bytes = [lane.peak_memory_bytes for lane in timeline.lanes]
    return Simulated(
        batches=batches,
        throughput_samples_per_s=throughput_samples_per_s(timeline) * (plan.width or 1),
        bubble_fraction=timeline.bubble_fraction,
        busy_fraction=tuple(busy_fraction[lane] for lane in lanes),
        peak_memory_bytes=tuple(peak_bytes[lane] for lane in lanes),
    )


def one_pipeline(plan: Plan, *, batches: int) -> Timeline:
    """Replicas of equal width do the same at the same time: one pipeline for all, a lane a stage, on the devices of
    the first.

    Its transfers take as long as those of all replicas that pass the same port at once. Where the stages' replicas
    differ, all workers are played.
    """
    if plan.width is None:
        return predict(plan, batches=batches)
    pipeline = Pipeline(
        replicas=(1,) * plan.depth,
        microbatches=plan.microbatches,
        batches=batches,
        recompute=tuple(stage.recompute for stage in plan.stages),
    )
    ranks = ranks_by_stage(plan.placement)
    program = build(plan.schedule, pipeline)
    if plan.width > 1:
        program = _exchanging(program)
    costs = [_of_all_replicas(plan.costs, ranks, stage) for stage in range(plan.depth)]
    return simulate(program, costs, devices=[workers[0] for workers in ranks])


def _exchanging(program: Program) -> Program:
    """With the gradient exchanges of a stage that stands for all its replicas."""
    return replace(program, streams=tuple(replace(s, instructions=tuple(_exchange(s))) for s in program.streams))


def _exchange(stream: Stream) -> Iterator[Instruction]:
    for instruction in stream.instructions:
        if isinstance(instruction, Update):
            yield ReduceGradients(instruction.version)
        yield instruction


def _of_all_replicas(costs: Sequence[StageCosts], ranks: Sequence[Sequence[int]], stage: int) -> StageCosts:
    """The costs of a stage whose transfers stand for those of all its replicas."""
    own = costs[stage]
    forwards = _passing(ranks[stage], ranks[stage + 1], own.activation_port_devices) if stage + 1 < len(ranks) else 1
    backwards = _passing(ranks[stage], ranks[stage - 1], own.gradient_port_devices) if stage > 0 else 1
    return replace(
        own,
        activation_transfer_s=forwards * own.activation_transfer_s,
        gradient_transfer_s=backwards * own.gradient_transfer_s,
    )


def _passing(senders: Sequence[int], receivers: Sequence[int], port_devices: int) -> int:
    """How many of the replicas' transfers pass the busiest port, out of a unit of devices or into one."""
    if port_devices == 0:
        return 1
    crossing = [(a // port_devices, b // port_devices) for a, b in zip(senders, receivers, strict=True)]
    crossing = [(a, b) for a, b in crossing if a != b]
    busiest = [max(Counter(units).values()) for units in zip(*crossing, strict=True)]
    return max(busiest, default=1)


def _batches_to_play(plan: Plan) -> int:
    """The batches wanted, fewer (but the least) if those are too long, 0 if even the least are."""
    replicas = (1,) * plan.depth if plan.width else plan.replicas
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
