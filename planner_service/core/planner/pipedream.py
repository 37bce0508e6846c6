"""PipeDream's partitioning (2018, section 3.2): stages of unequal replicas on all machines, the slowest stage fastest.

Where a cluster has several levels, stages lie in a row on its devices, so that a stage's devices are known, and with
them the slowest link that its replicas, or its boundaries, cross: those are the bandwidths of the terms. On one level
this is exactly the paper. Beyond the paper, a stage must fit its device: it holds ceil(machines from its first on /
its replicas) minibatches and as many weight versions (section 3.3), and what does not fit is left out of the search.
Latencies are not in the closed form; the simulation has them.
"""

from collections.abc import Iterator
from math import lcm

import numpy as np

from planner_service.core.errors import InvalidInputError, require
from planner_service.core.plan import Alternative, Answer, Infeasible, Stage
from planner_service.core.planner.asked import measured_at, refuse_unused, require_schedule
from planner_service.core.planner.complete import Decision, complete
from planner_service.core.planner.partition import Partition, Places, Share, partition
from planner_service.core.planner.pipedream_terms import Terms
from planner_service.core.planner.problem import Problem
from planner_service.core.planner.reasons import memory_reason, shortfall, slower
from planner_service.core.planner.tables import Tables
from planner_service.core.schedule.program import stages_in_a_row

NAME = "pipedream"

MAX_MACHINES = 8192
"""Half a minute of searching; the recurrence takes the square of it."""


def pipedream(problem: Problem) -> Answer:
    """The best partition onto all devices, or how many bytes the nearest miss lacks.

    A batch of the plan is what passes between two points at which every stage has updated: the smallest number of
    minibatches that all stages' replicas share evenly. `configurations_considered` counts the stages that the
    recurrence compares: intervals of blocks times places.
    """
    refuse_unused(NAME, problem.options, ("microbatch_size", "schedule", "synchronisation"))
    require_schedule(problem.options, (NAME,), NAME)
    machines = problem.cluster.devices
    require(
        machines <= MAX_MACHINES, "cluster.levels", f"must make at most {MAX_MACHINES} devices for {NAME}", machines
    )
    terms = _terms(problem)
    found = partition(terms.fastest())
    if found is None:
        return _nearest_miss(terms)
    return complete(problem, _decision(terms, found))


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


def _terms(problem: Problem) -> Terms:
    size = minibatch_size(problem)
    tables = Tables(profile=problem.profile, measured=problem.profile.at(size))
    return Terms(problem=problem, tables=tables)


def _decision(terms: Terms, found: Partition) -> Decision:
    stages = tuple(_stage(terms, share) for share in found.shares)
    replicas = [stage.replicas for stage in stages]
    size = terms.tables.microbatch_size
    return Decision(
        planner=NAME,
        cost_model=f"pipedream-2018-3.2/{terms.synchronisation}",
        stages=stages,
        placement=stages_in_a_row(replicas),
        schedule=NAME,
        microbatch_size=size,
        microbatches=1,
        batch_size=size * lcm(*replicas),
        time_per_microbatch_s=found.cost,
        throughput_samples_per_s=size / found.cost,
        bubble_fraction=0.0,
        optimal_in_flight=-(-terms.devices // replicas[0]),
        configurations_considered=_considered(terms),
        alternatives=tuple(_alternatives(terms, found)),
    )


def _considered(terms: Terms) -> int:
    blocks, devices = terms.tables.blocks, terms.devices
    return blocks * (blocks + 1) // 2 * devices * (devices + 1) // 2


def _stage(terms: Terms, share: Share) -> Stage:
    return Stage(
        start=share.start,
        stop=share.stop,
        replicas=share.replicas,
        time_s=float(terms.stage_s(_place(share))[0, 0, 0]),
        memory_bytes=_memory_bytes(terms, share),
    )


def _memory_bytes(terms: Terms, share: Share) -> int:
    return int(terms.memory_bytes(_place(share))[0, 0, 0])


def _place(share: Share) -> Places:
    return Places(
        first=share.first,
        replicas=np.asarray([share.replicas]),
        starts=slice(share.start, share.start + 1),
        lasts=slice(share.stop - 1, share.stop),
    )


def _alternatives(terms: Terms, found: Partition) -> Iterator[Alternative]:
    """The two that everybody knows, where they are not the answer: data parallelism and a straight pipeline."""
    if len(found.shares) > 1:
        yield _alternative(terms, _data_parallel(terms))
    if len(found.shares) < terms.devices <= terms.tables.blocks:
        one = np.ones(1, dtype=np.int64)
        straight = partition(terms.fastest(counts=one)) or partition(terms.smallest(counts=one))
        yield from [_alternative(terms, straight)] if straight else []


def _data_parallel(terms: Terms) -> Partition:
    everything = Share(start=0, stop=terms.tables.blocks, first=0, replicas=terms.devices)
    return Partition(shares=(everything,), cost=float(terms.stage_s(_place(everything))[0, 0, 0]))


def _alternative(terms: Terms, loser: Partition) -> Alternative:
    stage, memory_bytes = _largest(terms, loser)
    fits = memory_bytes <= terms.device_bytes
    throughput_samples_per_s = terms.tables.microbatch_size / loser.cost
    return Alternative(
        schedule=NAME,
        depth=len(loser.shares),
        width=loser.shares[0].replicas,
        microbatch_size=terms.tables.microbatch_size,
        microbatches=1,
        recompute=False,
        throughput_samples_per_s=throughput_samples_per_s if fits else None,
        memory_bytes=memory_bytes,
        reason=slower(throughput_samples_per_s) if fits else shortfall(stage, memory_bytes - terms.device_bytes),
    )


def _largest(terms: Terms, found: Partition) -> tuple[int, int]:
    """The stage (the first of them) that holds the most, and its bytes."""
    held_bytes = [_memory_bytes(terms, share) for share in found.shares]
    return held_bytes.index(max(held_bytes)), max(held_bytes)


def _nearest_miss(terms: Terms) -> Infeasible:
    """The partition whose worst stage exceeds its device the least."""
    nearest = partition(terms.smallest()) or _data_parallel(terms)
    stage, memory_bytes = _largest(terms, nearest)
    replicas = "-".join(str(share.replicas) for share in nearest.shares)
    reason = memory_reason(
        f"nearest is {replicas} (replicas by stage)",
        stage=stage,
        missing_bytes=memory_bytes - terms.device_bytes,
        device_bytes=terms.device_bytes,
        configurations=_considered(terms),
    )
    return Infeasible(planner=NAME, reasons=(reason,), configurations_considered=_considered(terms))
