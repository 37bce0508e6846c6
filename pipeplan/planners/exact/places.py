"""Places: the devices of a sequence of stages, and the bandwidths that follow.

All replicas of a stage run on devices of one type; which stage gets which type is free. The stages of a type take its
devices in order, one stage after the other. Where all devices are of one type and all stages are equally wide, the
other orientation of PipeDream-2BW, pipelines in a row, is possible as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.arrays import IntArray
from pipeplan.costs.transfer import Bandwidths
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import Worker
from pipeplan.planners.exact.kinds import StageKind, StageShape
from pipeplan.planners.two_bw.placements import Links, orientations
from pipeplan.programs.program import stages_in_a_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """A stage's type of device and its replicas."""

    type: int
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
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
    def ranks(self) -> tuple[IntArray, ...]:
        """Every type's devices."""
        return tuple(np.asarray(self.cluster.ranks_of(device)) for device in self.cluster.types)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of devices of every type."""
        return tuple(len(ranks) for ranks in self.ranks)

    @cached_property
    def bandwidths(self) -> Bandwidths:
        """The bandwidths of every level."""
        return Bandwidths(self.cluster)

    @cached_property
    def flat(self) -> bool:
        """Whether a stage's place does not affect its bandwidths."""
        levels = np.arange(len(self.cluster.levels))
        return len(set(self.bandwidths.of_levels(levels).tolist())) == 1

    def level(self, low: int, high: int) -> int:
        """The outermost level between two devices."""
        return int(self.bandwidths.levels(np.asarray(low), np.asarray(high)))

    def bandwidth(self, level: int) -> float:
        """The slowest bandwidth up to a level."""
        return float(self.bandwidths.of_levels(np.asarray(level)))

    def orientations(self, shape: StageShape) -> tuple[Links, ...]:
        """The placements of equally wide stages on devices of one type."""
        return orientations(self.cluster, shape.width or 1, shape.depth)

    def oriented(self, shape: StageShape, links: Links) -> Placed:
        """The stages on one orientation. The bandwidths beyond the first and the last stage are unused."""
        width = shape.width or 1
        edges = [float(bandwidth) for bandwidth in links.edges]
        kinds = tuple(
            StageKind(
                stage=stage,
                type=0,
                replicas=width,
                workers=width * (shape.depth - stage),
                own=float(links.groups[stage]),
                before=edges[stage - 1] if stage else edges[0] if edges else 1.0,
                after=edges[stage] if stage < len(edges) else edges[-1] if edges else 1.0,
            )
            for stage in range(shape.depth)
        )
        placement = links.place((width,) * shape.depth)
        return Placed(kinds=kinds, placement=placement, devices=tuple(range(len(placement))))

    def in_a_row(self, teams: Sequence[Team]) -> Placed:
        """The stages on their types' devices, in order."""
        used = [0] * len(self.ranks)
        ranks: list[list[int]] = []
        for team in teams:
            first = used[team.type]
            used[team.type] += team.replicas
            ranks.append(self.ranks[team.type][first : used[team.type]].tolist())
        every = [rank for stage in ranks for rank in stage]
        edges = [self._spanning([*ranks[i], *ranks[i + 1]]) for i in range(len(teams) - 1)]
        ends = [self.bandwidth(0)]
        kinds = tuple(
            StageKind(
                stage=stage,
                type=team.type,
                replicas=team.replicas,
                workers=sum(later.replicas for later in teams[stage:]),
                own=self._spanning(ranks[stage]),
                before=(ends + edges)[stage],
                after=(edges + ends)[stage],
            )
            for stage, team in enumerate(teams)
        )
        by_stage = stages_in_a_row([team.replicas for team in teams])
        by_device = dict(sorted(zip(every, by_stage, strict=True)))
        return Placed(kinds=kinds, placement=tuple(by_device.values()), devices=tuple(by_device))

    def _spanning(self, ranks: Sequence[int]) -> float:
        return self.bandwidth(self.level(min(ranks), max(ranks)))
