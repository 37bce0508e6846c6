"""Terms: the seconds and bytes of a rank of several stages, on the links of a placement.

- A stage's time a microbatch is its compute and its transfers, as in 2BW's closed form (`two_bw.terms`). A rank's time
  is the sum over its stages, or its share of their gradient exchange, whichever is longer. The slowest rank's time is
  a step.
- A rank holds the weights of all its stages, the buffers of their transfers, and the largest transient of one block.
  Its microbatches count at the moment at which they keep most (`costs.memory.held_by`).
- A rank recomputes all its stages or none, and all by the same unit: the first that fits, or the one that holds least.

All tables are [start, stop], infinite where there is no stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.costs.collectives import all_reduce
from pipeplan.costs.memory import (
    Copies,
    HeldByRank,
    cast_copies,
    held_by,
    keeps_master_weights,
    training_copies,
)
from pipeplan.costs.transfer import Bandwidths, boundary_bytes
from pipeplan.documents.plan import RECOMPUTE_UNITS, Stage
from pipeplan.documents.stage_memory import StageMemory
from pipeplan.planners.chain import ProfileChain
from pipeplan.planners.interleaved.shape import ChunkedShape
from pipeplan.planners.problem import PlanningProblem, recompute_units
from pipeplan.planners.stage_sum import StageSum, item_sums
from pipeplan.planners.two_bw.placements import Links


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkedTerms:
    """A shape on a placement. `chain` is the profile at the shape's microbatch size."""

    problem: PlanningProblem
    shape: ChunkedShape
    links: Links
    chain: ProfileChain
    _held: dict[tuple[int, bool], HeldByRank] = field(default_factory=dict)
    _copies: dict[tuple[int, bool], Copies] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.chain.blocks

    @property
    def device_bytes(self) -> int:
        """The bytes that a rank may hold."""
        return self.problem.cluster.device.usable_bytes

    @cached_property
    def edges(self) -> tuple[float | None, ...]:
        """The bandwidth of every boundary: after each stage but the last; None where both stages are on one rank."""
        shape = self.shape
        # A loop continues with the next chunk from the last rank to the first.
        by_rank = self.links.ranks
        bandwidths, ends = Bandwidths(self.problem.cluster), (by_rank[-1], by_rank[0])
        wrapped = float(bandwidths.of_levels(bandwidths.levels(np.minimum(*ends), np.maximum(*ends)).max()))
        owners = {stage: rank for rank in range(shape.ranks) for stage in shape.stages_of(rank)}

        def of(one: int, other: int) -> float | None:
            if one == other:
                return None
            return float(self.links.edges[min(one, other)]) if abs(one - other) == 1 else wrapped

        return tuple(of(owners[stage], owners[stage + 1]) for stage in range(shape.depth - 1))

    @cached_property
    def may_be_stage(self) -> BoolArray:
        """[start, stop]: which stages the forced and the forbidden cuts leave."""
        blocks, options = self.blocks, self.problem.options
        fine = np.triu(np.ones((blocks + 1, blocks + 1), dtype=bool), k=1)
        for cut in options.forbidden_cuts:
            fine[cut, :] = False
            fine[:, cut] = False
        for cut in options.forced_cuts:
            fine[:cut, cut + 1 :] = False
        return fine

    def edge_sums(self, stage: int, *, recompute: bool) -> tuple[FloatArray, FloatArray]:
        """Two sums over the blocks before each boundary.

        A stage's seconds are the second sum at its stop less the first at its start.
        """
        ends = (None, *self.edges, None)
        before, after = ends[stage], ends[stage + 1]
        return self.chain.begins_s(before, recompute=recompute), self.chain.ends_s(after, recompute=recompute)

    def busy_s(self, stage: int, *, recompute: bool) -> FloatArray:
        """A stage's compute and transfers, a microbatch."""
        begins_s, ends_s = self.edge_sums(stage, recompute=recompute)
        return np.where(self.may_be_stage, ends_s - begins_s[:, None], np.inf)

    def exchange_s_per_byte(self, rank: int) -> float:
        """The seconds of a rank's gradient exchange, for each microbatch and byte of weights."""
        if self.shape.width == 1:
            return 0.0
        share = float(all_reduce(np.asarray(float(self.shape.width))))
        return share / float(self.links.groups[rank]) / self.shape.microbatches

    def held(self, rank: int, *, recompute: bool) -> HeldByRank:
        """The microbatches that a rank keeps."""
        key = rank, recompute
        if key not in self._held:
            shape = self.shape
            self._held[key] = held_by(shape.laws, shape.ranks, shape.chunks, rank, shape.microbatches, recompute)
        return self._held[key]

    def most_in_flight(self, stage: int) -> int:
        """Upper bound on a stage's microbatches in flight."""
        rank, chunk = self._places[stage]
        return self.held(rank, recompute=False).most[chunk]

    @cached_property
    def _kept_chain(self) -> ProfileChain:
        """The chain with the bytes that a microbatch keeps until its weight gradients are done.

        Between the halves of a split backward a block may keep more than from forward to backward.
        """
        chain = self.chain
        if not self.shape.laws.splits_backward:
            return chain
        measured = self.problem.profile.at(self.shape.microbatch_size)
        known = all(block.split_activation_bytes is not None for block in measured)
        blocks = [block.when_split for block in measured] if known else measured
        more = [max((b.weight_gradient_bytes or 0) - b.added_bytes, 0) for b in blocks]
        kept = np.asarray([[b.activation_bytes + extra for b, extra in zip(blocks, more, strict=True)]])
        shared = np.asarray([[b.shared_bytes or 0 for b in blocks]])
        source = chain.source.at((self.shape.microbatch_size,))
        return replace(
            chain,
            row=0,
            source=replace(source, activation_bytes=kept.astype(np.float64), shared_bytes=shared.astype(np.float64)),
            _stage_sums={},
        )

    def copies(
        self,
        stage: int,
        *,
        recompute: bool,
        whole: int = 0,
        inputs: int = 0,
        unit: str = RECOMPUTE_UNITS[0],
        transients: int = 0,
    ) -> Copies:
        """The copies of a stage that keeps `whole` microbatches whole, and `inputs` by their inputs alone.

        By block, the inputs are those of all blocks, and each whole microbatch adds the largest block's bytes.
        """
        by_block = unit == "block"
        return replace(
            self._without_microbatches(stage, recompute),
            activations=0 if by_block else whole,
            inputs=0 if by_block else inputs,
            block_inputs=whole + inputs if by_block else 0,
            blocks_again=whole if by_block else 0,
            transients=transients,
        )

    def stage_sum(self, copies: Copies) -> StageSum:
        """The bytes of all stages with these copies."""
        return self._kept_chain.stage_sum(copies)

    def kept_sums(self, unit: str = RECOMPUTE_UNITS[0]) -> tuple[StageSum, StageSum]:
        """The bytes of a microbatch that is kept whole, and of one of which the inputs are kept."""
        if unit == "block":
            return self._kept(block_inputs=1, blocks_again=1), self._kept(block_inputs=1)
        return self._kept(activations=1), self._kept(inputs=1)

    def _kept(self, **counts: int) -> StageSum:
        copies = replace(Copies(versions=0, activations=0, inputs=0, transients=0), **counts)
        return item_sums(self._kept_chain.quantities, copies)["activations"]

    @cached_property
    def workspaces(self) -> StageSum:
        """The largest transient of a block."""
        return item_sums(self.chain.quantities, Copies(versions=0, activations=0, inputs=0, transients=1))["transient"]

    @cached_property
    def ways(self) -> tuple[tuple[bool, str], ...]:
        """A rank's modes: without recomputation, and with it by each unit."""
        units = recompute_units(self.problem, self.shape.laws)
        return tuple((mode, unit) for mode in self.shape.modes for unit in (units if mode else RECOMPUTE_UNITS[:1]))

    @property
    def work_s(self) -> list[float]:
        """The least compute of the blocks before each boundary."""
        mode = self.shape.recompute
        return self.chain.least_s if mode is None else self.chain.listed_s(recompute=mode)

    def least_step_s(self) -> float:
        """A lower bound on the step of any stages: by all work and transfers together, or by the longest blocks.

        Some rank has at least k / p of the k longest blocks. Every boundary sends at least as much as the smallest one.
        """
        ranks, inner = self.shape.ranks, self.chain.output_bytes[1:-1]
        least_bytes = float(inner.min()) if len(inner) else 0.0
        moved_s = [boundary_bytes(least_bytes) / speed if speed else 0.0 for speed in (0.0, *self.edges, 0.0)]
        together_s = [
            sum(moved_s[stage] + moved_s[stage + 1] for stage in self.shape.stages_of(rank)) for rank in range(ranks)
        ]
        longest = np.sort(np.diff(self.work_s))[::-1]
        sums_s = np.append(0.0, np.cumsum(longest))
        many = np.arange(1, self.blocks + 1)
        block_s = float((sums_s[many] - sums_s[many - -(-many // ranks)]).max()) + min(together_s)
        weights = float(self.chain.weight_bytes[-1]) / ranks
        exchange_s = weights * min(self.exchange_s_per_byte(rank) for rank in range(ranks))
        return max((float(sums_s[-1]) + sum(together_s)) / ranks, block_s, exchange_s) * (1 - 1e-12)

    def weights_fit(self) -> bool:
        """False where the weights, with their gradients and optimizer states, exceed all ranks together."""
        return self._weights <= self.shape.ranks * self.device_bytes

    def may_fit(self) -> bool:
        """False where no stages fit, by all ranks together.

        Take a rank that keeps at least a_r microbatches of each of its stages, and b_r further bytes. It can have (M -
        b_r) / a_r of the activations, less its weights over a_r. With recomputation it keeps a whole stage of its
        chunks. If it recomputes by block, it keeps only the input or the activations of every block, whichever is
        smaller.
        """
        by_block = (True, "block") in self.ways
        activations = self.chain.least_kept if by_block else float(self.kept_sums()[0].sums[-1])
        shape, least_input = self.shape, float(self.chain.input_bytes[:-1].min())
        weights = self._weights
        most_bytes, most_kept = 0.0, 0.0
        for rank in range(shape.ranks):
            counts, besides = [], []
            for recompute in shape.modes:
                moments = self.held(rank, recompute=recompute).moments
                counts.append(1 / shape.chunks if recompute else int(moments[:, : shape.chunks].min(axis=1).max()))
                inputs = int(moments[:, shape.chunks :].sum(axis=1).max())
                besides.append(0.0 if recompute and by_block else inputs * least_input)
            left = self.device_bytes - min(besides)
            kept = max(min(counts), 1e-9)
            if left < 0:
                return False
            most_bytes, most_kept = most_bytes + left / kept, max(most_kept, kept)
        return bool(activations + weights / most_kept <= most_bytes * (1 + 1e-9))

    def rank_s(self, rank: int, stops: Sequence[int], *, recompute: bool) -> float:
        """A rank's seconds a microbatch with these stops of all stages."""
        busy_s = weights = 0.0
        for stage in self.shape.stages_of(rank):
            start, stop = stops[stage - 1] if stage else 0, stops[stage]
            begins_s, ends_s = self.edge_sums(stage, recompute=recompute)
            busy_s += float(ends_s[stop] - begins_s[start])
            weights += float(self.chain.weight_bytes[stop] - self.chain.weight_bytes[start])
        return max(busy_s, weights * self.exchange_s_per_byte(rank))

    def memory(self, rank: int, stops: Sequence[int], *, recompute: bool) -> tuple[StageMemory, ...]:
        """The bytes of each stage of a rank at its peak, by chunk."""
        return self.unit_and_memory(rank, stops, recompute=recompute)[1]

    def unit_and_memory(
        self, rank: int, stops: Sequence[int], *, recompute: bool
    ) -> tuple[str, tuple[StageMemory, ...]]:
        """The same with the unit of recomputation: the first that fits, or (if none does) the one that holds least."""
        held = [
            (unit, self.memory_by(unit, rank, stops, recompute=recompute))
            for mode, unit in self.ways
            if mode == recompute
        ]
        totals = [sum(items.total for items in memory) for _, memory in held]
        fitting = (each for each, total in zip(held, totals, strict=True) if total <= self.device_bytes)
        return next(fitting, held[totals.index(min(totals))])

    def memory_by(self, unit: str, rank: int, stops: Sequence[int], *, recompute: bool) -> tuple[StageMemory, ...]:
        """The same by one unit."""
        stages = self.shape.stages_of(rank)
        starts = np.asarray([stops[stage - 1] if stage else 0 for stage in stages])
        ends = np.asarray([stops[stage] for stage in stages])
        kept = np.concatenate([each.at(starts, ends) for each in self.kept_sums(unit)])
        moments = self.held(rank, recompute=recompute).moments
        moment: list[int] = moments[int(np.argmax(moments @ kept))].tolist()
        largest = int(np.argmax(self.workspaces.at(starts, ends)))  # one block runs at a time
        items = []
        for chunk, (stage, start, stop) in enumerate(zip(stages, starts.tolist(), ends.tolist(), strict=True)):
            copies = self.copies(
                stage,
                recompute=recompute,
                whole=moment[chunk],
                inputs=moment[len(stages) + chunk],
                unit=unit,
                transients=int(chunk == largest),
            )
            items.append(self._kept_chain.stage_memory(copies, start, stop))
        return tuple(items)

    def rank_bytes(self, rank: int, stops: Sequence[int], *, recompute: bool) -> int:
        """A rank's peak bytes."""
        return sum(items.total for items in self.memory(rank, stops, recompute=recompute))

    def held_bytes(self, rank: int, starts: IntArray, stops: IntArray, *, recompute: bool) -> FloatArray:
        """[split]: a rank's peak bytes by the unit that holds least, for places of its stages in many splits.

        Places are [chunk, split].
        """
        stages = self.shape.stages_of(rank)
        copies = (self.copies(stage, recompute=recompute) for stage in stages)
        # `StageMemory` rounds down what autocast copies of weights.
        fixed = [np.floor(self.stage_sum(each).at(*place)) for each, *place in zip(copies, starts, stops, strict=True)]
        moments, amounts = self.held(rank, recompute=recompute).moments, list[FloatArray]()
        for unit in (unit for mode, unit in self.ways if mode == recompute):
            kept = np.concatenate([each.at(starts, stops) for each in self.kept_sums(unit)])
            amounts.append((moments @ kept).max(axis=0))
        largest = self.workspaces.at(starts, stops).max(axis=0)
        return np.asarray(sum(fixed) + largest + np.minimum.reduce(amounts))

    def mode(self, rank: int, stops: Sequence[int]) -> bool:
        """Whether a rank recomputes: in the faster mode that fits, or (if none does) in the smaller."""
        if len(self.shape.modes) == 1:
            return self.shape.modes[0]
        ways = []
        for recompute in self.shape.modes:
            missing_bytes = max(self.rank_bytes(rank, stops, recompute=recompute) - self.device_bytes, 0)
            ways.append((missing_bytes, self.rank_s(rank, stops, recompute=recompute), recompute))
        return min(ways)[2]

    def stages(self, stops: Sequence[int]) -> tuple[Stage, ...]:
        """The stages as a plan has them."""
        made: dict[int, Stage] = {}
        for rank in range(self.shape.ranks):
            recompute = self.mode(rank, stops)
            unit, memory = self.unit_and_memory(rank, stops, recompute=recompute)
            for stage, items in zip(self.shape.stages_of(rank), memory, strict=True):
                start, stop = stops[stage - 1] if stage else 0, stops[stage]
                begins_s, ends_s = self.edge_sums(stage, recompute=recompute)
                made[stage] = Stage(
                    start=start,
                    stop=stop,
                    replicas=self.shape.width,
                    recompute=recompute,
                    recompute_unit=unit,
                    time_s=float(ends_s[stop] - begins_s[start]),
                    memory_bytes=items.total,
                    memory=items,
                )
        return tuple(made[stage] for stage in range(self.shape.depth))

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        ranks = range(self.shape.ranks)
        return {stage: (rank, chunk) for rank in ranks for chunk, stage in enumerate(self.shape.stages_of(rank))}

    @cached_property
    def _weights(self) -> float:
        """The bytes of all weights, with their gradients and optimizer states."""
        return float(self.stage_sum(self.copies(0, recompute=self.shape.modes[0])).sums[-1])

    def _without_microbatches(self, stage: int, recompute: bool) -> Copies:
        """A stage's weights with their gradients and optimizer states, and its buffers."""
        key = stage, recompute
        if key not in self._copies:
            ends, profile, options = (None, *self.edges, None), self.problem.profile, self.problem.options
            held = training_copies(
                self.shape.laws,
                options.optimizer_or_default,
                recompute=recompute,
                held=self.most_in_flight(stage),
                dtype=profile.dtype,
                master_weights=keeps_master_weights(profile.dtype, options.master_weights),
                held_before=self.most_in_flight(stage - 1) if ends[stage] is not None else None,
                sends_on=ends[stage + 1] is not None,
                autocast=profile.autocast,
            )
            self._copies[key] = replace(held, versions=1, casts=cast_copies(profile.dtype, profile.autocast))
        return self._copies[key]
