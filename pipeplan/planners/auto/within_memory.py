"""Within memory: upper bounds on the rates of shapes, because memory limits a stage's blocks or makes it recompute.

A stage whose microbatches' activations do not fit recomputes, or has fewer blocks. Both make the longest stage
longer than an equal share of the model. The closed form's search computes by how much (`two_bw.capacity`,
`two_bw.split`), in the closed form's seconds. In a play blocks may be faster: with a split backward, or where the
profile's overheads allow it. The bounds are therefore multiplied by the least ratio of played to closed-form seconds of
any block.
"""

from dataclasses import dataclass, field
from math import inf

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.planners.auto.model import SearchedModel
from pipeplan.planners.two_bw.bounds import Configurations
from pipeplan.planners.two_bw.search import MemoryKey, memory_key
from pipeplan.planners.two_bw.split import ROUNDING
from pipeplan.planners.two_bw.terms import PipelineShape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryBounds:
    """The bounds for the shapes of a model. Results are remembered."""

    model: SearchedModel
    _shares: dict[tuple[str, int, bool | None], float] = field(default_factory=dict)
    _impossible: dict[MemoryKey, float] = field(default_factory=dict)

    def rates(self, found: Configurations, rates: FloatArray, *, above: float) -> FloatArray:
        """Upper bounds on the shapes' samples a second, at most these `rates`; tighter where they are `above`."""
        closer, laws, evaluator = rates.copy(), found.execution.laws, self.model.evaluator
        if not laws.pipelined or laws.keeps_batch:
            return closer
        asked = (rates > above) & found.filled
        for size in np.unique(found.size[asked]).tolist():
            at = np.flatnonzero(asked & (found.size == size))
            shape = found.shape(int(at[0]), evaluator.measured.sizes)
            longest_s = evaluator.capacity(shape).least_s[found.depth[at]] * self._share(shape)
            with np.errstate(divide="ignore"):
                allowed = self.model.problem.batch_size / (found.microbatches[at] * longest_s)
            closer[at] = np.minimum(rates[at], allowed * (1 + ROUNDING))
        return closer

    def may_exceed(self, rate: float, shape: PipelineShape) -> bool:
        """Whether stages that fit may all compute fast enough to play faster than this rate."""
        if not shape.laws.pipelined:
            return True
        share = self._share(shape)
        unbounded = rate <= 0 or share <= 0
        step_s = inf if unbounded else shape.batch_size / (rate * shape.microbatches * share) * (1 + ROUNDING)
        key = memory_key(shape)
        if step_s <= self._impossible.get(key, 0.0):  # ruled out at another width, with the same memory and more time
            return False
        possible = self.model.evaluator.possible(shape, step_s)
        if not possible:
            self._impossible[key] = step_s
        return possible

    def _share(self, shape: PipelineShape) -> float:
        """The smallest ratio of a block's compute in a play, in any mode, to the closed form's seconds."""
        key = shape.schedule, shape.microbatch_size, shape.recompute
        if key not in self._shares:
            chain, share = self.model.evaluator.chain(shape.microbatch_size), inf
            for mode in shape.modes:
                closed_s = np.diff(chain.listed_s(recompute=mode))
                played_s = np.diff(self.model.sums(shape.schedule, shape.microbatch_size, mode).compute_s)
                share = min(share, float(np.min(played_s[closed_s > 0] / closed_s[closed_s > 0], initial=inf)))
            self._shares[key] = share * (1 - ROUNDING)
        return self._shares[key]
