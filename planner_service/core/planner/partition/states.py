"""States: where a model can be cut, and what lies before every cut.

A chain of n blocks has n + 1 states, one before every block and one behind the last. A model that is a graph has one
for every set of blocks that holds all that its members read (the antichains of PipeDream's optimizer): the blocks that
are already done where a stage ends. A stage is what lies between two states, so that its sums are differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner_service.core.cost.compute import BoolArray, FloatArray, interval_maxima
from planner_service.core.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class States:
    """One entry a state, sources first: state 0 has nothing before it, the last one everything.

    `compute_s` (forward and backward of a minibatch), `weight_bytes` and `activation_bytes` are sums over all blocks
    before the state; `boundary_bytes` what crosses it, one way (0 at both ends); `input_bytes` what a stage that
    begins there keeps as its input. `before[a, b]`: a stage may reach from a to b; None for a chain, where any a < b
    may. `transient_bytes[a, b]`: the largest workspace of a block between the two; None where all are 0.
    """

    compute_s: FloatArray
    weight_bytes: FloatArray
    activation_bytes: FloatArray
    boundary_bytes: FloatArray
    input_bytes: FloatArray
    before: BoolArray | None = None
    transient_bytes: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.compute_s)


def chain_states(profile: Profile, microbatch_size: int) -> States:
    """The states of a chain: one before every block and one behind the last."""
    blocks = profile.at(microbatch_size)
    outputs = [block.output_bytes for block in blocks]
    workspace = [block.workspace_bytes for block in blocks]
    return States(
        compute_s=_sums([block.compute_s for block in blocks]),
        weight_bytes=_sums([block.weight_bytes for block in profile.blocks]),
        activation_bytes=_sums([block.activation_bytes for block in blocks]),
        boundary_bytes=np.asarray([0, *outputs[:-1], 0], dtype=np.float64),
        input_bytes=np.asarray([*(block.input_bytes for block in blocks), 0], dtype=np.float64),
        transient_bytes=_maxima(workspace) if any(workspace) else None,
    )


def _sums(values: Sequence[float]) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))


def _maxima(values: Sequence[float]) -> FloatArray:
    """By first and last state, the largest between them."""
    table = np.zeros((len(values) + 1,) * 2)
    table[:-1, 1:] = interval_maxima(values)
    return table
