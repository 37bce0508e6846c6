"""Chain: a profile as arrays, at a planner's microbatch sizes, and as prefix sums over its blocks.

Three steps lead from a profile to a stage's cost:

1. `measured` puts the profile into arrays, a row a measured microbatch size and a column a block.
2. `profiled` chooses the planner's sizes, the measured ones and some between them, and interpolates.
3. `ProfileChain` sums one size's row from the first block on. A stage's sum is the difference of two entries.

Seconds are multiples of 2^-52 of their total, which makes such sums and differences exact: stages of equal blocks are
equal to the last bit, wherever they begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import frexp

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.memory import Copies, kept_sums, replacing_bytes
from pipeplan.costs.transfer import boundary_bytes
from pipeplan.documents.stage_memory import StageMemory
from pipeplan.errors import LEAST_AMOUNT, InvalidInputError, require
from pipeplan.planners.measured import MeasuredBlocks, measured
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.stage_sum import LargestBlock, StageQuantities, StageSum, stage_memory, stage_sum

MAX_INTERPOLATED = 32
"""Upper bound on the sizes between the measured ones; if there are more, those in the most equal ratios."""

MAX_ROWS = 2**21
"""Upper bound on the pairs of widths and sizes; fewer sizes if a safe batch allows every width."""

_MAX_BETWEEN = 2**20
"""Other sizes are at most this far above the smallest measured one."""


def profiled(problem: PlanningProblem) -> MeasuredBlocks:
    """The profile at the sizes to be considered.

    These are the requested size, or all measured sizes and those between them that divide the batch or, with
    `safe_batch`, a smaller one. Raises InvalidInputError if none divides it, the requested size lies beyond the
    measured ones, or the blocks take no time.
    """
    profile, asked = problem.profile, problem.options.microbatch_size
    sizes = profile.microbatch_sizes
    if asked is not None:
        profile.at(asked)
        sizes = (asked,)
    else:
        # Sizes between the measured ones: if there are too many, those nearest to equal ratios.
        between = np.arange(sizes[0], min(sizes[-1], sizes[0] + _MAX_BETWEEN, problem.batch_size) + 1)
        most = MAX_INTERPOLATED
        if problem.options.safe_batch:
            most = max(0, min(most, MAX_ROWS // problem.cluster.devices - len(sizes)))
        else:
            between = between[problem.batch_size % between == 0]
        between = between[~np.isin(between, sizes)]
        if most == 0:
            between = between[:0]
        elif len(between) > most:
            even = np.geomspace(between[0], between[-1], most)
            between = np.unique(between[np.searchsorted(between, even).clip(max=len(between) - 1)])
        sizes = tuple(sorted({*sizes, *between.tolist()}))

    dividing = [size for size in sizes if problem.options.safe_batch or problem.batch_size % size == 0]
    if not dividing or min(dividing) > problem.batch_size:
        others = f"a measured one of {list(profile.microbatch_sizes)}, or of one between (at most {MAX_INTERPOLATED})"
        wanted = others if asked is None else f"{asked}, as was asked for"
        rule = f"must be a multiple of the microbatch size: {wanted}"
        raise InvalidInputError("batch_size", rule, problem.batch_size)
    found = measured(profile).at(sizes)
    total_s = float((found.forward_s + found.backward_s).sum(axis=1).min())
    require(total_s >= LEAST_AMOUNT, "profile.blocks", "must take some time together, forward and backward", total_s)
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class ProfileChain:
    """The blocks at one microbatch size: entry i of a sum is of the blocks [0, i).

    `compute_s` and `recomputed_s`: forward and backward without and with recomputation. `boundary_bytes`: the bytes
    across the boundary before each block in both directions (0 at the ends), `output_bytes`: in one direction, and
    `kept_output_bytes` the part of it among the stage's activations. `input_bytes`: the input of a stage that begins
    there. `kept_sums` are those of activations (`costs.memory`), `added_bytes` the first of both. `input_sums` are
    those of the inputs of all blocks; a forwarded input is kept once. `shared_bytes` is by block. `weight_bytes` counts
    `copies_bytes`, by block, the copies of weights that another stage has as well (`costs.tied`), and
    `untrained_bytes` counts `frozen_copies_bytes`.
    """

    row: int
    source: MeasuredBlocks
    recompute_factor: float | None = None
    copies_bytes: tuple[int, ...] = ()
    frozen_copies_bytes: tuple[int, ...] = ()
    _lists: dict[bool, list[float]] = field(default_factory=dict)
    _late: dict[int, FloatArray] = field(default_factory=dict)
    _stage_sums: dict[Copies, StageSum] = field(default_factory=dict)
    _transfers: dict[float, FloatArray] = field(default_factory=dict)
    _edges: dict[tuple[float | None, bool, bool], FloatArray] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.source.blocks

    @property
    def microbatch_size(self) -> int:
        """The microbatch size of the sums."""
        return self.source.sizes[self.row]

    @cached_property
    def compute_s(self) -> FloatArray:
        return self._sums(self._on_grid(self.source.forward_s[self.row] + self.source.backward_s[self.row]))

    @cached_property
    def recomputed_s(self) -> FloatArray:
        return self._sums(self._on_grid(self.source.recomputed_s(self.recompute_factor)[self.row]))

    @cached_property
    def weight_bytes(self) -> FloatArray:
        """Sums of the trained weights."""
        own_bytes = self.source.weight_bytes
        return self._sums(own_bytes + np.asarray(self.copies_bytes) if self.copies_bytes else own_bytes)

    @cached_property
    def untrained_bytes(self) -> FloatArray:
        """Sums of frozen weights and buffers, of which a worker holds one copy."""
        own_bytes = self.source.untrained_bytes
        return self._sums(own_bytes + np.asarray(self.frozen_copies_bytes) if self.frozen_copies_bytes else own_bytes)

    def copies_of(self, stops: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """By stage, the bytes of the copies that `weight_bytes` and that `untrained_bytes` count."""
        starts = (0, *stops[:-1])
        return tuple(
            (sum(self.copies_bytes[start:stop]), sum(self.frozen_copies_bytes[start:stop]))
            for start, stop in zip(starts, stops, strict=True)
        )

    @cached_property
    def kept_sums(self) -> tuple[FloatArray, FloatArray]:
        return kept_sums(self.source.activation_bytes[self.row], self.source.shared_bytes[self.row])

    @property
    def added_bytes(self) -> FloatArray:
        return self.kept_sums[0]

    @property
    def shared_bytes(self) -> FloatArray:
        return np.asarray(self.source.shared_bytes[self.row])

    @cached_property
    def input_bytes(self) -> FloatArray:
        return np.append(self.source.input_bytes[self.row], 0.0)

    @cached_property
    def input_sums(self) -> tuple[FloatArray, FloatArray]:
        return kept_sums(self.source.input_bytes[self.row], self.source.passed_inputs[self.row])

    @cached_property
    def output_bytes(self) -> FloatArray:
        return self._crossing(self.source.output_bytes)

    @cached_property
    def kept_output_bytes(self) -> FloatArray:
        return self._crossing(self.source.kept_output_bytes)

    @cached_property
    def boundary_bytes(self) -> FloatArray:
        return boundary_bytes(1.0) * self.output_bytes

    def late_bytes(self, gradients: int) -> FloatArray:
        """The sums of the bytes of `gradients` gradients beyond activations (`costs.memory.replacing_bytes`)."""
        if gradients not in self._late:
            weights, added = np.diff(self.weight_bytes), np.diff(self.added_bytes)
            self._late[gradients] = self._sums(replacing_bytes(gradients, weights, added))
        return self._late[gradients]

    @cached_property
    def quantities(self) -> StageQuantities:
        """What copies are held of."""
        source, row = self.source, self.row
        workspaces, again = (self._doubled(each[row]) for each in (source.workspace_bytes, source.again_bytes))
        return StageQuantities(
            weights=self.weight_bytes,
            untrained=self.untrained_bytes,
            late=self.late_bytes,
            kept=self.kept_sums,
            inputs=self.input_bytes,
            outputs=self.output_bytes,
            kept_outputs=self.kept_output_bytes,
            workspaces=LargestBlock(partial(self._largest, workspaces), float(workspaces[0].min()))
            if self.has_workspaces
            else None,
            block_inputs=self.input_sums,
            blocks_again=LargestBlock(partial(self._largest, again), float(again[0].min())),
        )

    def stage_sum(self, copies: Copies) -> StageSum:
        """All that a worker of every stage holds."""
        if copies not in self._stage_sums:
            self._stage_sums[copies] = stage_sum(self.quantities, copies)
        return self._stage_sums[copies]

    def stage_memory(self, copies: Copies, start: int, stop: int) -> StageMemory:
        """The same of one stage, by item."""
        return stage_memory(self.quantities, copies, start, stop)

    def listed_s(self, *, recompute: bool) -> list[float]:
        """The sums of compute as a list."""
        if recompute not in self._lists:
            self._lists[recompute] = (self.recomputed_s if recompute else self.compute_s).tolist()
        return self._lists[recompute]

    @cached_property
    def least_s(self) -> list[float]:
        """The sums of compute where every block recomputes or not, whichever is shorter."""
        blocks_s = np.minimum(np.diff(self.compute_s), np.diff(self.recomputed_s))
        sums_s: list[float] = self._sums(blocks_s).tolist()
        return sums_s

    @cached_property
    def no_stage(self) -> FloatArray:
        """[start, stop] -> infinity where stop <= start, else 0."""
        return no_stage(self.blocks)

    @property
    def has_workspaces(self) -> bool:
        """Whether any block has a workspace."""
        return bool(self.source.workspace_bytes[self.row].any())

    @cached_property
    def least_kept(self) -> float:
        """Lower bound on a microbatch's bytes: the smaller of activations and input, over all blocks."""
        return float(self.source.least_kept[self.row].sum())

    def _largest(self, doubled: FloatArray, starts: IntArray, stops: IntArray) -> FloatArray:
        power = self._powers[np.maximum(stops - starts, 0)]
        first = np.minimum(starts, self.blocks - 1)
        last = np.clip(stops - (1 << power), first, self.blocks - 1)
        return np.asarray(np.maximum(doubled[power, first], doubled[power, last]))

    @cached_property
    def _powers(self) -> IntArray:
        """By length, the logarithm of the largest power of two within it."""
        return np.asarray(np.frexp(np.maximum(np.arange(self.blocks + 1), 1))[1] - 1, dtype=np.int64)

    def _doubled(self, values: FloatArray) -> FloatArray:
        """Row k: the largest of the 2^k values from each one on."""
        rows = [values]
        for power in range(self.blocks.bit_length() - 1):
            before = rows[-1]
            ahead = np.append(before[1 << power :], np.zeros(min(1 << power, len(before))))
            rows.append(np.maximum(before, ahead))
        return np.stack(rows)

    def ends_s(self, bandwidth: float | None, *, recompute: bool) -> FloatArray:
        """The compute before each boundary, and the transfer across it (None: no stage follows)."""
        return self._edge(bandwidth, recompute, True)

    def begins_s(self, bandwidth: float | None, *, recompute: bool) -> FloatArray:
        """The compute before each boundary, less the transfer across it: a difference thus adds the transfer."""
        return self._edge(bandwidth, recompute, False)

    def _edge(self, bandwidth: float | None, recompute: bool, ends: bool) -> FloatArray:
        if bandwidth and bandwidth not in self._transfers:
            self._transfers[bandwidth] = self._on_grid(self.boundary_bytes / bandwidth)
        key = (bandwidth, recompute, ends)
        if key not in self._edges:
            sums_s = self.recomputed_s if recompute else self.compute_s
            moved_s = self._transfers[bandwidth] if bandwidth else 0.0
            self._edges[key] = sums_s + moved_s if ends else sums_s - moved_s
        return self._edges[key]

    def _crossing(self, outputs: FloatArray) -> FloatArray:
        crossing = np.append(0.0, outputs[self.row])
        crossing[-1] = 0.0
        return crossing

    def _sums(self, values: FloatArray) -> FloatArray:
        return np.append(0.0, np.cumsum(values))

    def _on_grid(self, seconds: FloatArray) -> FloatArray:
        return np.asarray(np.rint(seconds / self._grid_s) * self._grid_s)

    @cached_property
    def _grid_s(self) -> float:
        longest = max(
            float((self.source.forward_s[self.row] + self.source.backward_s[self.row]).sum()),
            float(self.source.recomputed_s(self.recompute_factor)[self.row].sum()),
        )
        return float(2.0 ** (frexp(longest)[1] - 52))


def no_stage(blocks: int) -> FloatArray:
    """[start, stop] -> infinity where stop <= start, else 0: a view of 2n + 1 numbers."""
    numbers = np.where(np.arange(-blocks, blocks + 1) <= 0, np.inf, 0.0)
    step = numbers.strides[0]
    return np.lib.stride_tricks.as_strided(
        numbers[blocks:], shape=(blocks + 1, blocks + 1), strides=(-step, step), writeable=False
    )
