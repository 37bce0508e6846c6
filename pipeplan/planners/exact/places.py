"""Places: the devices of stages, the bandwidths that follow, and the lattice of all ways to give devices to stages.

All replicas of a stage run on devices of one type; which stage gets which type is free. The stages of a type take its
devices in order, one stage after the other. Where all devices are of one type and all stages are equally wide, the
other orientation of PipeDream-2BW, pipelines in a row, is possible as well.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.costs.transfer import Bandwidths
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import Worker
from pipeplan.planners.exact.paths import END, StageStep
from pipeplan.planners.exact.tables import StageKind, StageShape
from pipeplan.planners.two_bw.placements import orientations
from pipeplan.programs.program import stages_in_a_row


@dataclass(frozen=True, slots=True)
class Placed:
    """Stages on devices: their kinds, and the device of every rank."""

    kinds: tuple[StageKind, ...]
    placement: tuple[Worker, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Places:
    """The devices of a cluster by type, and the links between them."""

    cluster: Cluster

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Every type's devices."""
        return tuple(self.cluster.ranks_of(device) for device in self.cluster.types)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of devices of every type."""
        return tuple(len(ranks) for ranks in self.ranks)

    @cached_property
    def _units(self) -> list[int]:
        """The devices in a unit of each level but the outermost; none where all levels are equally fast."""
        return [] if len(set(self.bandwidths)) == 1 else Bandwidths(self.cluster).units.tolist()

    @cached_property
    def bandwidths(self) -> list[float]:
        """The slowest bandwidth up to each level."""
        speeds: list[float] = Bandwidths(self.cluster).of_levels(np.arange(len(self.cluster.levels))).tolist()
        return speeds

    def level(self, ranks: Sequence[int]) -> int:
        """The outermost level between devices."""
        low, high = min(ranks), max(ranks)
        return sum(low // unit != high // unit for unit in self._units)

    def orientations(self, shape: StageShape) -> Iterator[Placed]:
        """The placements of equally wide stages on devices of one type."""
        width, depth = shape.width or 1, shape.depth
        for links in orientations(self.cluster, width, depth):
            placement = links.place((width,) * depth)
            edges = [self.bandwidths[0], *links.edges.tolist(), self.bandwidths[0]]
            kinds = tuple(
                StageKind(type=0, replicas=width, own=own, before=edges[s], after=edges[s + 1], stage=s)
                for s, own in enumerate(links.groups.tolist())
            )
            yield Placed(kinds, placement, tuple(range(len(placement))))

    def placed(self, kinds: Sequence[StageKind]) -> Placed:
        """The stages of a path through the lattice on their types' devices, in order."""
        used, ranks = [0] * len(self.ranks), list[int]()
        for kind in kinds:
            first = used[kind.type]
            used[kind.type] += kind.replicas
            ranks += self.ranks[kind.type][first : used[kind.type]]
        by_stage = stages_in_a_row([kind.replicas for kind in kinds])
        by_device = dict(sorted(zip(ranks, by_stage, strict=True)))
        return Placed(tuple(kinds), tuple(by_device.values()), tuple(by_device))


@dataclass(frozen=True, slots=True)
class Team:
    """A stage's type of device and its replicas."""

    type: int
    replicas: int


@dataclass(frozen=True, slots=True)
class LatticeNode:
    """A stage of a team on the devices that follow the `used` ones of its type.

    `level`: the outermost one across the boundary before it. `before`: the replicas of the stage before, if messages
    count. `stage` counts from 0, where the number of stages is given.
    """

    stage: int
    used: tuple[int, ...]
    team: Team
    level: int
    before: int


@dataclass(frozen=True, kw_only=True)
class Lattice:
    """All ways to give a shape's devices to its stages.

    `straight`: no stage has replicas. `messages`: the stages' neighbours count. `coarse`: only some of the ways, where
    there are too many: types one after the other, and 2^k or 3 * 2^k replicas (or all that are left of a type).
    """

    places: Places
    shape: StageShape
    straight: bool = False
    messages: bool = False
    coarse: bool = False

    def steps(self) -> Iterator[StageStep[StageKind]]:
        """All steps, in order."""
        nodes: list[dict[LatticeNode, None]] = [{} for _ in range(self.shape.workers + 1)]  # by their workers before
        nothing = (0,) * len(self.places.counts)
        for team in self._teams(nothing, None):
            nodes[0][LatticeNode(0, nothing, team, 0, 0)] = None
        for same in nodes:
            for node in same:
                for kind, following in self._stage(node):
                    yield StageStep(node, kind, tuple(following) or (END,))
                    for target in following:
                        nodes[sum(target.used)][target] = None

    def _stage(self, node: LatticeNode) -> Iterator[tuple[StageKind, Sequence[LatticeNode]]]:
        """The kinds of a node's stage, with the nodes that may follow: none after the last.

        It has one kind for each level across the boundary after it (and each number of replicas, if messages count).
        """
        shape, team = self.shape, node.team
        used = tuple(count + (kind == team.type) * team.replicas for kind, count in enumerate(node.used))
        if sum(used) == shape.workers:
            if not shape.depth or node.stage == shape.depth - 1:
                yield self._kind(node, 0, 0), ()
            return
        stage = node.stage + 1 if shape.depth else 0
        if shape.depth and not 0 < shape.depth - stage <= shape.workers - sum(used):
            return
        ranks = self._ranks(node.used, team)
        beside: dict[tuple[int, int], list[LatticeNode]] = defaultdict(list)
        for other in self._teams(used, team):
            level = self.places.level((*ranks, *self._ranks(used, other)))
            after = other.replicas if self.messages else 0
            before = team.replicas if self.messages else 0
            beside[level, after].append(LatticeNode(stage, used, other, level, before))
        for (level, after), targets in beside.items():
            yield self._kind(node, level, after), targets

    def _teams(self, used: tuple[int, ...], last: Team | None) -> Iterator[Team]:
        """The teams that the next stage may be."""
        left = self.shape.workers - sum(used)
        for kind, count in enumerate(self.places.counts):
            free = min(count - used[kind], left)
            if self.coarse and last is not None and kind != last.type:
                is_left = self.shape.width is None and used[last.type] < self.places.counts[last.type]
                if used[kind] or is_left:
                    continue
            if self.shape.width is not None or self.straight:
                width = self.shape.width or 1
                sizes: Sequence[int] = (width,) if width <= free else ()
            elif self.coarse:
                sizes = [size for size in range(1, free + 1) if size == free or 3 * (size & -size) >= size]
            else:
                sizes = range(1, free + 1)
            yield from (Team(kind, replicas) for replicas in sizes)

    def _ranks(self, used: tuple[int, ...], team: Team) -> tuple[int, int]:
        """The first and the last device of a stage."""
        ranks, first = self.places.ranks[team.type], used[team.type]
        return ranks[first], ranks[first + team.replicas - 1]

    def _kind(self, node: LatticeNode, level: int, after: int) -> StageKind:
        speeds, team = self.places.bandwidths, node.team
        workers = 0
        if self.shape.width is None:
            workers = self.shape.workers - sum(node.used)
            if not self.messages:  # only the microbatches in flight matter
                workers = -(-workers // team.replicas) * team.replicas
        return StageKind(
            type=team.type,
            replicas=team.replicas,
            own=speeds[self.places.level(self._ranks(node.used, team))],
            before=speeds[node.level],
            after=speeds[level],
            stage=sum(node.used) // self.shape.width if self.shape.width else 0,
            workers=workers,
            neighbours=(node.before, after),
        )
