"""Collectives: their measured seconds among the devices of a node.

The numbers of each type are fitted to NCCL's collectives among 2, 4 and 8 of its devices (ai-dynamo/aiconfigurator,
NVIDIA, Apache-2.0) by `python -m benchmarks.kernels`, which prints their errors.
"""

from dataclasses import dataclass
from typing import ClassVar

from pipeplan.documents.names import STRICT
from pipeplan.errors import require_amount


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveShares:
    """What one kind of collective takes among the units of a level, by two protocols of which the faster runs.

    The first starts sooner, the second moves more: NCCL's LL128 and Simple. Each takes its start, and the bytes that
    pass a unit's port at a share of the port's bandwidth. Starts are those among 8 units; among n of them they are
    (n / 8) ** growth times as long.
    """

    start_s: float
    share: float
    bulk_start_s: float
    bulk_share: float
    growth: float

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        for name in ("start_s", "bulk_start_s", "growth"):
            require_amount(name, getattr(self, name))
        for name in ("share", "bulk_share"):
            require_amount(name, getattr(self, name), positive=True)

    def seconds(self, units: int, port_bytes: float, bandwidth_bytes_per_s: float) -> tuple[float, float]:
        """The seconds of the start, and of the bytes."""
        longer = (units / 8) ** self.growth
        first = self.start_s * longer, port_bytes / (self.share * bandwidth_bytes_per_s)
        bulk = self.bulk_start_s * longer, port_bytes / (self.bulk_share * bandwidth_bytes_per_s)
        return min(first, bulk, key=sum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Measured collectives: all-gathers and reduce-scatters (`gather`), all-reduces, and all-to-alls."""

    gather: CollectiveShares
    all_reduce: CollectiveShares
    all_to_all: CollectiveShares

    __pydantic_config__: ClassVar = STRICT


def _shares(start_us: float, share: float, bulk_start_us: float, bulk_share: float, growth: float) -> CollectiveShares:
    return CollectiveShares(
        start_s=start_us / 1e6, share=share, bulk_start_s=bulk_start_us / 1e6, bulk_share=bulk_share, growth=growth
    )


MEASURED_COLLECTIVES: dict[str, Collectives] = {
    "a100": Collectives(
        gather=_shares(17, 0.34, 65, 0.66, 0.25),
        all_reduce=_shares(24, 0.4, 95, 0.72, 0.45),
        all_to_all=_shares(15, 0.26, 38, 0.64, 0.1),
    ),
    "h100": Collectives(
        gather=_shares(9.5, 0.32, 30, 0.7, 0.25),
        all_reduce=_shares(15, 0.35, 36, 0.76, 0.5),
        all_to_all=_shares(12, 0.54, 34, 0.71, 0),
    ),
    "h200": Collectives(
        gather=_shares(9.5, 0.3, 28, 0.7, 0.3),
        all_reduce=_shares(15, 0.35, 33, 0.76, 0.5),
        all_to_all=_shares(11.5, 0.54, 33, 0.72, 0),
    ),
    "b200": Collectives(
        gather=_shares(15, 0.26, 41, 0.68, 0.3),
        all_reduce=_shares(23.5, 0.32, 66, 0.72, 0.55),
        all_to_all=_shares(15.5, 0.44, 44, 0.66, 0),
    ),
    "b300": Collectives(
        gather=_shares(15.5, 0.28, 42, 0.68, 0.35),
        all_reduce=_shares(23, 0.32, 61, 0.72, 0.55),
        all_to_all=_shares(15, 0.46, 72, 0.71, 0),
    ),
    "gb200": Collectives(
        gather=_shares(15.5, 0.24, 38, 0.64, 0.3),
        all_reduce=_shares(23.5, 0.3, 64, 0.7, 0.55),
        all_to_all=_shares(16, 0.46, 66, 0.62, 0),
    ),
    "gb300": Collectives(
        gather=_shares(14.5, 0.24, 37, 0.64, 0.3),
        all_reduce=_shares(21.5, 0.3, 59, 0.7, 0.5),
        all_to_all=_shares(15.5, 0.46, 57, 0.62, 0),
    ),
}
"""By the type whose devices were measured, as `python -m benchmarks.kernels --fit` prints them."""
