"""Sub-clusters: the first devices of a cluster that are a cluster themselves."""

from collections.abc import Iterator
from dataclasses import replace

from planner_service.core.cluster import Cluster
from planner_service.core.errors import InvalidInputError, require


def sub_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """By their number of devices: 1, 2, ... within a server, then whole servers, and so on outwards.

    Raises InvalidInputError for devices of several types, of which no first ones stand for all.
    """
    names = [device.name for device in cluster.types]
    require(len(names) == 1, "cluster.groups", "must be of one type for this question", names)
    cluster = replace(cluster, groups=())
    yield replace(cluster, levels=(replace(cluster.levels[0], size=1),))
    for outermost, level in enumerate(cluster.levels):
        inside = cluster.levels[:outermost]
        for size in range(2, level.size + 1):
            yield replace(cluster, levels=(*inside, replace(level, size=size)))


def sub_cluster(cluster: Cluster, devices: int) -> Cluster:
    """The one with so many devices. Raises InvalidInputError if there is none."""
    sizes = []
    for smaller in sub_clusters(cluster):
        if smaller.devices == devices:
            return smaller
        sizes.append(smaller.devices)
    shown = ", ".join(map(str, sizes[:16])) + (", ..." if len(sizes) > 16 else "")
    raise InvalidInputError("devices", f"must be whole units of a level of the cluster: {shown}", devices)
