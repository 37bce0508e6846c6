"""Estimate: the costs for playing a plan's streams, from a profile, a cluster and stages on its devices."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeplan.costs.collectives import AMONG, AllReduce, LevelRing, ParameterServer, outlasting_s
from pipeplan.costs.compute import recompute_s
from pipeplan.costs.graph import Boundary, boundaries, in_order
from pipeplan.costs.memory import fixed_copies, kept_bytes
from pipeplan.costs.tied import copied_bytes, untrained_bytes
from pipeplan.costs.transfer import SharedPort, boundary_crossings, ranks_of_stages, shared_port
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Stage, Worker
from pipeplan.documents.profile import Overheads, Profile
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
    synchronisation: str = "all-reduce",
) -> tuple[StageCosts, ...]:
    """Every stage's costs on its devices; the placement lists the first stage of each rank.

    An all-reduce exchanges the gradients level by level, as the runtime does. `synchronisation` may name another
    exchange (`collectives.AMONG`). Under ASP each replica broadcasts its own gradients. A transfer takes its bytes over
    the slowest link that the boundary crosses. If a profile has no split backward, the whole backward counts as the
    gradient of the input: splitting gains nothing.

    The `schedule` decides which of the profile's shares and overheads (`Overheads`) apply to a stage (None: none).
    `order` is the graph's blocks as the stages hold them.
    """
    tensors = boundaries(profile, microbatch_size, stages, order)
    profile = profile if order is None else in_order(profile, order)
    measured = profile.at(microbatch_size)
    ranks = ranks_of_stages(placement, len(stages), in_v=schedule is not None and schedule.v_shaped)
    if devices is not None:
        ranks = tuple(tuple(devices[rank] for rank in stage) for stage in ranks)
    # With several stages a rank, many boundaries have the same devices, or lie within one rank.
    pairs = list(pairwise(ranks))
    apart = [(a, b) for a, b in set(pairs) if a != b]
    crossed = dict(zip(apart, boundary_crossings(cluster, apart), strict=True))
    crossings = [crossed.get(pair, (None, SharedPort())) for pair in pairs]
    edges, ports = [link for link, _ in crossings], [port for _, port in crossings]
    in_turn, replicas = schedule is not None and schedule.update == "replica", [stage.replicas for stage in stages]
    among = _broadcast if in_turn else AMONG[synchronisation]
    exchanges = {members: among(cluster, members) for members in set(ranks)}
    return tuple(
        _stage_costs(
            profile,
            stage,
            measured,
            boundary=tensors[index],
            onward=ports[index] if index < len(ports) else SharedPort(),
            back=ports[index - 1] if index > 0 else SharedPort(),
            exchange=_Exchange(exchanges[ranks[index]], profile.overheads.exchange_factor),
            before=edges[index - 1] if index > 0 else None,
            after=edges[index] if index < len(edges) else None,
            fixed=fixed_copies(profile.dtype, optimizer, master_weights=master_weights),
            recompute_factor=recompute_factor,
            shares=_shares(profile.overheads, schedule, replicas, index, recompute_factor, recompute=stage.recompute),
        )
        for index, stage in enumerate(stages)
    )


def update_beyond_bytes_s(profile: Profile, blocks: Iterable[int]) -> float:
    """The seconds of an update of these blocks beyond its rate for each byte of weights; 0 if nothing is trained."""
    trained = [profile.blocks[block] for block in blocks if profile.blocks[block].trained_bytes]
    return sum(block.update_s for block in trained) + (profile.overheads.update_s if trained else 0.0)


def backward_follows_forward(schedule: Schedule | None, *, recompute: bool, last: bool) -> bool:
    """Whether a stage's backwards come right after the forward, or its recomputation, of the same microbatch."""
    return recompute or (last and schedule is not None and schedule.alternates)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A gradient exchange, and the factor by which its bytes take longer than on the links alone."""

    among: AllReduce | ParameterServer
    factor: float

    def seconds(self, weight_bytes: float) -> float:
        """Seconds of the exchange without other traffic."""
        return self.among.seconds(weight_bytes * self.factor)

    def inside_s(self, weight_bytes: float) -> float:
        """The seconds that use no port: the hops, and the levels of an all-reduce other than the slowest."""
        return self.seconds(weight_bytes) - self.among.port_s(weight_bytes * self.factor)

    def tail_s(self, completed: Sequence[tuple[float, float]], weight_bytes: float) -> float:
        """Seconds after a backward that completes the blocks' gradients as in `completed`."""
        if weight_bytes == 0:
            return self.seconds(weight_bytes)
        latency_s = self.among.latency_s(weight_bytes * self.factor)
        seconds_per_byte = (self.seconds(weight_bytes) - latency_s) / weight_bytes
        return outlasting_s(completed, seconds_per_byte) + latency_s


def _broadcast(cluster: Cluster, ranks: Sequence[int]) -> AllReduce:
    """The broadcast of one replica to all others: every byte once, in one hop."""
    link = cluster.link(ranks)
    ring = LevelRing(2, link.bandwidth_bytes_per_s, link.latency_s / 2, shared_port(cluster, ranks))
    return AllReduce((ring,) if len(ranks) > 1 else ())


