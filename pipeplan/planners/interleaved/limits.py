"""Limits: tables, over blocks, of the stages that a rank may have together within a step and a memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.planners.interleaved.terms import ChunkedTerms

ROUNDING = 1e-12
"""Sums of the same seconds in another order differ by no more."""

_ANY_TIME_S = 1e300
"""Replaces infinity, from which nothing can be subtracted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limit:
    """A sum over the stages of a rank, and its upper bound: `tables` has each stage's term, by chunk."""

    tables: tuple[FloatArray, ...]
    most: float


Way = tuple[Limit, ...]
"""A rank's mode, without recomputation or with it by some unit: all its limits hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """No rank takes longer than a step, and none holds more than `held_bytes`."""

    terms: ChunkedTerms
    step_s: float = inf
    held_bytes: float = inf

    def ways(self, rank: int) -> Iterator[Way]:
        """The modes of a rank that some stages allow. Stages are within the limits if all limits of some mode hold."""
        terms = self.terms
        stages = terms.shape.stages_of(rank)
        step_s = min(self.step_s * (1 + ROUNDING), _ANY_TIME_S)
        unlimited = False
        for recompute, unit in terms.ways:
            if recompute and unlimited:  # by another unit, memory excludes nothing
                continue
            busy_s = tuple(terms.busy_s(stage, recompute=recompute) for stage in stages)
            limits = [Limit(tables=busy_s, most=step_s)]
            share = terms.exchange_s_per_byte(rank)
            if share:
                weights = terms.chain.weight_bytes
                exchange_s = share * np.maximum(weights - weights[:, None], 0.0)
                limits.append(Limit(tables=(exchange_s,) * len(stages), most=step_s))
            possible = [busy <= step_s for busy in busy_s]
            if not all(fine.any() for fine in possible):
                continue
            of_time = len(limits)
            if self.held_bytes < inf:
                for limit in self._memory(rank, stages, recompute, unit):
                    largest = [table[fine].max() for table, fine in zip(limit.tables, possible, strict=True)]
                    if sum(largest) > limit.most:  # else it excludes nothing
                        limits.append(limit)
            unlimited = recompute and len(limits) == of_time
            yield tuple(limits)

    def _memory(self, rank: int, stages: Sequence[int], recompute: bool, unit: str) -> Iterator[Limit]:
        """A limit for each moment, and each chunk that may have the largest transient then."""
        terms, chunks = self.terms, len(stages)
        for moment in terms.held(rank, recompute=recompute).moments.tolist():
            copies = (
                terms.copies(stage, recompute=recompute, whole=moment[chunk], inputs=moment[chunks + chunk], unit=unit)
                for chunk, stage in enumerate(stages)
            )
            held = [terms.stage_sum(each).table() for each in copies]
            for largest in range(chunks if terms.chain.has_workspaces else 1):
                with_transient = [*held]
                with_transient[largest] = held[largest] + terms.workspaces.table()
                yield Limit(tables=tuple(with_transient), most=self.held_bytes)
