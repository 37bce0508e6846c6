"""Model: the common part of all spaces of a problem: the closed forms of its shapes, its sums, and its placements."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.costs.collectives import all_reduces_among
from pipeplan.costs.tied import sum_s
from pipeplan.planners.auto.ranking import has_split_backward
from pipeplan.planners.auto.wiring import Wiring, wiring_of
from pipeplan.planners.chain import profiled
from pipeplan.planners.measured import interpolated
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.two_bw.candidate import Evaluator
from pipeplan.planners.two_bw.placements import Links, mixtures, orientations
from pipeplan.schedules.registry import schedule_named


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sums:
    """Sums for a microbatch on the whole model, for any stages; any stage may recompute if a shape leaves that open.

    `compute_s`: before each block, the least compute of the blocks, with a whole or a split backward; `way_s`: the part
    of it that a microbatch waits for in both directions. `block_s` is the longest block's compute, `total_s` the sum
    for equal stages.
    """

    compute_s: FloatArray
    way_s: FloatArray
    block_s: float
    total_s: float
    least_boundary_bytes: float
    mean_boundary_bytes: float
    exchanged_bytes: float


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchedModel:
    """A problem's model on its cluster. `problem` has a chain."""

    problem: PlanningProblem
    _wirings: dict[tuple[int, int], tuple[Wiring, ...]] = field(default_factory=dict)
    _sums: dict[tuple[str, int, bool | None], Sums] = field(default_factory=dict)
    _tied_s: dict[Wiring, float] = field(default_factory=dict)

    @cached_property
    def evaluator(self) -> Evaluator:
        """Splits shapes. Raises InvalidInputError if no microbatch size divides the batch."""
        return Evaluator(problem=self.problem, measured=profiled(self.problem))

    def wirings(self, width: int, depth: int) -> tuple[Wiring, ...]:
        """All placements of a number of replicas of a number of ranks."""
        key = width, depth
        if key not in self._wirings:
            cluster = self.problem.cluster
            every = (*orientations(cluster, width, depth), *mixtures(cluster, width, depth))
            self._wirings[key] = tuple(wiring_of(cluster, links) for links in every)
        return self._wirings[key]

    @property
    def exchange_factor(self) -> float:
        """The factor by which an exchange's bytes take longer than on the links alone."""
        return self.problem.profile.overheads.exchange_factor

    def tied_s(self, wiring: Wiring) -> float:
        """The least seconds in which the first and the last rank sum gradients of weights that they share, for any
        stages. They do if the first and the last block, and no other, use the weights.
        """
        tied, ends = self.problem.profile.tied, {0, self.evaluator.measured.blocks - 1}
        size_bytes = sum(each.weight_bytes for each in tied if set(each.blocks) == ends)
        ranks = wiring.links.ranks.tolist()
        if not size_bytes or len(ranks) == 1:
            return 0.0
        if wiring not in self._tied_s:
            self._tied_s[wiring] = sum_s(self.problem.cluster, (ranks[0], ranks[-1]), size_bytes)
        return self._tied_s[wiring]

    def exchanged_s_per_byte(self, links: Links) -> FloatArray:
        """By stage, the least seconds of its replicas' exchange for a byte of weights: by rings, without hops."""
        among = all_reduces_among(self.problem.cluster, links.ranks)
        return np.asarray([sum(ring.ring_s_per_byte for ring in each.rings) for each in among])

    def sums(self, schedule: str, size: int, recompute: bool | None) -> Sums:
        """The sums for a microbatch."""
        key = schedule, size, recompute
        if key not in self._sums:
            chain, factor = self.evaluator.chain(size), self.exchange_factor
            compute_s, way_s = self._least_s(schedule, size, recompute)
            boundaries = chain.output_bytes[1:-1] if chain.blocks > 1 else np.zeros(1)
            self._sums[key] = Sums(
                compute_s=np.append(0.0, np.cumsum(compute_s)),
                way_s=np.append(0.0, np.cumsum(way_s)),
                block_s=float(compute_s.max()),
                total_s=chain.least_s[-1] if recompute is None else chain.listed_s(recompute=recompute)[-1],
                least_boundary_bytes=float(boundaries.min()),
                mean_boundary_bytes=float(boundaries.mean()),
                exchanged_bytes=float(chain.weight_bytes[-1]) * factor,
            )
        return self._sums[key]

    @cached_property
    def _split_s(self) -> tuple[FloatArray, FloatArray]:
        """[size, block]: both parts of a split backward, at all sizes; not a number where none was measured."""
        profile, sizes = self.problem.profile, self.evaluator.measured.sizes
        measured = [[block.at(size) for block in profile.blocks] for size in profile.microbatch_sizes]
        firsts = [[each.backward_input_s for each in row] for row in measured]
        rests = [[each.backward_weight_s for each in row] for row in measured]
        first_s, rest_s = (
            interpolated(np.asarray(rows, dtype=np.float64), profile.microbatch_sizes, sizes)
            for rows in (firsts, rests)
        )
        return first_s, rest_s

    def _least_s(self, schedule: str, size: int, recompute: bool | None) -> tuple[FloatArray, FloatArray]:
        """The least compute of blocks, and the part of it that a microbatch waits for, with a whole or a split
        backward.

        A stage may recompute while it waits, so no microbatch waits for that.
        """
        problem, laws, overheads = self.problem, schedule_named(schedule), self.problem.profile.overheads
        factor, blocks = problem.options.recompute_factor, self.evaluator.measured
        row = blocks.sizes.index(size)
        forward_s, whole_s = blocks.forward_s[row], blocks.backward_s[row]
        backwards_s = [] if laws.splits_backward else [(whole_s, np.zeros_like(whole_s))]
        two_bp = laws.takes_two_bp and problem.options.split_backward is not False and has_split_backward(problem)
        if laws.splits_backward or two_bp:
            first_s, rest_s = (each[row] for each in self._split_s)
            backwards_s.append((np.where(np.isnan(first_s), whole_s, first_s), np.nan_to_num(rest_s)))
        ways_s, computes_s = [], []
        for again in (True, False) if recompute is None else (recompute,):
            share = overheads.forward_without_graph if again and factor is None else 1.0
            after = min(overheads.backward_after_forward, 1.0) if again or laws.alternates else 1.0
            again_s = np.zeros_like(whole_s)
            if again:
                added = max((factor or 1.0) - 1.0, 0.0) * (forward_s + whole_s)
                again_s = overheads.recompute * forward_s if factor is None else added
            for first_s, rest_s in backwards_s:
                ways_s.append(share * forward_s + after * first_s)
                computes_s.append(ways_s[-1] + rest_s + again_s)
        return np.minimum.reduce(computes_s), np.minimum.reduce(ways_s)
