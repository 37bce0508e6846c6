"""Fit: observations of sums -> the factors and terms that explain them.

The factors of blocks and the terms of links are linear least squares in relative errors, with a Gaussian prior around
the known values. A more certain observation has more weight. Terms that no observation separates keep their
proportions. A factor on which the seconds do not depend linearly is found by bisection.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from pipeplan.arrays import FloatArray

COMMON_DEVIATION = 3.0
"""The expected distance from 1 of the factor that all blocks share: almost unlimited."""

BLOCK_DEVIATION = 0.05
"""The expected distance of a block's own factor from the shared one."""

LEAST_DEVIATION, MOST_DEVIATION = 1e-5, 0.05
"""The limits of an observation's deviation: medians drop disturbances, so none is less certain than the second."""

LEAST_SLOWNESS = 0.1
"""A few delays cannot show that a bandwidth is ten times the known one: both terms are then scaled equally."""

LEAST_FACTOR = 1e-3
"""The smallest factor: every block takes some time."""

BANDWIDTH_DEVIATION, LATENCY_DEVIATION = 3.0, 0.1
"""The expected distances of the seconds a byte, and of the latency, from the cluster's, as shares."""

_FACTORS = (2.0**-10, 2.0**30)
_BISECTIONS = 50
"""The range in which a factor is searched, and the number of steps. For a few bytes it can be large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """A stage's blocks with the profile's seconds for each, and the measured seconds for all.

    `hot`: the stage's backwards come right after their forwards.
    """

    blocks: tuple[int, ...]
    profile_s: tuple[float, ...]
    measured_s: float
    relative_spread: float
    hot: bool = False

    @property
    def total_s(self) -> float:
        """The profile's seconds for all blocks."""
        return sum(self.profile_s)

    @property
    def factor(self) -> float:
        """Measured seconds over the profile's."""
        return self.measured_s / self.total_s

    def with_factors(self, factors: Sequence[float]) -> float:
        """The profile's seconds for all blocks, each times its factor; `factors` are the whole model's."""
        return sum(factors[i] * seconds for i, seconds in zip(self.blocks, self.profile_s, strict=True))


def block_factors(stages: Sequence[StageSeconds], blocks: int) -> FloatArray:
    """Every block's factor, from stages whose profiles take some time.

    factor of block i = common + own_i, with own_i near 0. A stage's factor is the mean of its blocks' factors, weighted
    by the profile's seconds: within a stage the measured time is divided in proportion, and runs that cut the model at
    different places distinguish blocks. Solved in the space of the observations: linear in the number of blocks.
    """
    weights = [np.asarray(stage.profile_s) / sum(stage.profile_s) for stage in stages]
    shared = np.empty((len(stages), len(stages)))
    for row, stage in enumerate(stages):
        dense = np.zeros(blocks)
        dense[list(stage.blocks)] = weights[row]
        shared[row] = [dense[list(other.blocks)] @ weights[column] for column, other in enumerate(stages)]
    measured = np.asarray([stage.factor for stage in stages])
    spreads = np.asarray([stage.relative_spread for stage in stages])
    noise = np.clip(spreads, LEAST_DEVIATION, MOST_DEVIATION) * measured
    covariance = COMMON_DEVIATION**2 + BLOCK_DEVIATION**2 * shared + np.diag(noise**2)
    pulls = np.linalg.solve(covariance, measured - 1.0)
    factors = np.full(blocks, 1.0 + COMMON_DEVIATION**2 * pulls.sum())
    for stage, weight, pull in zip(stages, weights, pulls, strict=True):
        factors[list(stage.blocks)] += BLOCK_DEVIATION**2 * pull * weight
    return np.asarray(np.maximum(factors, LEAST_FACTOR), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """A transfer: its bytes, and its seconds in transit."""

    size_bytes: float
    seconds: float
    relative_spread: float


def link_terms(delays: Sequence[Delay], bandwidth_bytes_per_s: float, latency_s: float) -> tuple[float, float]:
    """The bandwidth and latency of a link that explain its transfers, near the known ones.

    Messages of one size cannot distinguish the two: they correct the bandwidth first.
    """
    typical_s = float(np.median([delay.seconds for delay in delays]))
    s_per_byte = 1.0 / bandwidth_bytes_per_s
    latency_deviation_s = LATENCY_DEVIATION * max(latency_s, typical_s)
    rows = [[0.0, 1 / latency_deviation_s], [1 / BANDWIDTH_DEVIATION, 0.0]]
    wanted = [latency_s / latency_deviation_s, 1 / BANDWIDTH_DEVIATION]
    for delay in delays:
        certainty = 1 / max(delay.relative_spread, LEAST_DEVIATION)
        rows.append([certainty * delay.size_bytes * s_per_byte / delay.seconds, certainty / delay.seconds])
        wanted.append(certainty)
    slowness, found_latency_s = np.linalg.lstsq(np.asarray(rows), np.asarray(wanted), rcond=None)[0]
    if slowness < LEAST_SLOWNESS or found_latency_s < 0:
        known_s = [delay.size_bytes * s_per_byte + latency_s for delay in delays]
        ratio = float(np.median([delay.seconds / known for delay, known in zip(delays, known_s, strict=True)]))
        return bandwidth_bytes_per_s / ratio, latency_s * ratio
    return bandwidth_bytes_per_s / float(slowness), float(found_latency_s)


def factor_for(seconds: Callable[[float], float], wanted_s: float) -> float | None:
    """The factor for which a function gives these seconds. The function must grow with the factor.

    None if no factor between 2^-10 and 2^30 gives them.
    """
    low, high = _FACTORS
    if not seconds(low) < wanted_s < seconds(high):
        return None
    for _ in range(_BISECTIONS):
        middle = sqrt(low * high)
        low, high = (middle, high) if seconds(middle) < wanted_s else (low, middle)
    return high
