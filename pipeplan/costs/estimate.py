"""Estimate: the costs with which a plan's streams are played, from a profile, a cluster and stages on its devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipeplan.costs.collectives import all_reduce, outlasting_s
from pipeplan.costs.compute import recompute_s
from pipeplan.costs.graph import Boundary, boundaries, in_order
from pipeplan.costs.memory import fixed_copies
from pipeplan.costs.transfer import boundary_link, boundary_port_devices, port_devices, ranks_by_stage
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.plan import Stage, Worker
from pipeplan.documents.profile import Measurement, Overheads, Profile
from pipeplan.documents.stage_costs import StageCosts
from pipeplan.programs.schedule import Schedule


def estimate(
    profile: Profile,
    cluster: Cluster,
    stages: Sequence[Stage],
    placement: Sequence[Worker],
    *,
    microbatch_size: int,
    optimizer: str,
    schedule: Schedule | None = None,
    recompute_factor: float | None = None,
    master_weights: bool = False,
    devices: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
) -> tuple[StageCosts, ...]:
    """Every stage's costs on the devices that the placement gives it.

    Gradients are exchanged by a ring all-reduce, 2 (r - 1) / r of the weights, under ASP by a broadcast of each
    replica's: that is what executes a plan, whatever its planner assumed. A transfer takes its bytes over the slowest
    link that the boundary crosses. Where a profile has no split backward, all of it counts as the gradient of the
    input: splitting promises nothing.

    The `schedule` decides which of the profile's shares and overheads a stage has (`Overheads`; None: those of none).
    `order` is the graph's blocks as the stages hold them.
    """
    tensors = boundaries(profile, microbatch_size, stages, order)
    profile = profile if order is None else in_order(profile, order)
    measured = profile.at(microbatch_size)
    ranks = ranks_by_stage(placement)
    if devices is not None:
        ranks = tuple(tuple(devices[rank] for rank in stage) for stage in ranks)
    edges = [boundary_link(cluster, senders, receivers) for senders, receivers in pairwise(ranks)]
    ports = [boundary_port_devices(cluster, senders, receivers) for senders, receivers in pairwise(ranks)]
    if schedule is not None and schedule.update == "replica":  # one replica's gradients at a time, each once
        moved = [float(stage.replicas > 1) for stage in stages]
    else:
        moved = all_reduce(np.asarray([float(stage.replicas) for stage in stages])).tolist()
    return tuple(
        _stage_costs(
            profile,
            stage,
            measured,
            boundary=tensors[index],
            ports=_Ports(
                activation=ports[index] if index < len(ports) else 0,
                gradient=ports[index - 1] if index > 0 else 0,
                reduce=port_devices(cluster, ranks[index]),
            ),
            exchange=_Exchange(moved[index], profile.overheads.exchange_factor, cluster.link(ranks[index])),
            before=edges[index - 1] if index > 0 else None,
            after=edges[index] if index < len(edges) else None,
            fixed=sum(fixed_copies(profile.dtype, optimizer, master_weights=master_weights)),
            recompute_factor=recompute_factor,
            shares=_shares(profile.overheads, schedule, stages, index, recompute_factor),
        )
        for index, stage in enumerate(stages)
    )


def backward_follows_forward(schedule: Schedule | None, *, recompute: bool, last: bool) -> bool:
    """Whether a stage's backwards come right after the forward, or its recomputation, of the same microbatch."""
    return recompute or (last and schedule is not None and schedule.alternates)


@dataclass(frozen=True, slots=True)
class _Ports:
    """How many devices share the ports that a stage's transfers and its gradient exchange pass."""

    activation: int
    gradient: int
    reduce: int


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A gradient exchange: what it moves, as a share of the weights, how much longer that takes, and its link."""

    moved: float
    factor: float
    link: Level

    def seconds(self, weight_bytes: float) -> float:
        """How long it takes by itself."""
        if self.moved == 0.0:
            return 0.0
        return self.moved * (weight_bytes * self.factor) / self.link.bandwidth_bytes_per_s + self.link.latency_s

    def tail_s(self, completed: Sequence[tuple[float, float]]) -> float:
        """How long it goes on after a backward that completes the blocks' gradients in these seconds."""
        if self.moved == 0.0:
            return 0.0
        seconds_per_byte = self.moved * self.factor / self.link.bandwidth_bytes_per_s
        return outlasting_s(completed, seconds_per_byte) + self.link.latency_s


