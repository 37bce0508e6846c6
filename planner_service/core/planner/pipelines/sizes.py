"""Sizes: which microbatch sizes a planner looks at, those measured and those between them."""

import numpy as np

from planner_service.core.cost.compute import IntArray
from planner_service.core.errors import LEAST_AMOUNT, InvalidInputError, require
from planner_service.core.planner.pipelines.chain import Measured, measured
from planner_service.core.planner.problem import Problem

MAX_INTERPOLATED = 32
"""How many sizes between the measured ones are looked at: beyond that, as even in their ratios as there are."""

MAX_ROWS = 2**21
"""Pairs of widths and sizes that are looked at; fewer sizes where a safe batch leaves every width."""

_MAX_BETWEEN = 2**20
"""No further above the smallest measured size are others looked for."""


def profiled(problem: Problem) -> Measured:
    """The profile at the sizes to be looked at.

    Those are what was asked for, or all measured sizes and the ones between them that may divide a batch: it, or with
    `safe_batch` a smaller one. Raises InvalidInputError if none divides it, the size asked for lies beyond those
    measured, or the blocks take no time.
    """
    profile = problem.profile
    asked = problem.options.microbatch_size
    if asked is None:
        sizes = _possible(problem)
    else:
        profile.at(asked)
        sizes = (asked,)
    dividing = [size for size in sizes if problem.options.safe_batch or problem.batch_size % size == 0]
    if not dividing or min(dividing) > problem.batch_size:
        between = f", or of one between them (at most {MAX_INTERPOLATED} are tried)" if asked is None else ""
        rule = f"must be a multiple of a measured microbatch size {list(profile.microbatch_sizes)}{between}"
        raise InvalidInputError("batch_size", rule, problem.batch_size)
    found = measured(profile).at(sizes)
    total_s = float((found.forward_s + found.backward_s).sum(axis=1).min())
    require(total_s >= LEAST_AMOUNT, "profile.blocks", "must take some time together, forward and backward", total_s)
    return found


def _possible(problem: Problem) -> tuple[int, ...]:
    sizes = problem.profile.microbatch_sizes
    between = np.arange(sizes[0], min(sizes[-1], sizes[0] + _MAX_BETWEEN, problem.batch_size) + 1)
    if not problem.options.safe_batch:
        between = between[problem.batch_size % between == 0]
    between = between[~np.isin(between, sizes)]
    return tuple(sorted({*sizes, *_thinned(between, _most(problem)).tolist()}))


def _most(problem: Problem) -> int:
    if not problem.options.safe_batch:
        return MAX_INTERPOLATED
    rows = MAX_ROWS // problem.cluster.devices - len(problem.profile.microbatch_sizes)
    return max(0, min(MAX_INTERPOLATED, rows))


def _thinned(sizes: IntArray, most: int) -> IntArray:
    """At most so many of the sizes: those nearest to equal ratios."""
    if len(sizes) <= most:
        return sizes
    if most == 0:
        return sizes[:0]
    wanted = np.geomspace(sizes[0], sizes[-1], most)
    return np.asarray(np.unique(sizes[np.searchsorted(sizes, wanted).clip(max=len(sizes) - 1)]))
