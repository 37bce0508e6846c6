"""Misses: configurations that do not fit, with their excess over a device, and those that the batch rules out."""

from collections import Counter
from collections.abc import Iterator
from math import inf

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.documents.plan import Infeasible, Reason
from pipeplan.planners.reasons import memory_reason, readable
from pipeplan.planners.two_bw.bounds import Configurations, joined
from pipeplan.planners.two_bw.candidate import Miss
from pipeplan.planners.two_bw.search import BestFirstSearch
from pipeplan.planners.two_bw.terms import PipelineShape, is_flushed

REASONS = 10
"""Upper bound on the classes (a schedule at a depth) that are named when nothing fits."""


def infeasible(planner: str, search: BestFirstSearch) -> Infeasible:
    """The nearest miss of every class, the nearest of all first; then the others together, and the batch's limits.

    The reasons' counts add up to the configurations considered.
    """
    misses = nearest_misses(search, REASONS)
    members: Counter[tuple[str, int]] = Counter()
    for found in search.examined:
        depths, counts = np.unique(found.depth, return_counts=True)
        for depth, count in zip(depths.tolist(), counts.tolist(), strict=True):
            members[found.execution.schedule, depth] += count * found.execution.ways

    device_bytes = search.evaluator.device_bytes
    reasons = []
    for miss in misses:
        shape = miss.shape
        recompute = {None: ", recomputing where that is less", True: ", recomputing", False: ""}[shape.recompute]
        size = f"microbatches of {shape.microbatch_size}{recompute}"
        reason = memory_reason(
            f"{shape.schedule}, width {shape.width}, depth {shape.depth}, {size}",
            stage=miss.stage,
            missing_bytes=miss.missing_bytes,
            device_bytes=device_bytes,
            configurations=members.pop(_class(shape)),
        )
        reasons.append(reason)
    if members:
        least = misses[-1].missing_bytes if misses else 0
        others = Reason(
            rule=f"a stage must fit the device's usable memory ({readable(device_bytes)})",
            detail=f"{len(members)} other pairs of schedule and depth: none misses less than {readable(least)}",
            configurations=sum(members.values()),
        )
        reasons.append(others)
    return Infeasible(
        planner=planner,
        reasons=(*reasons, *_batch(search)),
        configurations_considered=search.space.considered,
    )


def shallowest_misses(search: BestFirstSearch, count: int) -> list[Miss]:
    """Beside a plan: the classes of fewest stages that do not fit by a bound, each at its smallest shape.

    Fewer stages transfer less, so these show what more memory would allow.
    """
    smallest: dict[tuple[int, str], tuple[float, Configurations, int]] = {}
    for found, least_bytes in _distinct_bytes(search):
        order = np.argsort(least_bytes, kind="stable")
        depths, first = np.unique(found.depth[order], return_index=True)
        for depth, index in zip(depths.tolist(), order[first].tolist(), strict=True):
            smallest[depth, found.execution.schedule] = (float(least_bytes[index]), found, index)
    too_large = [entry for _, entry in sorted(smallest.items()) if entry[0] > search.evaluator.device_bytes]
    misses = [search.evaluator.nearest(search.shape(found, index)) for _, found, index in too_large[:count]]
    return [miss for miss in misses if miss is not None]


def nearest_misses(search: BestFirstSearch, count: int) -> list[Miss]:
    """Where nothing fits: the nearest misses by a bound, one a class; the first is the nearest of all shapes."""
    nearest: dict[tuple[str, int], Miss] = {}
    least_bytes = inf
    several = list(_distinct_bytes(search))
    entries = [
        (bound, which, index) for which, (_, least) in enumerate(several) for index, bound in enumerate(least.tolist())
    ]
    for bound, which, index in sorted(entries):
        shape = search.shape(several[which][0], index)
        if len(nearest) >= count and bound > least_bytes:
            break
        new = len(nearest) < count and _class(shape) not in nearest
        miss = search.evaluator.nearest(shape, inf if new else least_bytes)
        if miss is not None and (new or miss.memory_bytes < least_bytes):
            nearest[_class(shape)] = miss
            least_bytes = min(least_bytes, miss.memory_bytes)
    return sorted(nearest.values(), key=lambda miss: (miss.missing_bytes, miss.shape.depth, miss.shape.schedule))


def _distinct_bytes(search: BestFirstSearch) -> Iterator[tuple[Configurations, FloatArray]]:
    """Every execution's configurations that differ in memory, and their bounds.

    One of several with the same memory is listed: that of the smallest width where the batch does not matter. Whether
    the batch fills the pipeline always matters.
    """
    for place, rows in enumerate(search.space.rows):
        own = [found for found in search.examined if found.execution is rows.execution]
        if not own:
            continue
        found = joined(own)
        flushed = is_flushed(rows.execution.laws)
        batch = found.microbatches if flushed else found.filled.astype(np.int64)
        order = np.lexsort((found.width, batch, found.size, found.depth))
        keys = np.stack([found.depth, found.size, batch])[:, order]
        new = np.append(True, (np.diff(keys, axis=1) != 0).any(axis=0))
        found = found.some(order[new])
        yield found, search.bounds[place].least_bytes(found)


def _batch(search: BestFirstSearch) -> Iterator[Reason]:
    """The batch's limits: widths and sizes that do not divide it, and batches shorter than 2BW's depth."""
    space = search.space
    batch_size = space.problem.batch_size
    undivided = space.considered - space.runnable - space.too_shallow
    if undivided:
        rule = (
            "a batch must hold a microbatch of every pipeline"
            if space.problem.options.safe_batch
            else ("a batch must be whole microbatches on every pipeline")
        )
        yield Reason(rule=rule, detail=f"batch: {batch_size} is not divisible by w*b", configurations=undivided)
    if space.too_shallow:
        yield Reason(
            rule="a batch must hold as many microbatches as 2BW has stages, or more",
            detail=f"m = {batch_size} / (w*b) < depth",
            configurations=space.too_shallow,
        )


def _class(shape: PipelineShape) -> tuple[str, int]:
    return shape.schedule, shape.depth
