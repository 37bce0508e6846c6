"""Chunk memory: a bound on the rate of ranks with several stages, because memory limits what they compute.

`two_bw.capacity` has the same for ranks with one stage. In t seconds a microbatch, a rank computes at most t of the
blocks' least seconds. A rank that keeps whole microbatches has fewer blocks, because its memory limits them: just
before its first backward it keeps at least n microbatches of each of its stages. A rank that recomputes is limited by
its weights, and its blocks take longer. An upper bound on its compute is that of the blocks with the most compute per
byte, the last of them in part (Dantzig 1957). All ranks together must compute all blocks.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.costs.memory import as_few, chunked_pipeline
from pipeplan.documents.plan import Worker
from pipeplan.planners.auto.model import SearchedModel
from pipeplan.planners.interleaved.terms import ChunkedTerms
from pipeplan.programs.instructions import Backward, BackwardInput, Forward
from pipeplan.programs.schedule import Schedule

_HALVINGS = 30
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkMemory:
    """The bound for the stages of a shape."""

    model: SearchedModel
    terms: ChunkedTerms

    @property
    def counted(self) -> int:
        """About how many instructions are read to count what ranks keep."""
        shape = self.terms.shape
        return shape.ranks**2 * (shape.chunks + 1)

    def may_exceed(self, rate: float) -> bool:
        """Whether stages that fit might all compute fast enough to play faster than that, in samples a second."""
        shape = self.terms.shape
        return rate <= 0 or self._computed(shape.batch_size / (rate * shape.microbatches)) >= self._total_s

    def most(self) -> float:
        """Samples a second that no play exceeds; 0 if no stages fit."""
        shape, high = self.terms.shape, self._total_s / min(each for each in self._shares if each > 0)
        if self._computed(high) < self._total_s:
            return 0.0
        low = self._total_s / shape.ranks
        for _ in range(_HALVINGS):
            middle = (low * high) ** 0.5
            enough = self._computed(middle) >= self._total_s
            low, high = (low, middle) if enough else (middle, high)
        return shape.batch_size / (shape.microbatches * low) * (1 + _ROUNDING) if low > 0 else inf

    def _computed(self, step_s: float) -> float:
        """The part of the blocks' least seconds that all ranks together compute in `step_s` seconds a microbatch."""
        plain, again = self._shares
        plain_s, again_s = self._fitting_s
        by_rank = np.maximum(np.minimum(step_s * plain, plain_s), min(step_s * again, again_s))
        return float(by_rank.sum()) * (1 + _ROUNDING)

    @cached_property
    def _seconds(self) -> dict[bool | None, FloatArray]:
        """By mode, the blocks' least compute; None: each block in its shorter mode."""
        shape = self.terms.shape
        modes = {None: shape.recompute} | {mode: mode for mode in shape.modes}
        sums = {key: self.model.sums(shape.schedule, shape.microbatch_size, mode) for key, mode in modes.items()}
        return {key: np.diff(each.compute_s) for key, each in sums.items()}

    @cached_property
    def _total_s(self) -> float:
        return float(self._seconds[None].sum())

    @cached_property
    def _shares(self) -> tuple[float, float]:
        """Upper bounds on the share of the blocks' least seconds that a second computes: whole, and recomputing; 0 if
        that is not allowed.
        """
        return self._share(False), self._share(True)

    def _share(self, mode: bool) -> float:
        if mode not in self._seconds:
            return 0.0
        least_s, taken_s = self._seconds[None], self._seconds[mode]
        return float(np.max(least_s[taken_s > 0] / taken_s[taken_s > 0], initial=0.0)) or 1.0

    @cached_property
    def _fitting_s(self) -> tuple[FloatArray, float]:
        """The least seconds of the blocks that may fit: by rank with whole microbatches, and by their weights alone."""
        terms, shape = self.terms, self.terms.shape
        weights = np.diff(terms.weights_held)
        kept, numbers = np.diff(terms.kept_sums[0]), range(shape.ranks)
        few = as_few(shape.microbatches, shape.ranks)
        held = [held_before_backwards(shape.laws, shape.ranks, shape.chunks, r, few) for r in numbers]
        fitting = {n: self._most_s(weights + n * kept) for n in set(held)}
        return np.asarray([fitting[n] for n in held]), self._most_s(weights)

    def _most_s(self, held_bytes: FloatArray) -> float:
        """Upper bound on the least seconds of blocks of `held_bytes` that fit a device; the last block in part."""
        room, least_s = self.terms.device_bytes * (1 + _ROUNDING), self._seconds[None]
        with np.errstate(divide="ignore", invalid="ignore"):
            order = np.argsort(-np.where(held_bytes > 0, least_s / held_bytes, inf), kind="stable")
        sums_s, sums_bytes = (np.append(0.0, np.cumsum(each[order])) for each in (least_s, held_bytes))
        return float(np.interp(room, sums_bytes, sums_s))


@lru_cache(maxsize=16_384)
def held_before_backwards(laws: Schedule, ranks: int, chunks: int, rank: int, microbatches: int) -> int:
    """Lower bound on the microbatches that a rank keeps of each of its stages when its first backward is due."""
    held = [0] * chunks
    for instruction in laws.compute(
        chunked_pipeline(laws, ranks=ranks, chunks=chunks, microbatches=microbatches), Worker(stage=rank)
    ):
        if isinstance(instruction, Backward | BackwardInput):
            break
        if isinstance(instruction, Forward):
            held[instruction.chunk] += 1
    return min(held)
