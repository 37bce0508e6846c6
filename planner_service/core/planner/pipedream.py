"""PipeDream's partitioning (2018, section 3.2): stages of unequal replicas on all machines, the slowest stage fastest.

On several levels of network it is that of SOSP 2019: inside a server first, whose result is the unit of the level
around it (`partition`). Beyond the papers, a stage must fit its device: it holds ceil(machines from its first on / its
replicas) minibatches and as many weight versions (2018, section 3.3), and what does not fit is left out of the search.
Latencies are not in the closed form; the simulation has them. `--semantics release` gives what the authors' published
program computes (`pipedream_release`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

import numpy as np

from planner_service.core.cost.compute import IntArray
from planner_service.core.errors import InvalidInputError, require
from planner_service.core.plan import Alternative, Answer, Infeasible, Stage, Worker
from planner_service.core.planner.asked import measured_at, refuse_unused, require_schedule
from planner_service.core.planner.complete import Decision, complete
from planner_service.core.planner.partition import Partition, Search, data_parallel, nearest, partition
from planner_service.core.planner.partition_memory import in_flight
from planner_service.core.planner.pipedream_terms import search, stage, synchronisation
from planner_service.core.planner.problem import Problem
from planner_service.core.planner.reasons import memory_reason, shortfall, slower
from planner_service.core.planner.states import States, chain_states

NAME = "pipedream"

USED = (
    "microbatch_size",
    "schedule",
    "synchronisation",
    "straight",
    "fewer_machines",
    "semantics",
    "compression_ratio",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """What is cut: the states of a problem's model, and the blocks before each of them."""

    problem: Problem
    microbatch_size: int
    states: States
    blocks_before: IntArray

    def stages(self, found: Partition) -> tuple[Stage, ...]:
        """As a plan has them."""
        held = in_flight(found.replicas)
        return tuple(
            stage(self.problem, self.states, share, count, self._blocks(share.start, share.stop))
            for share, count in zip(found.shares, held, strict=True)
        )

    def _blocks(self, start: int, stop: int) -> tuple[int, int]:
        return int(self.blocks_before[start]), int(self.blocks_before[stop])


def pipedream(problem: Problem) -> Answer:
    """The best partition onto all devices, or how many bytes the nearest miss lacks.

    A batch of the plan is what passes between two points at which every stage has updated: the smallest number of
    minibatches that all stages' replicas share evenly. `configurations_considered` counts the stages that the
    partition is chosen from: pairs of cuts times numbers of replicas.
    """
    _check(problem)
    model = _model(problem)
    wanted = search(problem, model.states)
    found = partition(wanted)
    if found is None:
        return _nearest_miss(model, wanted)
    return complete(problem, _decision(model, wanted, found))


def _check(problem: Problem) -> None:
    options = problem.options
    refuse_unused(NAME, options, USED)
    require_schedule(options, (NAME,), NAME)
    types = [group.device.name for group in problem.cluster.groups]
    require(len(set(types)) <= 1, "cluster.groups", f"must be of one type for the planner {NAME}", types)
    released = options.semantics == "release"
    rule = "is an option of --semantics release only"
    require(options.compression_ratio is None or released, "compression_ratio", rule, options.compression_ratio)


def minibatch_size(problem: Problem) -> int:
    """The size of a minibatch: as asked for, the only one measured, or the one of the batch. Raises InvalidInputError.

    PipeDream never divides a minibatch: one minibatch is one measurement.
    """
    sizes = problem.profile.microbatch_sizes
    size = problem.options.microbatch_size
    if size is None:
        size = sizes[0] if len(sizes) == 1 else problem.batch_size
        if size not in sizes:
            rule = f"must be given (--microbatch-size), one of {list(sizes)}: pipedream plans one minibatch"
            raise InvalidInputError("microbatch_size", rule, None)
    measured_at(problem, size)
    rule = f"must be a multiple of the minibatch ({size})"
    require(problem.batch_size % size == 0, "batch_size", rule, problem.batch_size)
    return size


