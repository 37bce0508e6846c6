"""States: a model's possible cuts, with sums over the blocks before each.

A chain of n blocks has n + 1 states, one before every block and one after the last. A model that is a graph has one
for every set of blocks that is closed under its inputs: the blocks that are done where a stage ends. PipeDream's
optimizer has the same states as antichains (SOSP 2019). A stage lies between two states, and its sums are differences.
`CutStates` also has the order of the blocks in which each stage is contiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import frexp
from typing import Any

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.costs.graph import (
    Graph,
    Line,
    crossing_by_cut,
    crossing_bytes,
    graph_of,
    ideals,
    line_of,
    loaded_bytes,
    members,
    membership,
)
from pipeplan.costs.memory import kept_sums, replacing_bytes
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.profile import Profile
from pipeplan.planners.pipedream.budget import BUDGET
from pipeplan.planners.stage_sum import LargestBlock, StageQuantities

_COMPARED_AT_ONCE = 2**20
"""Pairs of sets: 8 MB."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class States:
    """One entry a state, in topological order: state 0 has no block before it, the last one all blocks."""

    compute_s: FloatArray
    """Forward and backward of a minibatch, over all blocks before the state."""

    weight_bytes: FloatArray
    """Of trained weights, over all blocks before the state."""

    added_bytes: FloatArray
    """Over all blocks before the state: a stage's kept bytes of a minibatch are this at its stop less `kept_before` at
    its start (`costs.memory.kept_sums`).
    """

    kept_before: FloatArray
    """See `added_bytes`."""

    boundary_bytes: FloatArray
    """The bytes that cross the state in one direction; 0 at both ends."""

    input_bytes: FloatArray
    """The input that a stage beginning at the state keeps."""

    kept_output_bytes: FloatArray | None = None
    """The part of `boundary_bytes` among the stage's activations (`Measurement.kept_output_bytes`); None if none."""

    late_bytes: FloatArray | None = None
    """The gradients' bytes beyond activations (`costs.memory.replacing_bytes`), over all blocks before the state; None
    if none are counted.
    """

    untrained_bytes: FloatArray | None = None
    """The bytes of frozen weights and buffers, over all blocks before the state; None if none."""

    before: BoolArray | None = None
    """before[a, b]: a stage may reach from a to b; None for a chain, where any a < b is allowed."""

    transient_bytes: FloatArray | None = None
    """transient_bytes[a, b]: the largest workspace of a block between the two; None if all are 0."""

    def __len__(self) -> int:
        return len(self.compute_s)

    @property
    def quantities(self) -> StageQuantities:
        """What a stage between two states holds copies of, without its messages."""
        nothing = np.zeros(len(self))
        late_bytes, workspaces = self.late_bytes, self.transient_bytes
        return StageQuantities(
            weights=self.weight_bytes,
            untrained=nothing if self.untrained_bytes is None else self.untrained_bytes,
            late=lambda gradients: late_bytes if gradients and late_bytes is not None else nothing,
            kept=(self.added_bytes, self.kept_before),
            inputs=self.input_bytes,
            outputs=nothing,
            kept_outputs=nothing,
            workspaces=None if workspaces is None else LargestBlock(lambda start, stop: workspaces[start, stop], 0.0),
        )

    def some(self, index: IntArray) -> "States":
        """Some of the states, or all in another order."""
        chosen: dict[str, Any] = {}
        for each in fields(self):
            array = getattr(self, each.name)
            if array is not None:
                chosen[each.name] = array[index if array.ndim == 1 else np.ix_(index, index)]
        return States(**chosen)


