"""Arrays: numpy's, as the tables of planners and costs are typed."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


def sums(values: Sequence[float] | FloatArray) -> FloatArray:
    """Sums of the values before each place, and of all."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
