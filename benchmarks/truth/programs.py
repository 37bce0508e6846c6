"""Programs: what ran the rows of a source, where their columns do not say it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProgram:
    """What ran a source's rows.

    `engine` is one of `documents.engines`. `network_bytes_per_s` is a node's; None: the server's. A compiler leaves the
    share `compiled` of what operations without products take; the allocator holds the share `reserve` on top of what is
    in use where memory is fullest.
    """

    engine: str
    network_bytes_per_s: float | None = None
    compiled: float = 1.0
    reserve: float = 0.0


_VTRAIN_BYTES_PER_S = 100e9
"""Of a node: 800 Gb/s."""

PROGRAMS: Mapping[str, MeasuredProgram] = {
    "vtrain": MeasuredProgram(engine="deepspeed", network_bytes_per_s=_VTRAIN_BYTES_PER_S),
}
"""By the beginning of a source; the first that fits."""

SHARDED = MeasuredProgram(engine="fsdp", compiled=0.44, reserve=0.145)
UNSHARDED = MeasuredProgram(engine="megatron")


def program_of(source: str, sharding: str) -> MeasuredProgram:
    """What ran a row of this source whose states are shared out so (the data's words)."""
    if sharding != "none":
        return SHARDED
    return next((program for start, program in PROGRAMS.items() if source.startswith(start)), UNSHARDED)