def chain_states(profile: Profile, microbatch_size: int, *, gradients: int = 1) -> States:
    """The states of a chain: one before every block and one after the last.

    `gradients`: the bytes of a set of gradients, in copies of the weights.
    """
    blocks = profile.at(microbatch_size)
    outputs = [block.output_bytes for block in blocks]
    activations = np.asarray([block.activation_bytes for block in blocks], dtype=np.float64)
    shared = np.asarray([block.shared_bytes or 0 for block in blocks], dtype=np.float64)
    added_bytes, kept_before = kept_sums(activations, shared)
    weights = np.asarray([block.trained_bytes for block in profile.blocks], dtype=np.float64)
    return States(
        compute_s=_sums([block.compute_s for block in blocks]),
        weight_bytes=_sums(weights),
        late_bytes=_sums(replacing_bytes(gradients, weights, np.diff(added_bytes))),
        untrained_bytes=_sums([block.untrained_bytes for block in profile.blocks]),
        added_bytes=added_bytes,
        kept_before=kept_before,
        boundary_bytes=np.asarray([0, *outputs[:-1], 0], dtype=np.float64),
        kept_output_bytes=np.asarray([0, *(block.kept_output_bytes for block in blocks[:-1]), 0], dtype=np.float64),
        input_bytes=np.asarray([*(block.input_bytes for block in blocks), 0], dtype=np.float64),
        transient_bytes=_largest_workspaces([block.workspace_bytes for block in blocks], np.arange(len(blocks) + 1)),
    )


def _largest_workspaces(workspaces: Sequence[int], places: IntArray) -> FloatArray | None:
    """The largest workspace between each two places of an order; None if there are none."""
    if not any(workspaces):
        return None
    table = np.zeros((len(places),) * 2)
    for index, start in enumerate(places.tolist()):
        largest = np.maximum.accumulate(np.asarray([0, *workspaces[start:]]))
        table[index, index:] = largest[places[index:] - start]
    return table


def _sums(values: Sequence[float] | FloatArray) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))


@dataclass(frozen=True, kw_only=True, eq=False)
class CutStates:
    """The states of a profile, with the blocks before each.

    `blocks_before` counts the blocks before each state. `complete`: no cut of the requested kind is missing. If the
    states are places in one `order`, `cuts` is None; else it has the set of blocks before each (`costs.graph`).
    """

    states: States
    blocks_before: IntArray
    order: tuple[int, ...]
    cuts: tuple[int, ...] | None = None
    complete: bool = True

    def order_of(self, path: Sequence[int]) -> tuple[int, ...]:
        """An order of the profile's blocks in which those between two states of a path are contiguous.

        Between two states they keep the profile's order; the answer is the identity where possible.
        """
        order: list[int] = []
        for start, stop in pairwise(path):
            if self.cuts is not None:
                order += sorted(members(self.cuts[stop] & ~self.cuts[start]))
            else:
                order += sorted(self.order[int(self.blocks_before[start]) : int(self.blocks_before[stop])])
        return tuple(order)

    def cut(self, state: int) -> int:
        """The set of blocks before a state."""
        if self.cuts is not None:
            return self.cuts[state]
        return sum(1 << block for block in self.order[: int(self.blocks_before[state])])

    def some(self, kept: Sequence[int]) -> "CutStates":
        """Some of the states, ascending, the first and the last among them."""
        index = np.asarray(kept)
        states, before = self.states.some(index), self.blocks_before[index]
        cuts = None if self.cuts is None else tuple(self.cuts[state] for state in kept)
        return replace(self, states=states, blocks_before=before, cuts=cuts, complete=False)


