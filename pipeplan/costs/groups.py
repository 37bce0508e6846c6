"""Groups: devices that share the blocks of a stage, seen as one device of a smaller cluster; and their collectives.

A form's axes are laid out from the inside: the devices of a tensor group are neighbours, and those of a context group
have the stride of a tensor group. The devices of a form together hold one copy of a stage. To all other code they are
one device. Its messages are as large as those of its members together, and use the members' links in parallel.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

from pipeplan.costs.collectives import LevelRing
from pipeplan.costs.transfer import SharedPort
from pipeplan.documents.cluster import Cluster, Level, known_types
from pipeplan.documents.collectives import Collectives
from pipeplan.documents.engines import TrainingEngine
from pipeplan.documents.forms import AXES, Form, Routing
from pipeplan.errors import InvalidInputError


def grouped(cluster: Cluster, devices: int) -> Cluster:
    """The cluster whose devices are groups of `devices` neighbours; a group's memory is that of one of its devices.

    Raises InvalidInputError for groups that neither fill whole units of a level nor share one evenly.
    """
    if devices == 1:
        return cluster
    left, levels = devices, list[Level]()
    for level in cluster.levels:
        if levels:  # units of this level hold whole groups
            own = level.device_bandwidth_bytes_per_s
            own = own and min(devices * own, level.bandwidth_bytes_per_s)
            levels.append(replace(level, device_bandwidth_bytes_per_s=own))
        elif left % level.size == 0:
            left //= level.size
        elif level.size % left == 0:
            together = left * level.bandwidth_bytes_per_s
            size = level.size // left
            levels.append(replace(level, size=size, bandwidth_bytes_per_s=together, device_bandwidth_bytes_per_s=None))
        else:
            rule = f"must divide the {level.size} units of a level of the cluster, or be made of whole ones"
            raise InvalidInputError("tensor x context", rule, devices)
    if not levels:
        if left > 1:
            rule = f"must be at most the cluster's {cluster.devices} devices"
            raise InvalidInputError("tensor x context", rule, devices)
        levels.append(replace(cluster.levels[0], size=1))
    return replace(cluster, levels=tuple(levels))


@dataclass(frozen=True, slots=True)
class _Hop:
    """A level that a group reaches over: `members` of its units have devices of the group, `beside` in each of them.

    The bandwidth is that of one device, where all devices of its unit send at once.
    """

    members: int
    beside: int
    bandwidth_bytes_per_s: float
    latency_s: float
    collectives: Collectives | None = None


@dataclass(frozen=True)
class DeviceGroupLinks:
    """The links among the devices of an axis. All groups of the axis exchange at the same time."""

    hops: tuple[_Hop, ...]

    def seconds(self, kind: str, size_bytes: float, sent_once: Routing | None = None) -> float:
        """Seconds of a collective (`documents.forms.Collective`); 0 for a single device.

        Reductions and gathers go level by level from the inside out, in rings: (n - 1) / n of the bytes pass a device
        (Thakur, Rabenseifner and Gropp 2005, section 4); an all-reduce may go by trees (`LevelRing`). In an all-to-all,
        a device keeps its own share. Tokens that are `sent_once` go once to every node that has one of their experts,
        and there once to every device that has one (DeepEP, 2025).
        """
        if kind == "ring":
            slowest = min((hop.bandwidth_bytes_per_s for hop in self.hops), default=0.0)
            latency_s = sum((hop.members - 1) * hop.latency_s for hop in self.hops)
            return size_bytes / slowest + latency_s if self.hops else 0.0
        return sum(self._level_s(kind, hop, size_bytes, sent_once) for hop in self.hops)

    def _level_s(self, kind: str, hop: _Hop, size_bytes: float, sent_once: Routing | None) -> float:
        n, bandwidth, measured = hop.members, hop.beside * hop.bandwidth_bytes_per_s, hop.collectives
        if kind == "all-reduce":
            shares = measured.all_reduce if measured else None
            return sum(LevelRing(n, bandwidth, hop.latency_s, SharedPort(), shares).seconds(size_bytes))
        if kind == "all-to-all":
            every = self.hops[-1].beside * self.hops[-1].members
            crossing = (n - 1) * hop.beside / every
            if sent_once:
                crossing = (n - 1) / n * sent_once.units_reached(every // hop.beside) / sent_once.chosen
            if measured:
                return sum(measured.all_to_all.seconds(n, crossing * size_bytes, hop.bandwidth_bytes_per_s))
            return crossing * size_bytes / hop.bandwidth_bytes_per_s + (n - 1) * hop.latency_s
        if measured:
            return sum(measured.gather.seconds(n, (n - 1) / n * size_bytes, bandwidth))
        return (n - 1) / n * size_bytes / bandwidth + (n - 1) * hop.latency_s


@lru_cache(maxsize=4096)
def links_among(cluster: Cluster, count: int, stride: int) -> DeviceGroupLinks:
    """The links among `count` devices at distances of `stride`, from the cluster's first device on.

    All such groups count as equally placed. If units hold different numbers of a group's devices, the smallest counts.
    """
    members, unit, beside = [stride * place for place in range(count)], 1, 1
    hops = []
    for level in cluster.levels:
        if len({member // unit for member in members}) == 1:
            break
        units: dict[int, set[int]] = defaultdict(set)
        for member in members:
            units[member // (unit * level.size)].add(member // unit)
        most = max(len(inside) for inside in units.values())
        if most > 1:
            bandwidth = min(level.transfer_bytes_per_s, level.bandwidth_bytes_per_s / unit)
            hops.append(_Hop(most, beside, bandwidth, level.latency_s, level.collectives))
        beside *= min(len(inside) for inside in units.values())
        unit *= level.size
    return DeviceGroupLinks(tuple(hops))


def axis_links(cluster: Cluster, form: Form) -> dict[str, DeviceGroupLinks]:
    """The links among the devices of each axis: tensor groups innermost, then context groups; experts beside both."""
    return {axis: links_among(cluster, getattr(form, axis), form.stride(axis)) for axis in AXES}


def replica_links(cluster: Cluster, form: Form, replicas: int) -> tuple[DeviceGroupLinks, DeviceGroupLinks]:
    """The links among devices with the same parameters outside experts, and among devices with the same experts."""
    outside = links_among(cluster, replicas * form.context, form.stride("context"))
    return outside, links_among(cluster, form.expert_replicas(replicas), form.expert_devices)


DEEP_EP = {"h100-sxm", "h200-sxm", "h800", "h20", "b200", "b300", "gb200", "gb300"}
"""The types of devices on which Megatron-LM supports DeepEP (`moe/README.md` of core 0.15)."""


def sends_tokens_once(engine: TrainingEngine, form: Form, device: str) -> bool:
    """Whether a token goes once to each node and device that has some of its experts, on devices of this name."""
    whole = form.expert > 1 and form.expert_tensor_degree == 1
    return engine.whole_experts and whole and bool(DEEP_EP & known_types(device))
