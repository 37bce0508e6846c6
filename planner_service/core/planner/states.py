"""States: where a model can be cut, and what lies before every cut.

A chain of n blocks has n + 1 states, one before every block and one behind the last. A model that is a graph has one
for every set of blocks that holds all that its members read (the antichains of PipeDream's optimizer): the blocks that
are already done where a stage ends. A stage is what lies between two states, so that its sums are differences.
"""

from dataclasses import dataclass

from planner_service.core.cost.compute import BoolArray, FloatArray


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
