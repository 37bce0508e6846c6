"""Release: PipeDream's recurrence as the authors' published program computes it, which is not what their papers say.

The steps beside the code are those of the papers (2018, section 3.2; SOSP 2019, section 3.1; `space` numbers them),
level by level from the inside out. c is the cost of the level inside; on the innermost it is the blocks' compute.

The program differs from the papers: it adds compute and synchronisation and does not take the larger; the width of the
level inside divides the exchange of a first stage only; a boundary costs nothing unless a compression ratio is given,
and then it is divided by the replicas of the last stage, and counts after the last block of a part inside a server too.
By default, the program ignores memory.

We follow the program's table and its order: from the front, the first of equals. O(n^2 M^2) on the outermost level,
another factor n on those inside.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import count
from operator import or_

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray
from pipeplan.costs.graph import closures, graph_of, members
from pipeplan.documents.profile import Profile
from pipeplan.planners.pipedream.parts import LevelPart, LevelShare, Partition, Proof, placement_of
from pipeplan.planners.pipedream.probe import Stages
from pipeplan.planners.pipedream.space import ROUNDING, LevelLinks
from pipeplan.planners.pipedream.states import CutStates, States

FACTOR = 4.0
"""The program knows only the parameter server."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Released:
    """One level: the costs of the level inside by first and last state, and the machines of that level."""

    states: States
    links: LevelLinks
    inside_s: FloatArray
    inside_units: int
    ratio: float | None
    straight: bool
    fewer: bool

    def exchange_s(self, units: int) -> FloatArray:
        """The exchange of each stage for an update."""
        # step 1: W = 4 (m - 1) |w| / (B m)
        weight_bytes = self.states.weight_bytes - self.states.weight_bytes[:, None]
        return np.asarray(FACTOR * (units - 1) / (self.links.bandwidth_bytes_per_s * units) * weight_bytes)

    def single_s(self, units: int) -> FloatArray:
        """The cost of a single stage on `units` machines."""
        # step 2, the first stage of a level: T = (c + W / machines of the level inside) / m
        if self.straight and units > 1:
            return np.full_like(self.inside_s, np.inf)
        return (self.inside_s + self.exchange_s(units) / self.inside_units) / units

    def last_s(self, units: int) -> FloatArray:
        """The cost of the last of several stages, with the boundaries that it sees."""
        # step 2, a later stage: T = (c + W) / m
        stage_s = (self.inside_s + self.exchange_s(units)) / units
        if self.ratio is None:
            return stage_s
        # step 4: boundaries of 2 a / (B m' ratio) into and out of the stage
        crossing = 2.0 * self.states.boundary_bytes / (self.links.bandwidth_bytes_per_s * units * self.ratio)
        crossing[-1] = 0.0
        return np.maximum(stage_s, np.maximum(crossing[:, None], crossing))

    def table(self, starts: slice) -> list[FloatArray]:
        """The least cost from each of these states to every state, by machines less one."""
        tables: list[FloatArray] = []
        for units in range(1, self.links.units + 1):
            # step 3, a single stage: A = T of a first stage
            best = self.single_s(units)[starts]
            if self.fewer and tables:
                best = np.minimum(best, tables[-1])
            # step 4, several: A = min over s, m' of max(A(s, m - m'), T of m', boundaries); the last begins at s
            for last in range(1, min(2, units) if self.straight else units):
                before, last_s = tables[units - last - 1], self.last_s(last)
                if len(before) == 1:
                    joined = np.maximum(before[0, :, None], last_s).min(axis=0)[None]
                else:
                    joined = np.full_like(before, np.inf)
                    for cut in range(1, before.shape[1] - 1):
                        np.minimum(joined, np.maximum(before[:, cut, None], last_s[cut]), out=joined)
                best = np.minimum(best, joined)
            tables.append(best)
        return tables


def released_cuts(profile: Profile, cuts: CutStates) -> CutStates:
    """The cuts that the program enumerates, from the first block along edges.

    So the first block is before every cut, and another source (an embedding of the decoder's) only together with one of
    its readers.
    """
    if cuts.cuts is None or profile.edges is None:
        return cuts
    readers = [0] * len(profile.blocks)
    reading = 0
    for source, reader in profile.edges:
        readers[source] |= 1 << reader
        reading |= 1 << reader
    others = [block for block in range(1, len(readers)) if not reading >> block & 1]
    known = [
        index
        for index, cut in enumerate(cuts.cuts)
        if index in (0, len(cuts.cuts) - 1)
        or (cut & 1 and all(not cut >> block & 1 or cut & readers[block] for block in others))
    ]
    return cuts.some(known)


