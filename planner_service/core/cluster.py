"""Cluster: how many devices there are, and what lies between any two of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from planner_service.core.errors import require, require_amount, require_count
from planner_service.core.profile import STRICT, Device

MAX_DEVICES = 1_000_000


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
class Cluster:
    """Equal devices under levels, from the inside out: 8 GPUs a server over NVLink, 8 servers over Ethernet.

    Devices are numbered so that neighbours are near: device r sits in server `r // levels[0].size`.
    """

    device: Device
    levels: tuple[Level, ...]

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require(len(self.levels) > 0, "levels", "must hold at least one level", self.levels)
        rule = f"must make at most {MAX_DEVICES} devices together"
        require(self.devices <= MAX_DEVICES, "levels", rule, self.devices)

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
