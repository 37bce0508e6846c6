"""The ports through which transfers leave and enter a unit of devices: where a level's bandwidth is shared."""

from collections.abc import Sequence
from math import inf, lcm

import numpy as np

from planner_service.core.cluster import Cluster
from planner_service.core.cost.transfer import Bandwidths


def port_devices(cluster: Cluster, ranks: Sequence[int]) -> int:
    """How many devices share the port at which a transfer among these ranks is slowest.

    A level's bandwidth is what one unit of the level inside it, a server or a device, sends or receives at a time.
    Among equally slow levels that is the outermost, whose port most devices share.
    """
    unit = devices = 1
    slowest = inf
    for level in cluster.levels:
        if level.bandwidth_bytes_per_s <= slowest:
            slowest, devices = level.bandwidth_bytes_per_s, unit
        unit *= level.size
        if min(ranks) // unit == max(ranks) // unit:
            break
    return devices


def boundary_port_devices(cluster: Cluster, senders: Sequence[int], receivers: Sequence[int]) -> int:
    """The same for the pair of senders and receivers that reaches farthest: its link is the slowest."""
    rounds = np.arange(lcm(len(senders), len(receivers)))
    pairs = np.stack([np.asarray(senders)[rounds % len(senders)], np.asarray(receivers)[rounds % len(receivers)]])
    farthest = int(Bandwidths(cluster).levels(pairs.min(axis=0), pairs.max(axis=0)).argmax())
    return port_devices(cluster, pairs[:, farthest].tolist())
