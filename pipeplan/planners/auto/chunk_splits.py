"""Chunk splits: the splits of ranks with several stages whose bounds let a play be fast enough.

A rank's compute is the sum over its stages, which are not contiguous. So all splits are made at once, stage by stage. A
split goes on only as long as every rank is within the limit and all ranks together have time for the remaining blocks.
When a split reaches the last block, its ranks are bounded in the mode that their memory allows.
"""

from math import inf

import numpy as np

from pipeplan.arrays import IntArray
from pipeplan.planners.auto.model import SearchedModel
from pipeplan.planners.interleaved.terms import ChunkedTerms

MOST_LISTED = 3000
"""If more splits than this may be fast enough, none is listed: some ten milliseconds."""

_ROUNDING = 1e-9


def splits_within(model: SearchedModel, terms: ChunkedTerms, limit_s: float) -> IntArray | None:
    """[split, stage]: the stops of all splits in which each rank fits and computes a microbatch within `limit_s`.

    None if there are more than `MOST_LISTED`. They are sorted by their stops.
    """
    shape, blocks = terms.shape, terms.blocks
    work_s = model.sums(shape.schedule, shape.microbatch_size, shape.recompute).compute_s
    limit_s *= 1 + _ROUNDING
    owners = {stage: rank for rank in range(shape.ranks) for stage in shape.stages_of(rank)}
    stops, taken_s = np.zeros((1, 1), dtype=np.int64), np.zeros((1, shape.ranks))
    for stage in range(shape.depth):
        later = shape.depth - 1 - stage  # each has a block at least
        free = terms.may_be_stage[stops[:, -1]]
        free[:, : 0 if later else blocks] = False
        free[:, blocks + 1 - later :] = False
        before, stop = np.nonzero(free)
        taken_s = taken_s[before]
        taken_s[:, owners[stage]] += work_s[stop] - work_s[stops[before, -1]]
        open_ranks = sorted({owners[after] for after in range(stage + 1, shape.depth)})
        left_s = (limit_s - taken_s[:, open_ranks]).sum(axis=1) * (1 + _ROUNDING)
        may = (taken_s[:, owners[stage]] <= limit_s) & (work_s[-1] - work_s[stop] <= left_s)
        stops, taken_s = np.column_stack((stops[before[may]], stop[may])), taken_s[may]
        if len(stops) > MOST_LISTED:
            return None
    fine = np.ones(len(stops), dtype=bool)
    for rank in range(shape.ranks):  # in the shortest mode in which it fits
        own = np.asarray(shape.stages_of(rank))
        first, last = stops.T[own], stops.T[own + 1]
        least_s = np.full(len(stops), inf)
        for mode in shape.modes:
            fits = terms.held_bytes(rank, first, last, recompute=mode) <= terms.device_bytes
            own_s = model.sums(shape.schedule, shape.microbatch_size, mode).compute_s
            least_s = np.where(fits, np.minimum(least_s, (own_s[last] - own_s[first]).sum(axis=0)), least_s)
        fine &= least_s <= limit_s
    return stops[fine, 1:]
