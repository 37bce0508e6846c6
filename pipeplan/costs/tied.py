"""The tied term: copies of weights that several stages use, and the sum of the copies' gradients."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from pipeplan.costs.collectives import all_reduce_among
from pipeplan.costs.transfer import Bandwidths, ranks_of_stages
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import Stage, Worker
from pipeplan.documents.profile import Profile
from pipeplan.documents.tied import TiedStages, TiedWeights


def copied_bytes(every: Sequence[TiedWeights], start: int, stop: int) -> list[int]:
    """By block in [start, stop), the bytes of the copies that a stage with these blocks has of other blocks' weights.

    A copy counts in the first of the stage's blocks that use it.
    """
    copies_bytes = [0] * (stop - start)
    for tied in every:
        using = [block for block in tied.blocks if start <= block < stop]
        if using and tied.block not in using:
            copies_bytes[min(using) - start] += tied.weight_bytes
    return copies_bytes


def untrained_bytes(profile: Profile, start: int, stop: int) -> int:
    """The bytes of frozen weights and buffers of a stage with blocks [start, stop), and of its copies of other blocks'
    frozen weights.
    """
    own_bytes = sum(block.untrained_bytes for block in profile.blocks[start:stop])
    return own_bytes + sum(copied_bytes(profile.tied_frozen, start, stop))


def copies_apart(every: Sequence[TiedWeights], blocks: int, depth: int) -> tuple[int, ...]:
    """By block, the bytes of the copies that its stage has for it in any split of `blocks` blocks into `depth` stages.

    Two blocks are on different stages if all stages but one have a block, and the rest does not reach from one to the
    other. Stages may have further copies.
    """
    longest, copies_bytes = blocks - depth + 1, [0] * blocks
    for tied in every:
        apart = [tied.block]
        for block in tied.also:
            if all(abs(block - other) >= longest for other in apart):
                copies_bytes[block] += tied.weight_bytes
                apart.append(block)
    return tuple(copies_bytes)


def tied_stages(
    profile: Profile,
    cluster: Cluster,
    stages: Sequence[Stage],
    placement: Sequence[Worker],
    *,
    order: Sequence[int] | None = None,
    devices: Sequence[int] | None = None,
    in_v: bool = False,
) -> tuple[TiedStages, ...]:
    """The stages that share weights, each group once, in ascending order.

    All replicas sum at once, each over the devices of its own stages, and share the ports that they pass. `order`,
    `devices` and `in_v` are as in `estimate` and `ranks_of_stages`.
    """
    if not profile.tied:
        return ()
    order = range(len(profile.blocks)) if order is None else order
    stage_of = {order[place]: index for index, stage in enumerate(stages) for place in range(stage.start, stage.stop)}
    sizes_bytes: dict[tuple[int, ...], int] = defaultdict(int)
    for tied in profile.tied:
        sizes_bytes[tuple(sorted({stage_of[block] for block in tied.blocks}))] += tied.weight_bytes
    ranks = ranks_of_stages(placement, len(stages), in_v=in_v)
    if devices is not None:
        ranks = tuple(tuple(devices[rank] for rank in of_stage) for of_stage in ranks)
    return tuple(
        TiedStages(stages=group, seconds=sum_s(cluster, [ranks[stage] for stage in group], size_bytes))
        for group, size_bytes in sorted(sizes_bytes.items())
        if len(group) > 1
    )


def sum_s(cluster: Cluster, ranks: Sequence[Sequence[int]], size_bytes: int) -> float:
    """The seconds in which stages sum the gradients of `size_bytes` of shared weights: the all-reduce of the replica
    with the farthest devices. `ranks` has each stage's devices, by replica.
    """
    replicas = np.arange(max(map(len, ranks)))
    devices = np.sort([np.asarray(of_stage)[replicas % len(of_stage)] for of_stage in ranks], axis=0)
    farthest = int(Bandwidths(cluster).levels(devices[0], devices[-1]).argmax())
    among = all_reduce_among(cluster, devices[:, farthest].tolist())
    ports = devices // (among.port.devices or cluster.devices)  # without a port no link is shared
    first = np.vstack([np.ones((1, len(replicas)), dtype=bool), ports[1:] != ports[:-1]])
    together = np.bincount(ports[first])[ports[:, farthest]].max()
    crowded = max(float(together) * among.port.device_share, 1.0)
    return among.seconds(size_bytes) + (crowded - 1.0) * among.port_s(size_bytes)