@dataclass(frozen=True, slots=True)
class _Shares:
    """The factors by which a stage's place in its schedule changes its blocks' seconds, and the rate of an update."""

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
    onward: SharedPort,
    back: SharedPort,
    exchange: _Exchange,
    before: Level | None,
    after: Level | None,
    fixed: tuple[int, int, int],
    recompute_factor: float | None,
    shares: _Shares,
) -> StageCosts:
    blocks = measured[stage.start : stage.stop]
    own_blocks = profile.blocks[stage.start : stage.stop]
    own_bytes = [block.trained_bytes for block in own_blocks]
    sizes_bytes = [
        sum(pair) for pair in zip(own_bytes, copied_bytes(profile.tied, stage.start, stage.stop), strict=True)
    ]
    weight_bytes = sum(sizes_bytes)
    if not weight_bytes and any(block.frozen_bytes for block in own_blocks):
        exchange = _Exchange(AllReduce(()), exchange.factor)  # all of it is frozen: nothing is exchanged
    by_block = stage.recompute_unit == "block"
    again_s = [shares.recompute * recompute_s((b,), recompute_factor) if by_block else 0.0 for b in blocks]
    backwards_s = [shares.backward * b.backward_s + own_s for b, own_s in zip(blocks, again_s, strict=True)]
    completed = list(zip(backwards_s, sizes_bytes, strict=True))
    # 2BP's p1 and p2: a block without a measured split has its whole backward in p1.
    input_s = sum(b.backward_s if b.backward_input_s is None else b.backward_input_s for b in blocks)
    by_block_bytes = boundary.input_bytes + max(b.again_bytes for b in blocks)
    split_known = all(b.split_activation_bytes is not None for b in blocks)
    early_bytes = fixed[0] * sum(b.split_gradient_bytes or 0 for b in blocks)
    known_bytes = [b.weight_gradient_bytes for b in blocks if b.weight_gradient_bytes is not None]
    return StageCosts(
        microbatch_size=blocks[0].microbatch_size,
        forward_s=shares.forward * sum(block.forward_s for block in blocks),
        backward_s=shares.backward * sum(block.backward_s for block in blocks),
        backward_input_s=shares.backward * input_s,
        backward_weight_s=sum(b.backward_weight_s or 0.0 for b in blocks),
        recompute_s=shares.recompute * recompute_s(blocks, recompute_factor),
        update_s=weight_bytes * shares.update_s_per_byte
        + update_beyond_bytes_s(profile, range(stage.start, stage.stop)),
        reduce_s=exchange.seconds(weight_bytes),
        reduce_tail_s=exchange.tail_s(completed, weight_bytes),
        activation_transfer_s=_transfer_s(boundary.sent_bytes, after),
        gradient_transfer_s=_transfer_s(boundary.received_bytes, before),
        activation_latency_s=after.latency_s if after else 0.0,
        gradient_latency_s=before.latency_s if before else 0.0,
        instruction_s=profile.overheads.instruction_s,
        activation_message_s=_message_s(profile, boundary.sent_bytes, after),
        gradient_message_s=_message_s(profile, boundary.received_bytes, before),
        activation_bytes=by_block_bytes if by_block else kept_bytes(blocks),
        input_bytes=boundary.input_bytes,
        version_bytes=weight_bytes,
        fixed_bytes=weight_bytes * sum(fixed)
        + sum(block.cast_bytes for block in own_blocks)
        + untrained_bytes(profile, stage.start, stage.stop),
        own_gradient_bytes=weight_bytes * fixed[0],
        gradient_bytes=weight_bytes,
        activation_port_devices=onward.devices,
        gradient_port_devices=back.devices,
        reduce_port_devices=exchange.among.port.devices,
        reduce_inside_s=exchange.inside_s(weight_bytes),
        activation_device_share=onward.device_share,
        gradient_device_share=back.device_share,
        reduce_device_share=exchange.among.port.device_share,
        weight_gradient_bytes=sum(known_bytes) if len(known_bytes) == len(blocks) else None,
        split_activation_bytes=kept_bytes([b.when_split for b in blocks]) if split_known else None,
        early_gradient_bytes=min(early_bytes, weight_bytes * fixed[0]) if split_known else None,
    )


def _shares(
    overheads: Overheads,
    schedule: Schedule | None,
    replicas: Sequence[int],
    index: int,
    recompute_factor: float | None,
    *,
    recompute: bool,
) -> _Shares:
    """The shares of stage number `index`. A `recompute_factor` covers everything that recomputation adds."""
    hot = backward_follows_forward(schedule, recompute=recompute, last=index == len(replicas) - 1)
    copies = schedule is not None and schedule.keeps_versions(replicas, index)
    known = recompute_factor is None
    return _Shares(
        forward=overheads.forward_without_graph if recompute and known else 1.0,
        recompute=overheads.recompute if known else 1.0,
        backward=overheads.backward_after_forward if hot else 1.0,
        update_s_per_byte=overheads.update_s_per_byte + (overheads.version_s_per_byte if copies else 0.0),
    )


def _transfer_s(size_bytes: int, link: Level | None) -> float:
    return size_bytes / link.bandwidth_bytes_per_s if link else 0.0


def _message_s(profile: Profile, size_bytes: int, link: Level | None) -> float:
    return profile.overheads.message_s_per_byte * size_bytes if link else 0.0