@dataclass(frozen=True, slots=True)
class _Shares:
    """The factors by which a stage's place in its schedule changes its blocks' seconds, and what an update takes."""

    forward: float
    recompute: float
    backward: float
    update_s_per_byte: float


def _stage_costs(
    profile: Profile,
    stage: Stage,
    measured: Sequence[Measurement],
    *,
    boundary: Boundary,
    ports: _Ports,
    exchange: _Exchange,
    before: Level | None,
    after: Level | None,
    fixed: int,
    recompute_factor: float | None,
    shares: _Shares,
) -> StageCosts:
    blocks = measured[stage.start : stage.stop]
    sizes_bytes = [block.weight_bytes for block in profile.blocks[stage.start : stage.stop]]
    weight_bytes = sum(sizes_bytes)
    completed = [(shares.backward * b.backward_s, size) for b, size in zip(blocks, sizes_bytes, strict=True)]
    # 2BP's p1 and p2: a block that was not measured split has all of its backward in p1.
    input_s = sum(b.backward_s if b.backward_input_s is None else b.backward_input_s for b in blocks)
    weight_s = sum(b.backward_weight_s or 0.0 for b in blocks)
    known_bytes = [b.weight_gradient_bytes for b in blocks if b.weight_gradient_bytes is not None]
    return StageCosts(
        microbatch_size=blocks[0].microbatch_size,
        forward_s=shares.forward * sum(block.forward_s for block in blocks),
        backward_s=shares.backward * sum(block.backward_s for block in blocks),
        backward_input_s=shares.backward * input_s,
        backward_weight_s=weight_s,
        recompute_s=shares.recompute * recompute_s(blocks, recompute_factor),
        update_s=weight_bytes * shares.update_s_per_byte,
        reduce_s=exchange.seconds(weight_bytes),
        reduce_tail_s=exchange.tail_s(completed),
        activation_transfer_s=_transfer_s(boundary.sent_bytes, after),
        gradient_transfer_s=_transfer_s(boundary.received_bytes, before),
        latency_s=max(link.latency_s if link else 0.0 for link in (before, after)),
        instruction_s=profile.overheads.instruction_s,
        activation_bytes=sum(block.activation_bytes for block in blocks),
        input_bytes=boundary.input_bytes,
        version_bytes=weight_bytes,
        fixed_bytes=weight_bytes * fixed,
        gradient_bytes=weight_bytes,
        activation_port_devices=ports.activation,
        gradient_port_devices=ports.gradient,
        reduce_port_devices=ports.reduce,
        weight_gradient_bytes=sum(known_bytes) if len(known_bytes) == len(blocks) else None,
    )


def _shares(
    overheads: Overheads, schedule: Schedule | None, stages: Sequence[Stage], index: int, recompute_factor: float | None
) -> _Shares:
    """Those of stage number `index`. A `recompute_factor` stands for all that recomputation adds."""
    recompute, last = stages[index].recompute, index == len(stages) - 1
    hot = backward_follows_forward(schedule, recompute=recompute, last=last)
    copies = schedule is not None and schedule.keeps_versions([stage.replicas for stage in stages], index)
    known = recompute_factor is None
    return _Shares(
        forward=overheads.forward_without_graph if recompute and known else 1.0,
        recompute=overheads.recompute if known else 1.0,
        backward=overheads.backward_after_forward if hot else 1.0,
        update_s_per_byte=overheads.update_s_per_byte + (overheads.version_s_per_byte if copies else 0.0),
    )


def _transfer_s(size_bytes: int, link: Level | None) -> float:
    return size_bytes / link.bandwidth_bytes_per_s if link else 0.0