def cut_states(
    profile: Profile,
    microbatch_size: int,
    *,
    cuts: str | None = None,
    at_most: int = BUDGET.listed_cuts,
    gradients: int = 1,
) -> CutStates:
    """The states of a chain, or of a graph.

    A graph has one for every set of blocks that is closed under its inputs, with one exception: a block without costs
    (no time, no bytes) that reads only such blocks joins its first reader, as any earlier place is equivalent. A cut is
    crossed by the output of every block before it that a block after it reads; a stage in between forwards what it does
    not read itself (SOSP 2019; the antichains of PipeDream's optimizer are these sets). `cuts="single-tensor"` keeps
    the cuts that only one output crosses. If a graph has more than `at_most` cuts, the answer is the places of one
    order (`graph.line_of`): incomplete unless the graph is a path. `gradients` is as for a chain.
    """
    if profile.edges is None:
        states = chain_states(profile, microbatch_size, gradients=gradients)
        blocks = len(profile.blocks)
        return CutStates(states=states, blocks_before=np.arange(blocks + 1), order=tuple(range(blocks)))
    measured = profile.at(microbatch_size)
    graph = graph_of(len(measured), profile.edges)
    sums = summed(profile, measured, gradients)
    line = line_of(graph, [block.output_bytes for block in measured])
    every_place = range(len(graph) + 1)
    if cuts == "single-tensor":
        return _line_states(sums, graph, measured, line, line.single_tensor)
    if all(source in graph.reads[reader] for source, reader in pairwise(line.order)):
        return _line_states(sums, graph, measured, line, every_place)
    workspaces = len({block.workspace_bytes for block in measured} - {0})
    at_most = min(at_most, int((BUDGET.workspace_entries / max(workspaces, 1)) ** 0.5))
    listed = ideals(graph, at_most, late=_costing_nothing(profile, graph, measured))
    if listed is not None:
        return states_of(sums, graph, measured, listed)
    some = evenly(every_place, BUDGET.listed_cuts) if workspaces else every_place
    return replace(_line_states(sums, graph, measured, line, some), complete=False)


def along(
    profile: Profile, microbatch_size: int, order: Sequence[int], *, cuts: str | None = None, gradients: int = 1
) -> CutStates:
    """The states of a chain, or the places of an order of a graph's blocks; the options are those of `cut_states`."""
    if profile.edges is None:
        return cut_states(profile, microbatch_size, gradients=gradients)
    measured = profile.at(microbatch_size)
    graph = graph_of(len(measured), profile.edges)
    places: Sequence[int] = range(len(graph) + 1)
    if cuts == "single-tensor":
        known = line_of(graph, [block.output_bytes for block in measured])
        places = [place for place in known.single_tensor if set(order[:place]) == set(known.order[:place])]
    line = Line(order=tuple(order), single_tensor=())
    return _line_states(summed(profile, measured, gradients), graph, measured, line, places)


def evenly(values: Sequence[int], count: int) -> Sequence[int]:
    """`count` evenly spaced values, the first and the last among them."""
    if len(values) <= count:
        return values
    return [values[index] for index in np.linspace(0, len(values) - 1, count).astype(int).tolist()]


def _line_states(
    by_block: Sequence[FloatArray], graph: Graph, measured: Sequence[Measurement], line: Line, chosen: Sequence[int]
) -> CutStates:
    """The states at these places of an order. `by_block` has the terms to sum (`summed`)."""
    order, places = np.asarray(line.order), np.asarray(chosen)
    sums = [np.concatenate(([0.0], np.cumsum(values[order])))[places] for values in by_block]
    boundary = crossing_bytes(graph, line.order, [block.output_bytes for block in measured])[places]

    return CutStates(
        states=States(
            compute_s=sums[0],
            weight_bytes=sums[1],
            added_bytes=sums[2],
            kept_before=sums[2],
            late_bytes=sums[3],
            untrained_bytes=sums[4],
            boundary_bytes=boundary,
            input_bytes=_inputs(graph, measured, boundary),
            transient_bytes=_largest_workspaces([measured[block].workspace_bytes for block in line.order], places),
        ),
        blocks_before=places,
        order=line.order,
    )


