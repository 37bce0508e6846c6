"""Terms: the closed forms of PipeDream-2BW (2021), appendix A.1, on the links that a placement crosses.

2BW's throughput formula (A.1.1, THROUGHPUT) is in `PipelineTerms.mode_s` and `PipelineShape`, its memory formula
(A.1.2, MEMORY) in `planners.stage_sum`. Docstrings number the steps. All tables are those of `split.Costs`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.costs.collectives import all_reduce, in_turn
from pipeplan.costs.memory import Copies
from pipeplan.documents.plan import RECOMPUTE_UNITS
from pipeplan.planners.chain import ProfileChain
from pipeplan.planners.two_bw.placements import Links
from pipeplan.planners.two_bw.places import Bands, Places, StageTable
from pipeplan.planners.two_bw.split import (
    ROUNDING,
    BandCosts,
    Costs,
    SplitSearch,
    Starts,
    Way,
    every_start,
    is_within,
    starts_within,
)
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.registry import schedule_named


def is_flushed(laws: Schedule) -> bool:
    """Whether a pipelined schedule pays for filling and draining: (m + d - 1) / m."""
    return laws.pipelined and laws.flushes


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """A configuration of 2BW's search: everything but where the stages begin.

    `recompute`: on all stages, on none, or (None) on those that do not fit otherwise.
    """

    schedule: str
    width: int
    depth: int
    microbatch_size: int
    microbatches: int
    recompute: bool | None

    @property
    def devices(self) -> int:
        """The number of devices used."""
        return self.width * self.depth

    @property
    def batch_size(self) -> int:
        """The samples of a batch on all pipelines."""
        return self.width * self.microbatch_size * self.microbatches

    @property
    def modes(self) -> tuple[bool, ...]:
        """Without and with recomputation, as far as a stage may choose."""
        return (False, True) if self.recompute is None else (self.recompute,)

    @property
    def laws(self) -> Schedule:
        """The schedule's laws."""
        return schedule_named(self.schedule)

    @property
    def slots(self) -> float:
        """A microbatch's share of a batch's time, in steps of the slowest stage.

        3. Throughput: a microbatch takes t = the sum over the stages without pipelining, their maximum with it
        (`split`), times these slots. A flush, which the appendix leaves out, adds filling and draining.
        """
        if is_flushed(self.laws):
            return (self.microbatches + self.depth - 1) / self.microbatches
        return 1.0

    @property
    def bubble_fraction(self) -> float:
        """The share of idle time among equal stages."""
        if not self.laws.pipelined:
            return (self.depth - 1) / self.depth
        return (self.depth - 1) / (self.microbatches + self.depth - 1) if is_flushed(self.laws) else 0.0

    def throughput_samples_per_s(self, time_per_microbatch_s: float) -> float:
        """4. Throughput: the whole job's w b / t; the paper's b / t is that of one of the `width` pipelines."""
        return self.width * self.microbatch_size / time_per_microbatch_s


