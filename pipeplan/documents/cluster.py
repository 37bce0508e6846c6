"""Cluster: the number and types of devices, and the network between any two of them.

A device's name identifies the accelerator, however a vendor, a driver or a user spells it. Names are compared by
their words: in lower case, without the vendor's and the brand's, memory as `80gb`. A known type has the words that its
names use. A name may mean every known type that has all of the name's words.

    NVIDIA A100-SXM4-80GB -> a100 sxm4 80gb -> a100-80gb
    A100                  -> a100           -> a100-40gb or a100-80gb
    NVIDIA A100 80GB PCIe -> a100 80gb pcie -> none that is known
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

from pipeplan.documents.collectives import Collectives
from pipeplan.documents.devices import KNOWN_TYPES
from pipeplan.documents.names import STRICT
from pipeplan.documents.profile import Device
from pipeplan.errors import InvalidInputError, require, require_amount, require_count, require_unique

MAX_DEVICES = 2**17

SHOWN_LEVELS = 64
"""Upper bound on the levels that are multiplied in the error about too many devices."""

_MODELS = frozenset(
    {
        *("v100", "a100", "a800", "h100", "h800", "h200", "h20", "b200", "b300", "gb200", "gb300"),
        *("mi300x", "mi325x", "mi355x", "l40s", "l4", "t4", "a10g", "3090", "4090"),
    }
)
"""The words that identify the chip: a name without one means no type."""

_MORE_WORDS = {
    "v100-16gb": ("sxm",),
    "v100-32gb": ("sxm",),
    "a100-40gb": ("sxm",),
    "a100-80gb": ("sxm",),
    "h100-sxm": ("sxm", "hbm3"),
    "h100-pcie": ("hbm2e",),
    "h200-sxm": ("sxm5", "hbm3e"),
    "a800": ("sxm",),
    "h800": ("sxm", "hbm3"),
    "h20": ("sxm", "sxm5", "hbm3", "141gb"),
    "b200": ("sxm", "192gb", "hbm3e"),
    "b300": ("sxm", "ac", "270gb", "275gb", "hbm3e"),
    "gb200": ("nvl72", "185gb", "189gb", "192gb", "hbm3e"),
    "gb300": ("nvl72", "277gb", "284gb", "288gb", "hbm3e"),
    "mi300x": ("hbm3", "oam", "platform"),
    "mi325x": ("hbm3e", "oam", "platform"),
    "mi355x": ("hbm3e", "oam", "platform"),
    "l40s": ("48gb", "pcie"),
    "l4": ("24gb", "pcie"),
    "t4": ("16gb", "pcie"),
    "a10g": ("24gb", "pcie"),
    "rtx-3090": ("24gb",),
    "rtx-4090": ("24gb",),
}
"""Words of a type's names in addition to those of its key and its name, as in the vendor's driver."""

_BRANDS = frozenset({"nvidia", "amd", "instinct", "corporation", "tesla", "geforce", "gpu"})
_MARKETING = re.compile(r"\btensor[\W_]+core\b")
_MEMORY = re.compile(r"(?<![a-z0-9])(\d+)[\s_-]*gi?b?(?![a-z0-9])")
_RTX = re.compile(r"\brtx(?=\d)")
_SEPARATORS = re.compile(r"[\W_]+")


def words(name: str) -> tuple[str, ...]:
    """The words of a name that are compared, in order; brands only if there is nothing else."""
    text = _MARKETING.sub(" ", name.casefold())
    text = _MEMORY.sub(r" \1gb ", _RTX.sub("rtx ", text))
    every = tuple(word for word in _SEPARATORS.split(text) if word)
    return tuple(word for word in every if word not in _BRANDS) or every


def is_unknown(name: str) -> bool:
    """Whether a name does not identify a device, as in an imported profile: `unknown`, or empty."""
    return name.strip().casefold() in ("", "unknown")


def known_types(name: str) -> frozenset[str]:
    """The known types that a name may mean, by their keys: none, one, or several if it is short."""
    asked = set(words(name))
    if asked.isdisjoint(_MODELS):
        return frozenset()
    return frozenset(key for key, of_type in _WORDS.items() if asked <= of_type)


def is_same(one: str, other: str) -> bool:
    """Whether two names certainly mean one type: the same words, or spellings of one known type."""
    types = known_types(one)
    return words(one) == words(other) or (len(types) == 1 and types == known_types(other))


def differ(one: str, other: str) -> bool:
    """Whether two names certainly mean two types: of two known chips, or of known types without a common one."""
    models, others = _MODELS.intersection(words(one)), _MODELS.intersection(words(other))
    if models and others and models.isdisjoint(others):
        return True
    types, other_types = known_types(one), known_types(other)
    return bool(types and other_types) and types.isdisjoint(other_types)


_WORDS = {key: {*words(key), *words(known.device.name), *_MORE_WORDS[key]} for key, known in KNOWN_TYPES.items()}
"""All words of each known type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the network: `size` units of the level inside it, joined by links of this speed.

    `bandwidth_bytes_per_s` is what all devices of a unit, such as a server, can together send, and receive as well.
    `device_bandwidth_bytes_per_s` is the part that one of its devices can use, if that is less: the speed of its own
    network card. `latency_s` is that of one message, and of each hop of a collective where `collectives` does not say
    what collectives take.
    """

    size: int
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    device_bandwidth_bytes_per_s: float | None = None
    collectives: Collectives | None = None

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_count("size", self.size)
        require_amount("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, positive=True)
        require_amount("latency_s", self.latency_s)
        own = self.device_bandwidth_bytes_per_s
        if own is not None:
            require_amount("device_bandwidth_bytes_per_s", own, positive=True)
            most = self.bandwidth_bytes_per_s
            rule = f"must be at most bandwidth_bytes_per_s ({most:g}), which all devices of a unit share"
            require(own <= most, "device_bandwidth_bytes_per_s", rule, own)

    @property
    def transfer_bytes_per_s(self) -> float:
        """The bandwidth of a single transfer between two devices."""
        return self.device_bandwidth_bytes_per_s or self.bandwidth_bytes_per_s

    @property
    def device_share(self) -> float:
        """A single transfer's share of a unit's bandwidth."""
        return self.transfer_bytes_per_s / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One device's share of its server's host, when all devices use theirs at the same time.

    `bandwidth_bytes_per_s` is that of the link between them, in each direction. `update_bytes_per_s` is what the host's
    processors read and write of its memory while they update weights for the device.
    """

    memory_bytes: int
    bandwidth_bytes_per_s: float
    update_bytes_per_s: float

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_count("memory_bytes", self.memory_bytes)
        for field_name in ("bandwidth_bytes_per_s", "update_bytes_per_s"):
            require_amount(field_name, getattr(self, field_name), positive=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """A number of consecutive devices of one type."""

    device: Device
    count: int

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_count("count", self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices under levels, from the inside out: 8 GPUs a server over NVLink, 8 servers over Ethernet.

    Devices with near numbers are near each other: device r sits in server `r // levels[0].size`. All are of the type
    `device`, unless there are `groups`, in the order of the devices; `device` is then the first group's and may be left
    out. A type may come in several groups. `host`: None if it is unknown.
    """

    device: Device = field(default=None)  # type: ignore[assignment]  # filled in from the groups, never None
    levels: tuple[Level, ...]
    groups: tuple[DeviceGroup, ...] = ()
    host: Host | None = None

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require(len(self.levels) > 0, "levels", "must hold at least one level", self.levels)
        own = self.levels[0].device_bandwidth_bytes_per_s
        rule = "is for levels whose units hold several devices: on the first one a device is a unit"
        require(own is None, "levels.0.device_bandwidth_bytes_per_s", rule, own)
        # The product of many large sizes takes time quadratic in their number: it is multiplied no further than needed.
        # The error shows the product of the first levels, which are all levels of any real cluster.
        devices = 1
        for level in self.levels:
            devices *= level.size
            if devices > MAX_DEVICES:
                shown = prod(level.size for level in self.levels[:SHOWN_LEVELS])
                raise InvalidInputError("levels", f"must make at most {MAX_DEVICES} devices together", shown)

        if self.groups:
            counted = sum(group.count for group in self.groups)
            require(counted == devices, "groups", f"must count the {devices} devices of the levels", counted)
            first = self.groups[0].device
            require(self.device in (None, first), "device", "must be the first group's, or left out", self.device)
            object.__setattr__(self, "device", first)
            names = sorted(device.name for device in {group.device for group in self.groups})
            require_unique("groups", "must describe devices of the same name in the same way", names)
        require(self.device is not None, "device", "is required where there are no groups", None)

    @property
    def types(self) -> tuple[Device, ...]:
        """The types of its devices, in the order of the devices."""
        return tuple(dict.fromkeys(group.device for group in self.groups)) or (self.device,)

    @property
    def counts(self) -> dict[str, int]:
        """The number of devices of each type, by the types' names, in the order of the devices."""
        if not self.groups:
            return {self.device.name: self.devices}
        counts = dict.fromkeys((device.name for device in self.types), 0)
        for group in self.groups:
            counts[group.device.name] += group.count
        return counts

    def ranks_of(self, device: Device) -> tuple[int, ...]:
        """The devices of a type, ascending."""
        if not self.groups:
            return tuple(range(self.devices)) if device == self.device else ()
        every = (group.device for group in self.groups for _ in range(group.count))
        return tuple(rank for rank, kind in enumerate(every) if kind == device)

    @property
    def devices(self) -> int:
        """The number of devices: the product of the sizes."""
        return prod(level.size for level in self.levels)

    def link(self, ranks: Iterable[int]) -> Level:
        """The path of a transfer among these devices: its slowest bandwidth, its longest latency.

        Devices [0, size of level 0) share level 0, and so on outwards. A single device crosses no level: the innermost
        level is returned, at no cost because nothing is sent.
        """
        members = list(ranks)
        low, high = min(members), max(members)
        unit = 1
        crossed = []
        for level in self.levels:
            unit *= level.size
            crossed.append(level)
            if low // unit == high // unit:
                break
        return Level(
            size=len(members),
            bandwidth_bytes_per_s=min(level.transfer_bytes_per_s for level in crossed),
            latency_s=max(level.latency_s for level in crossed),
        )
