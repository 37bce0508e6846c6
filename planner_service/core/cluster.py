"""Cluster: how many devices there are, and what lies between any two of them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

from planner_service.core.errors import InvalidInputError, require, require_amount, require_count, require_unique
from planner_service.core.profile import STRICT, Device

MAX_DEVICES = 2**17
SHOWN_LEVELS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the network: `size` units of the level inside it, joined by links of this speed."""

    size: int
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_count("size", self.size)
        require_amount("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, positive=True)
        require_amount("latency_s", self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """So many devices of one type, in a row."""

    device: Device
    count: int

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_count("count", self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices under levels, from the inside out: 8 GPUs a server over NVLink, 8 servers over Ethernet.

    Devices are numbered so that neighbours are near: device r sits in server `r // levels[0].size`. All are of the type
    `device`, unless there are `groups`, in the order of the devices; `device` is then the first group's and may be left
    out. A type may come in several groups.
    """

    device: Device = field(default=None)  # type: ignore[assignment]  # filled in from the groups, never None
    levels: tuple[Level, ...]
    groups: tuple[DeviceGroup, ...] = ()

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require(len(self.levels) > 0, "levels", "must hold at least one level", self.levels)
        self._check_size()
        if self.groups:
            self._check_groups()
        require(self.device is not None, "device", "is required where there are no groups", None)

    def _check_size(self) -> None:
        """Multiplies no further than needed: the product of many large sizes takes time by the square of their number.

        The error shows the product of the first levels, which are all of them in any cluster that there is.
        """
        devices = 1
        for level in self.levels:
            devices *= level.size
            if devices > MAX_DEVICES:
                shown = prod(level.size for level in self.levels[:SHOWN_LEVELS])
                raise InvalidInputError("levels", f"must make at most {MAX_DEVICES} devices together", shown)

    def _check_groups(self) -> None:
        counted = sum(group.count for group in self.groups)
        require(counted == self.devices, "groups", f"must count the {self.devices} devices of the levels", counted)
        first = self.groups[0].device
        require(self.device in (None, first), "device", "must be the first group's, or left out", self.device)
        object.__setattr__(self, "device", first)
        types = {group.device for group in self.groups}
        rule = "must describe devices of one name in one way"
        require_unique("groups", rule, sorted(device.name for device in types))

    @property
    def types(self) -> tuple[Device, ...]:
        """The types of its devices, in the order in which they come."""
        return tuple(dict.fromkeys(group.device for group in self.groups)) or (self.device,)

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
        """What a transfer among these devices crosses: slowest bandwidth, longest latency on the way.

        Devices [0, size of level 0) share level 0, and so on outwards. A single device crosses nothing: the
        innermost level is returned, which costs nothing where nothing is sent.
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
            bandwidth_bytes_per_s=min(level.bandwidth_bytes_per_s for level in crossed),
            latency_s=max(level.latency_s for level in crossed),
        )