@dataclass(frozen=True, eq=False)
class MemoryCounts:
    """The copies held on every stage of a pipeline in one mode; `unit` is that of recomputation, if it recomputes."""

    copies: tuple[Copies, ...]
    unit: str = RECOMPUTE_UNITS[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StackedSums:
    """`StageSum` with a row for each stage of a pipeline."""

    until: FloatArray
    before: FloatArray
    largest: tuple[tuple[FloatArray, Callable[[IntArray, IntArray], FloatArray]], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineTerms:
    """A shape's stages on the links of one orientation, by the accounting of memory that was asked for.

    `counts` has the copies held without and with recomputation, for the shape's modes: by every unit of recomputation,
    the preferred first.
    """

    shape: PipelineShape
    links: Links
    chain: ProfileChain
    counts: dict[bool, tuple[MemoryCounts, ...]]
    device_bytes: int
    _stacks: dict[MemoryCounts, _StackedSums] = field(default_factory=dict)

    def mode_s(self, recompute: bool, at: Places) -> FloatArray:
        """A stage's time a microbatch, with or without recomputation.

        1. Throughput: max(c T_comp + sum T_comm, T_exchange / m), where m = B / (w b) is a batch's microbatches.
        """
        busy_s = self._busy_s(recompute, at)
        if self.shape.width == 1:
            return busy_s
        weights = self.chain.weight_bytes
        exchanged_s = at.of_stages(self._exchange)[..., None] * at.between(at.starts(weights), at.stops(weights))
        return np.asarray(np.maximum(busy_s, exchanged_s))

    def mode_bytes(self, recompute: bool, at: Places) -> FloatArray:
        """A worker's bytes of a stage, with or without recomputation, by the unit that holds least."""
        held = [self.unit_bytes(counts, at) for counts in self.counts[recompute]]
        return held[0] if len(held) == 1 else np.minimum.reduce(held)

    def mode_fits(self, recompute: bool, at: Places) -> BoolArray:
        """Whether a stage fits, with or without recomputation. Where all fit by one unit, no other is tested."""
        fits = at.none
        for counts in self.counts[recompute]:
            fits |= self.unit_bytes(counts, at) <= self.device_bytes
            if fits.all():
                break
        return fits

    def unit_bytes(self, counts: MemoryCounts, at: Places) -> FloatArray:
        """A worker's bytes of a stage in one mode: `planners.stage_sum`."""
        stacked, stages = self._stacked(counts), np.arange(self.shape.depth)
        held = at.between(at.starts(stacked.before, stages), at.stops(stacked.until, stages))
        for copies, of_stages in stacked.largest:
            held += at.of_stages(copies)[..., None] * of_stages(*at.ranges)
        return held

    def time_s(self, stage: int, starts: slice, stops: slice) -> FloatArray:
        """A stage's time a microbatch: the shorter of its modes that fit; infinite where none does."""
        return self._stages_only(self._fitting_s(StageTable(stage, starts, stops)), starts, stops)

    def _fitting_s(self, at: Places) -> FloatArray:
        times_s = [np.where(self.mode_fits(mode, at), self.mode_s(mode, at), np.inf) for mode in self.shape.modes]
        return np.minimum(times_s[0], times_s[-1])

    def memory_bytes(self, stage: int, starts: slice, stops: slice) -> FloatArray:
        """A worker's bytes of a stage, in the mode that holds least."""
        return self._stages_only(self._least_held(StageTable(stage, starts, stops)), starts, stops)

    def _least_held(self, at: Places) -> FloatArray:
        held = [self.mode_bytes(mode, at) for mode in self.shape.modes]
        return np.minimum(held[0], held[-1])

    def squares(self, stage: int, starts: slice, stops: slice) -> FloatArray:
        """The square of a stage's compute without transfers and recomputation."""
        return np.square(self.chain.compute_s[stops] - self.chain.compute_s[starts][:, None])

    def within(self, starts: Starts, floor_s: float) -> Costs:
        """`time_s` among these starts, without the terms that cannot matter there.

        Memory is left out where the largest stage of a place fits, a gradient exchange where it is below the floor.
        """
        fits, silent = self._left_out(starts, floor_s)

        def cost(stage: int, starts: slice, stops: slice) -> FloatArray:
            if not fits[stage]:
                return self.time_s(stage, starts, stops)
            of_stage = self._busy_s if silent[stage] else self.mode_s
            return self._stages_only(of_stage(self.shape.modes[0], StageTable(stage, starts, stops)), starts, stops)

        return cost

    def bands_within(self, starts: Starts, floor_s: float) -> BandCosts:
        """The same for bands."""
        fits, silent = self._left_out(starts, floor_s)

        def cost(at: Bands) -> FloatArray:
            if not all(fits[at.stages]):
                return self._fitting_s(at)
            of_stages = self._busy_s if all(silent[at.stages]) else self.mode_s
            return of_stages(self.shape.modes[0], at)

        return cost

    def _left_out(self, starts: Starts, floor_s: float) -> tuple[list[bool], list[bool]]:
        """By stage, whether memory, and whether the exchange, cannot matter among these starts."""
        lows = np.asarray([may.start for may in starts[:-1]])
        highs = np.asarray([may.stop - 1 for may in starts[1:]])
        exchanged_s = self._exchange * (self.chain.weight_bytes[highs] - self.chain.weight_bytes[lows])
        return self._always_fits(lows, highs), (exchanged_s <= floor_s * (1 - ROUNDING)).tolist()

    def fitting_starts(self) -> Starts | None:
        """The possible starts of the stages of splits that fit; None if none fits."""
        every, depth = self.every_start, self.shape.depth
        if all(self._always_fits(np.zeros(depth, dtype=np.int64), np.full(depth, self.chain.blocks))):
            return every
        return starts_within(self._memory_limits, self.device_bytes, every)

    def fastest(self, starts: Starts, about_s: float) -> SplitSearch:
        """The search for the fastest split among those that fit."""
        return SplitSearch(bands=self.bands_within, limits=self._limits, starts=starts, about=about_s)

    def possible(self, limit_s: float) -> bool:
        """Whether stages could stay within the limit without transfers: the same for every width and orientation."""
        return is_within(self._limits_of_compute, limit_s, self.every_start)

    def smallest(self) -> SplitSearch:
        """The search for the split that minimises the fullest stage's bytes."""
        return SplitSearch(
            bands=lambda *_: self._least_held,
            limits=self._memory_limits,
            starts=self.every_start,
            about=self.least_bytes(),
        )

    @property
    def every_start(self) -> Starts:
        """All starts that leave a block for every stage."""
        return every_start(self.chain.blocks, self.shape.depth)

    def least_bytes(self) -> float:
        """A lower bound on the fullest stage's bytes, over all splits: an equal share of what all hold at least."""
        chain, every = self.chain, (counts for mode in self.shape.modes for counts in self.counts[mode])
        weights = min(copies.weights for counts in every for copies in counts.copies)
        least = chain.least_kept + float(weights * chain.weight_bytes[-1] + chain.untrained_bytes[-1])
        return least / self.shape.depth

    def places(self, stops: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
        """Every stage with its start and stop."""
        return zip(range(len(stops)), (0, *stops[:-1]), stops, strict=True)

    def slices(self, stops: tuple[int, ...]) -> Iterator[tuple[int, slice, slice]]:
        """The same as slices, the tables' arguments."""
        return ((stage, slice(start, start + 1), slice(stop, stop + 1)) for stage, start, stop in self.places(stops))

    def _busy_s(self, recompute: bool, at: Places) -> FloatArray:
        """c T_comp + sum T_comm: T_comp sums forward and backward of the stage's blocks. With recomputation c is
        `Options.recompute_factor`, for instance the paper's 4/3; by default the forward counts twice.
        2. T_comm = 2 |A| / bandwidth_depth(d) on each of the stage's edges (`placements`): activations and gradients.
        """
        begins, ends = self._edges_s[recompute]
        before, after = self._links_of_stages
        return at.between(at.starts(begins, before), at.stops(ends, after))

    @cached_property
    def _edges_s(self) -> dict[bool, tuple[FloatArray, FloatArray]]:
        """By mode, for no link and for each different one: compute less the transfers before, and with those after."""
        links = [None, *np.unique(self.links.edges).tolist()]
        return {
            mode: (
                np.stack([self.chain.begins_s(link, recompute=mode) for link in links]),
                np.stack([self.chain.ends_s(link, recompute=mode) for link in links]),
            )
            for mode in self.shape.modes
        }

    @cached_property
    def _links_of_stages(self) -> tuple[IntArray, IntArray]:
        """The links before and after every stage, as numbers of those that differ; 0 for none."""
        numbers = np.unique(self.links.edges, return_inverse=True)[1] + 1
        return np.append(0, numbers), np.append(numbers, 0)

    @cached_property
    def _exchange(self) -> FloatArray:
        """T_exchange / m a byte of weights, on every stage: the all-reduce at bandwidth_width(w) (`placements`)."""
        exchange = in_turn if self.shape.laws.update == "replica" else all_reduce
        share = float(exchange(np.asarray(float(self.shape.width))))
        return share / self.links.groups / self.shape.microbatches

    def _stages_only(self, table: FloatArray, starts: slice, stops: slice) -> FloatArray:
        return table + self.chain.no_stage[starts, stops] if stops.start < starts.stop else table

    def _always_fits(self, lows: IntArray, highs: IntArray) -> list[bool]:
        """Whether each stage fits with all blocks [low, high) in its first mode, where no other mode is faster.

        Only the preferred unit is tested; if all stages need another, `time_s` finds them.
        """
        stacked, stages = self._stacked(self.counts[self.shape.modes[0]][0]), np.arange(self.shape.depth)
        until = np.maximum.accumulate(stacked.until, axis=1)[stages, highs]
        before = np.minimum.accumulate(stacked.before[:, ::-1], axis=1)[:, ::-1][stages, lows]
        most = until - before
        for copies, of_stages in stacked.largest:
            most += copies * of_stages(lows, highs)
        return [bool(fits) for fits in most * (1 + ROUNDING) <= self.device_bytes]

    def _stacked(self, counts: MemoryCounts) -> _StackedSums:
        """The sums of every stage, in one mode."""
        if counts not in self._stacks:
            sums = [self.chain.stage_sum(copies) for copies in counts.copies]
            every = zip(*(each.largest for each in sums), strict=True)
            self._stacks[counts] = _StackedSums(
                until=np.stack([each.until for each in sums]),
                before=np.stack([each.before for each in sums]),
                largest=tuple((np.asarray([one.copies for one in of]), of[0].of_stages) for of in every),
            )
        return self._stacks[counts]

    def _limits(self, limit_s: float) -> list[tuple[Way, ...]]:
        """Compute within the limit less the least transfers, and memory within the device less the least messages."""
        most_s = [(limit_s - transfers_s) * (1 + ROUNDING) for transfers_s in self._transfers_s]
        return self._limits_of(most_s)

    def _limits_of_compute(self, limit_s: float) -> list[tuple[Way, ...]]:
        return self._limits_of([limit_s * (1 + ROUNDING)] * self.shape.depth)

    def _limits_of(self, most_s: list[float]) -> list[tuple[Way, ...]]:
        modes = []
        for (mode, _, _), rooms in zip(self._held_least, self._device_rooms, strict=True):
            sums_s = self.chain.listed_s(recompute=mode)
            modes.append([((sums_s, most), room) for most, room in zip(most_s, rooms, strict=True)])
        return list(zip(*modes, strict=True))

    def _memory_limits(self, limit_bytes: float) -> list[tuple[Way, ...]]:
        return list(zip(*([(room,) for room in rooms] for rooms in self._rooms(limit_bytes)), strict=True))

    @cached_property
    def _device_rooms(self) -> list[list[tuple[Sequence[float], float]]]:
        return self._rooms(self.device_bytes)

    def _rooms(self, limit_bytes: float) -> list[list[tuple[Sequence[float], float]]]:
        """By mode and unit, and by stage: lower bounds on its bytes, and its capacity."""
        most_bytes = limit_bytes * (1 + ROUNDING)
        return [
            [(held, most_bytes - message) for held, message in zip(sums, messages, strict=True)]
            for _, sums, messages in self._held_least
        ]

    @cached_property
    def _held_least(self) -> list[tuple[bool, list[list[float]], list[float]]]:
        """By mode and unit, for every stage: lower bounds on its bytes of the blocks [0, i), and on all others."""
        held_least = []
        for mode, counts in ((again, counts) for again in self.shape.modes for counts in self.counts[again]):
            sums = [self.chain.stage_sum(copies) for copies in counts.copies]
            besides = [each.least_besides(is_first=stage == 0) for stage, each in enumerate(sums)]
            held_least.append((mode, [each.listed for each in sums], besides))
        return held_least

    @cached_property
    def _transfers_s(self) -> list[float]:
        """The least seconds of each stage's edges."""
        if self.chain.blocks == 1:
            return [0.0]
        edges_s = np.pad(self.chain.boundary_bytes[1:-1].min() / self.links.edges, 1)
        return [float(seconds) for seconds in edges_s[:-1] + edges_s[1:]]
