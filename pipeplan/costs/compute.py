"""The compute term: seconds of a stage's blocks on one device, for all intervals of blocks at once.

Tables over intervals are (n, n) arrays for n blocks. Entry [i, j] is for the blocks i..j, both included: the
stage [i, j + 1). Entries below the diagonal are not stages; a table of costs holds infinity there.
"""

from collections.abc import Sequence

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.documents.measurement import Measurement


def interval_sums(values: Sequence[float]) -> FloatArray:
    """Sums over all intervals. Each is added up from its own start: equal intervals have equal sums."""
    return np.cumsum(np.triu(np.broadcast_to(np.asarray(values, dtype=np.float64), (len(values),) * 2)), axis=1)


def interval_maxima(values: Sequence[float]) -> FloatArray:
    """The largest value of every interval; 0 where there is none. Values must not be negative."""
    table = np.triu(np.broadcast_to(np.asarray(values, dtype=np.float64), (len(values),) * 2))
    return np.asarray(np.maximum.accumulate(table, axis=1), dtype=np.float64)


def no_stage(blocks: int) -> FloatArray:
    """Infinity below the diagonal, 0 elsewhere: a mask to add to a table of costs."""
    return np.where(np.tri(blocks, k=-1, dtype=bool), np.inf, 0.0)


def compute_s(block: Measurement, *, recompute: bool = False, recompute_factor: float | None = None) -> float:
    """Forward and backward of one block: PipeDream's T_l (2018, section 3.2).

    With recomputation the forward runs twice, or all is multiplied by `recompute_factor`: the c_extra of PipeDream-2BW
    (appendix A.1.1), whose measured value is (2 forward + backward) / (forward + backward).
    """
    if not recompute:
        return block.compute_s
    if recompute_factor is None:
        return block.compute_s + block.forward_s
    return block.compute_s * recompute_factor


def recompute_s(blocks: Sequence[Measurement], recompute_factor: float | None) -> float:
    """The seconds a microbatch that recomputation adds to a stage of these blocks; never negative."""
    if recompute_factor is None:
        return sum(block.forward_s for block in blocks)
    return max(recompute_factor - 1.0, 0.0) * sum(block.compute_s for block in blocks)