def released_boundaries(profile: Profile, cuts: CutStates, output_bytes: Sequence[float]) -> CutStates:
    """The cuts with the bytes that cross them in the program: of the last blocks, and of their other inputs.

    These are upper bounds on a later stage's inputs: the program also counts a block whose other reader lies before the
    cut on another branch.
    """
    if cuts.cuts is None or profile.edges is None:
        return cuts
    graph = graph_of(len(profile.blocks), profile.edges)
    pasts, _ = closures(graph)
    readers = [sum(1 << reader for reader in graph.read_by[block]) for block in range(len(graph))]
    beside = [
        sum(1 << block for block in members(past) if block != last and readers[block] & ~past)
        for last, past in enumerate(pasts)
    ]
    boundary_bytes = []
    for cut in cuts.cuts:
        last = [block for block in members(cut) if not readers[block] & cut]
        crossing = reduce(or_, (1 << block | beside[block] for block in last), 0)
        boundary_bytes.append(float(sum(output_bytes[block] for block in members(crossing))))
    return replace(cuts, states=replace(cuts.states, boundary_bytes=np.asarray(boundary_bytes)))


def stages_of(states: States) -> BoolArray:
    """Where a stage may lie."""
    if states.before is not None:
        return states.before
    return np.triu(np.ones((len(states),) * 2, dtype=bool), k=1)


class ReleasedProgram:
    """The program's tables of all levels, inside out."""

    def __init__(
        self, states: States, levels: Sequence[LevelLinks], *, ratio: float | None, straight: bool, fewer: bool
    ) -> None:
        self.states = states
        compute_s = states.compute_s - states.compute_s[:, None]
        inside_s, inside_units = np.where(stages_of(states), compute_s, np.inf), 1
        self.levels: list[Released] = []
        self.tables: list[list[FloatArray]] = []
        for links in levels:
            level = Released(
                states=states,
                links=links,
                inside_s=inside_s,
                inside_units=inside_units,
                ratio=ratio,
                straight=straight,
                fewer=fewer,
            )
            outermost = len(self.levels) == len(levels) - 1
            tables = level.table(slice(0, 1) if outermost else slice(None))
            self.levels.append(level)
            self.tables.append(tables)
            inside_s, inside_units = tables[-1], links.units

    @property
    def cost_s(self) -> float:
        """The bottleneck that the program prints; infinite where there is no such pipeline."""
        return float(self.tables[-1][-1][0, -1])

    def stages(self, level: int, start: int, stop: int) -> Stages:
        """The stages of a level between two states, read off from the end."""
        tables, here = self.tables[level], self.levels[level]
        row = 0 if level == len(self.levels) - 1 else start
        units, stages = len(tables), []
        while True:
            cost = tables[units - 1][row, stop]
            if here.fewer:
                while units > 1 and tables[units - 2][row, stop] <= cost:
                    units -= 1
            if here.single_s(units)[start, stop] <= cost * (1 + ROUNDING):
                stages.append((start, stop, units))
                return tuple(reversed(stages))

            # the last stage on the remaining units: the smallest cut, then the fewest machines
            cost = tables[units - 1][row, stop]
            choices = []
            for last in range(1, min(2, units) if here.straight else units):
                joined = np.maximum(tables[units - last - 1][row], here.last_s(last)[:, stop])
                choices += [(int(cut), last) for cut in np.flatnonzero(joined <= cost * (1 + ROUNDING))[:1]]
            cut, last = min(choices)
            stages.append((cut, stop, last))
            stop, units = cut, units - last

    def partition(self) -> Partition | None:
        """The partition that the program prints, flattened: a stage on m servers with r replicas in each has m r."""
        if not np.isfinite(self.cost_s):
            return None
        parts = self._parts(len(self.levels) - 1, 0, len(self.states) - 1)
        return Partition(
            shares=tuple(self._shares(len(self.levels) - 1, parts)),
            cost_s=self.cost_s,
            placement=tuple(placement_of(parts, count())),
            proof=Proof(method="recurrence", bound_s=self.cost_s),
            parts=parts,
        )

    def _parts(self, level: int, start: int, stop: int) -> tuple[LevelPart, ...]:
        return tuple(
            LevelPart(start=a, stop=b, units=m, inside=self._parts(level - 1, a, b) if level > 0 else ())
            for a, b, m in self.stages(level, start, stop)
        )

    def _shares(self, level: int, parts: Sequence[LevelPart]) -> Iterator[LevelShare]:
        """The stages with their times a minibatch, which add up over the levels."""
        for index, part in enumerate(parts):
            exchange_s = float(self.levels[level].exchange_s(part.units)[part.start, part.stop])
            if index == 0:
                exchange_s /= self.levels[level].inside_units
            compute_s = float(self.states.compute_s[part.stop] - self.states.compute_s[part.start])
            alone = LevelShare(start=part.start, stop=part.stop, replicas=1, time_s=compute_s)
            for share in self._shares(level - 1, part.inside) if part.inside else [alone]:
                time_s = (share.time_s + exchange_s) / part.units
                yield replace(share, replicas=share.replicas * part.units, time_s=time_s)