def _model(problem: Problem) -> Model:
    size = minibatch_size(problem)
    states = chain_states(problem.profile, size)
    model = Model(problem=problem, microbatch_size=size, states=states, blocks_before=np.arange(len(states)))
    if problem.options.straight and not problem.options.fewer_machines:
        cuts, devices = len(states) - 1, problem.cluster.devices
        rule = f"needs a stage for each of the {devices} devices, and the model can be cut into {cuts} at most"
        require(devices <= cuts, "straight", rule, True)
    return model


def _decision(model: Model, wanted: Search, found: Partition) -> Decision:
    stages = model.stages(found)
    replicas = found.replicas
    size = model.microbatch_size
    return Decision(
        planner=NAME,
        cost_model=f"pipedream-2018-3.2/{synchronisation(model.problem)}",
        stages=stages,
        placement=tuple(Worker(stage=index, replica=replica) for index, replica in found.placement),
        schedule=NAME,
        microbatch_size=size,
        microbatches=1,
        batch_size=size * lcm(*replicas),
        time_per_microbatch_s=found.cost_s,
        throughput_samples_per_s=size / found.cost_s,
        bubble_fraction=0.0,
        optimal_in_flight=-(-sum(replicas) // replicas[0]),
        configurations_considered=_considered(wanted),
        alternatives=tuple(_alternatives(model, wanted, found)),
    )


def _considered(wanted: Search) -> int:
    before = wanted.space.before
    states = len(wanted.space)
    pairs = states * (states - 1) // 2 if before is None else int(before.sum())
    return pairs * (1 if wanted.straight else wanted.devices)


def _alternatives(model: Model, wanted: Search, found: Partition) -> Iterator[Alternative]:
    """The two that everybody knows, where they are not the answer: data parallelism and a straight pipeline."""
    if len(found.shares) > 1:
        yield _alternative(model, wanted, data_parallel(wanted))
    if len(found.shares) < wanted.devices < len(model.states):
        straight = search(model.problem, model.states, straight=True)
        yield _alternative(model, wanted, partition(straight) or nearest(straight)[0])


def _alternative(model: Model, wanted: Search, loser: Partition) -> Alternative:
    index, memory_bytes = _largest(model, loser)
    missing_bytes = memory_bytes - model.problem.cluster.device.usable_bytes
    throughput_samples_per_s = model.microbatch_size / loser.cost_s
    return Alternative(
        schedule=NAME,
        depth=len(loser.shares),
        width=loser.shares[0].replicas,
        microbatch_size=model.microbatch_size,
        microbatches=1,
        recompute=False,
        throughput_samples_per_s=throughput_samples_per_s if missing_bytes <= 0 else None,
        memory_bytes=memory_bytes,
        reason=slower(throughput_samples_per_s) if missing_bytes <= 0 else shortfall(index, missing_bytes),
    )


def _largest(model: Model, found: Partition) -> tuple[int, int]:
    """The stage (the first of them) that holds the most, and its bytes."""
    held_bytes = [stage.memory_bytes for stage in model.stages(found)]
    return held_bytes.index(max(held_bytes)), max(held_bytes)


def _nearest_miss(model: Model, wanted: Search) -> Infeasible:
    """The partition whose worst stage exceeds its device the least."""
    closest = nearest(wanted)[0]
    index, memory_bytes = _largest(model, closest)
    replicas = "-".join(str(count) for count in closest.replicas)
    device_bytes = model.problem.cluster.device.usable_bytes
    reason = memory_reason(
        f"nearest is {replicas} (replicas by stage)",
        stage=index,
        missing_bytes=memory_bytes - device_bytes,
        device_bytes=device_bytes,
        configurations=_considered(wanted),
    )
    return Infeasible(planner=NAME, reasons=(reason,), configurations_considered=_considered(wanted))
