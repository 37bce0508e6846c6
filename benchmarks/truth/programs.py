"""Programs: what ran the rows of a source, where their columns do not say it.

vTrain's rows of one node are its simulator's answers from traces of single layers, those of several nodes are measured
iterations of Megatron-DeepSpeed (docs/decisions/0077). What was traced is public (github.com/VIA-Research/vTrain,
src/predictor.py and src/model): one device's share of a model of 50,257 tokens, whatever the configuration's vocabulary
is, with torch's loss of the share's logits in 16 bits and a matrix of the head's own. No forward was run twice: layers
2,048 wide would reach 98 % of an A100's peak in products and in memory at a time. How iterations were put together from
these traces is a `Trace` (docs/decisions/0137).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What is added to traces of passes, in which nothing was exchanged.

    All-reduces reach the share `link_efficiency` of the link, and take `exchange_s` beyond their hops and bytes. A
    stage waits while it sends, at `message_bytes_per_s`.
    """

    link_efficiency: float
    exchange_s: float
    message_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProgram:
    """What ran a source's rows.

    `engine` is one of `documents.engines`, `constants` the name of its EngineConstants. `vocabulary` is that of the
    program's own model, of which a device has its share alone; None: the row's. `recompute` is what was run again;
    None: what the row says. `network_bytes_per_s` is a node's; None: the server's. `trace`: None if iterations were
    measured.
    """

    engine: str
    constants: str
    vocabulary: int | None = None
    recompute: str | None = None
    network_bytes_per_s: float | None = None
    trace: Trace | None = None


_VTRAIN_BYTES_PER_S = 100e9
"""Of a node: 800 Gb/s."""

_VTRAIN_TRACE = Trace(link_efficiency=0.7, exchange_s=3.5e-5, message_bytes_per_s=800 * 2**30 / 8 / 4)
"""Its tables of all-reduces among 2, 4 and 8 A100s (trace/a100) have 53, 56 and 93 us for 2 MiB, and 405, 544 and 580
for 64: within a quarter this start, the hops and this share of NVLink. Messages have a quarter of 800
Gb/s, in units of 2**30 (`_compute_p2p_latency`).
"""

PROGRAMS: Mapping[str, MeasuredProgram] = {
    "vtrain-single-node": MeasuredProgram(
        engine="deepspeed",
        constants="vtrain-layers",
        vocabulary=50257,
        recompute="none",
        network_bytes_per_s=_VTRAIN_BYTES_PER_S,
        trace=_VTRAIN_TRACE,
    ),
    "vtrain": MeasuredProgram(engine="deepspeed", constants="deepspeed", network_bytes_per_s=_VTRAIN_BYTES_PER_S),
}
"""By the beginning of a source; the first that fits."""

SHARDED = MeasuredProgram(engine="fsdp", constants="fsdp")
UNSHARDED = MeasuredProgram(engine="megatron", constants="megatron")


def program_of(source: str, sharding: str) -> MeasuredProgram:
    """What ran a row of this source whose states are shared out so (the data's words)."""
    if sharding != "none":
        return SHARDED
    return next((program for start, program in PROGRAMS.items() if source.startswith(start)), UNSHARDED)