def states_of(
    by_block: Sequence[FloatArray],
    graph: Graph,
    measured: Sequence[Measurement],
    cuts: Sequence[int],
    *,
    complete: bool = True,
) -> CutStates:
    """The states of these cuts, which are sorted by size and include the empty and the full one.

    `by_block` has the terms to sum (`summed`).
    """
    inside = membership(cuts, len(graph))
    sums = [inside @ values for values in by_block]
    boundary = crossing_by_cut(graph, inside, np.asarray([block.output_bytes for block in measured], dtype=np.float64))

    # [a, b]: the largest workspace of a block in b and not in a
    workspaces = [block.workspace_bytes for block in measured]
    transient_bytes = np.zeros((len(inside),) * 2) if any(workspaces) else None
    if transient_bytes is not None:
        for size in sorted(set(workspaces) - {0}):
            columns = inside[:, [block for block, own in enumerate(workspaces) if own == size]]
            transient_bytes[columns @ columns.T < columns.sum(axis=1)] = size
    return CutStates(
        states=States(
            compute_s=sums[0],
            weight_bytes=sums[1],
            added_bytes=sums[2],
            kept_before=sums[2],
            late_bytes=sums[3],
            untrained_bytes=sums[4],
            boundary_bytes=boundary,
            input_bytes=_inputs(graph, measured, boundary),
            before=_within_others(inside),
            transient_bytes=transient_bytes,
        ),
        blocks_before=np.asarray(inside.sum(axis=1), dtype=np.int64),
        order=tuple(range(len(graph))),
        cuts=tuple(cuts),
        complete=complete,
    )


def _within_others(inside: FloatArray) -> BoolArray:
    """[a, b]: set a is a proper subset of set b.

    The sets are compared 64 blocks at a time. A product of matrices takes several times as long, on several threads.
    """
    packed = np.packbits(inside > 0, axis=1)
    words = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8))).view(np.uint64)
    within = np.ones((len(inside), len(inside)), dtype=bool)
    at_once = max(_COMPARED_AT_ONCE // len(inside), 1)
    for first in range(0, len(inside), at_once):
        rows = slice(first, first + at_once)
        for word in words.T:
            within[rows] &= word[rows, None] & ~word == 0
    np.fill_diagonal(within, False)
    return within


def summed(profile: Profile, measured: Sequence[Measurement], gradients: int) -> tuple[FloatArray, ...]:
    """By block, the terms that a stage adds up: seconds, trained weights, activations, gradients beyond these, and
    frozen weights with buffers.
    """
    weights = np.asarray([block.trained_bytes for block in profile.blocks], dtype=np.float64)
    activations = np.asarray([block.activation_bytes for block in measured], dtype=np.float64)
    return (
        exactly_summed(np.asarray([block.compute_s for block in measured], dtype=np.float64)),
        weights,
        activations,
        replacing_bytes(gradients, weights, activations),
        np.asarray([block.untrained_bytes for block in profile.blocks], dtype=np.float64),
    )


def exactly_summed(seconds: FloatArray) -> FloatArray:
    """The seconds, rounded to a grid on which sums are equal in any order."""
    unit_s = grid_s(float(seconds.sum()))
    return np.asarray(np.rint(seconds / unit_s) * unit_s)


def grid_s(total_s: float) -> float:
    """2^-51 of the whole, a power of two: a double holds every sum of multiples of it."""
    return float(2.0 ** (frexp(total_s)[1] - 51))


def _inputs(graph: Graph, measured: Sequence[Measurement], boundary: FloatArray) -> FloatArray:
    """The input bytes that a stage keeps, by first state: the boundary's, or those of the data loader."""
    inputs = boundary.copy()
    inputs[0] = loaded_bytes(graph, measured)
    return inputs


def _costing_nothing(profile: Profile, graph: Graph, measured: Sequence[Measurement]) -> frozenset[int]:
    """Blocks that take no time and no bytes, and read only such blocks."""
    free: set[int] = set()
    for block, (own, reads) in enumerate(zip(measured, graph.reads, strict=True)):
        weights = profile.blocks[block].weight_bytes + profile.blocks[block].buffer_bytes
        held = weights + own.activation_bytes + own.output_bytes + own.workspace_bytes
        if own.compute_s == 0 and held == 0 and free.issuperset(reads):
            free.add(block)
    return frozenset(free)
