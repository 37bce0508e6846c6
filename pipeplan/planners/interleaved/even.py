"""Even: stages whose ranks take nearly equal times, for any number of chunks, by moving one cut at a time.

The search starts from stages of equal compute. It moves cuts by a block while that lowers the sum of high powers of the
ranks' seconds. If ranks then do not fit, it moves cuts by what the ranks hold. It proves nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np

from pipeplan.planners.interleaved.terms import ChunkedTerms

_POWER = 8
"""The power of the ranks' seconds: high enough for the slowest rank to decide, low enough for others to count."""

_STAGES = 0.01
"""The weight of the stages' own seconds: if ranks are equally even, even stages leave smaller bubbles."""

_SWEEPS = 40
_SWEEPS_BY_MEMORY = 6
"""Upper bound on the sweeps over all cuts; usually nothing moves long before."""

RankCost = Callable[[int, Sequence[int]], float]
"""A rank's cost with these stops."""


def nearly_even(terms: ChunkedTerms, *, by_memory: bool = True) -> tuple[int, ...] | None:
    """The stops of all stages; None where the allowed cuts leave no start, or where ranks do not fit.

    With `by_memory` cuts are moved until the ranks fit, if that succeeds; this takes longer.
    """
    stops = even_by_time(terms)
    return None if stops is None else squeezed(terms, stops, sweeps=_SWEEPS_BY_MEMORY if by_memory else 0)


def squeezed(terms: ChunkedTerms, stops: tuple[int, ...], *, sweeps: int = _SWEEPS_BY_MEMORY) -> tuple[int, ...] | None:
    """The same stops if all ranks fit, or others that fit after at most `sweeps` sweeps; None where none do."""
    ranks, fullness = range(terms.shape.ranks), _fullness(terms)
    if max(fullness(rank, stops) for rank in ranks) <= 1:
        return stops
    if not sweeps:
        return None
    stops = _descend(terms, stops, lambda rank, now: fullness(rank, now) ** _POWER, sweeps)
    return stops if max(fullness(rank, stops) for rank in ranks) <= 1 else None


def even_by_time(terms: ChunkedTerms) -> tuple[int, ...] | None:
    """Stops by seconds alone, whether ranks fit or not."""
    stops = _equal_compute(terms)
    if stops is None:
        return None
    shape, compute_s = terms.shape, terms.chain.compute_s
    first = shape.modes[0]
    sums = [tuple(each.tolist() for each in terms.edge_sums(stage, recompute=first)) for stage in range(shape.depth)]
    stages_of = [shape.stages_of(rank) for rank in range(shape.ranks)]
    mean_s, mean_stage_s = compute_s[-1] / shape.ranks, compute_s[-1] / shape.depth
    done_s = compute_s.tolist()

    def seconds(rank: int, stops: Sequence[int]) -> float:
        busy_s = even = 0.0
        for stage in stages_of[rank]:
            start, stop = stops[stage - 1] if stage else 0, stops[stage]
            begins_s, ends_s = sums[stage]
            busy_s += ends_s[stop] - begins_s[start]
            even += ((done_s[stop] - done_s[start]) / mean_stage_s) ** 2
        return float((busy_s / mean_s) ** _POWER + _STAGES * even)

    return _descend(terms, stops, seconds, _SWEEPS)


def _fullness(terms: ChunkedTerms) -> RankCost:
    """A rank's memory in its smaller mode, as a share of its device."""
    stages_of = [np.asarray(terms.shape.stages_of(rank)) for rank in range(terms.shape.ranks)]

    def fullness(rank: int, stops: Sequence[int]) -> float:
        ends = np.asarray((0, *stops))
        starts, stops_of = ends[stages_of[rank]][:, None], ends[stages_of[rank] + 1][:, None]
        modes = terms.shape.modes
        held = (terms.held_bytes(rank, starts, stops_of, recompute=mode)[0] for mode in modes)
        return float(min(held) / terms.device_bytes)

    return fullness


def _equal_compute(terms: ChunkedTerms) -> tuple[int, ...] | None:
    """The stops that may be next to equal shares of the compute, one after the other."""
    depth, blocks = terms.shape.depth, terms.blocks
    compute_s, may_be = terms.chain.compute_s, terms.may_be_stage
    stops: list[int] = []
    start = 0
    for stage in range(1, depth + 1):
        last = blocks - (depth - stage)
        allowed = [stop for stop in range(start + 1, last + 1) if may_be[start, stop]]
        if stage == depth:
            allowed = [blocks] if may_be[start, blocks] else []
        if not allowed:
            return None
        share_s = float(compute_s[-1]) * stage / depth
        start = min(allowed, key=lambda stop: abs(float(compute_s[stop]) - share_s))
        stops.append(start)
    return tuple(stops)


def _descend(terms: ChunkedTerms, stops: Sequence[int], cost: RankCost, sweeps: int) -> tuple[int, ...]:
    """Moves cuts while the sum of the ranks' costs falls."""
    shape = terms.shape
    options, now = terms.problem.options, list(stops)
    may_be = terms.may_be_stage if options.forced_cuts or options.forbidden_cuts else None
    owner = {stage: rank for rank in range(shape.ranks) for stage in shape.stages_of(rank)}
    costs = [cost(rank, now) for rank in range(shape.ranks)]
    for _ in range(sweeps):
        moved = False
        for stage in range(shape.depth - 1):
            ranks = {owner[stage], owner[stage + 1]}
            before = sum(costs[rank] for rank in ranks)
            for by in (-1, 1):
                start, cut, stop = now[stage - 1] if stage else 0, now[stage] + by, now[stage + 1]
                if not start < cut < stop or (may_be is not None and not (may_be[start, cut] and may_be[cut, stop])):
                    continue
                now[stage] = cut
                after = {rank: cost(rank, now) for rank in ranks}
                if sum(after.values()) < before * (1 - 1e-12):
                    moved = True
                    for rank, value in after.items():
                        costs[rank] = value
                    break
                now[stage] = cut - by
        if not moved:
            break
    return tuple(now)
