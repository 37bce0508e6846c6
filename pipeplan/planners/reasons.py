"""Reasons: texts that say why a configuration is not the answer, in one line each."""

from typing import Protocol

from pipeplan.documents.forms import WHOLE, Form
from pipeplan.documents.plan import Alternative, Reason

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def slower(throughput_samples_per_s: float) -> str:
    """It would train, at this rate."""
    return f"slower: {throughput_samples_per_s:.4g} samples/s"


def at_most(throughput_samples_per_s: float) -> str:
    """It was not split into stages, because it could not train faster than this."""
    return f"slower: at most {throughput_samples_per_s:.4g} samples/s"


def as_fast(throughput_samples_per_s: float) -> str:
    """It would train at the same rate as the plan that the rules for ties prefer."""
    return f"as fast: {throughput_samples_per_s:.4g} samples/s, on no fewer devices"


class Shaped(Protocol):
    """All of a configuration but its stages, as each planner has it."""

    @property
    def schedule(self) -> str: ...
    @property
    def depth(self) -> int: ...
    @property
    def width(self) -> int | None: ...
    @property
    def microbatch_size(self) -> int: ...
    @property
    def microbatches(self) -> int: ...


def unpriced(
    shape: Shaped,
    reason: str,
    *,
    recompute: bool,
    closed_form_samples_per_s: float | None = None,
    memory_bytes: int | None = None,
    form: Form = WHOLE,
    sharding: str = "none",
    offload: str = "none",
    replicate: int = 1,
    graphs: bool = False,
    a2a_overlap: bool = False,
    offload_share: float = 1.0,
    chunks: int = 1,
) -> Alternative:
    """A plan's entry for a configuration that was not played."""
    return Alternative(
        schedule=shape.schedule,
        depth=shape.depth,
        width=shape.width,
        microbatch_size=shape.microbatch_size,
        microbatches=shape.microbatches,
        recompute=recompute,
        throughput_samples_per_s=None,
        memory_bytes=memory_bytes,
        reason=reason,
        closed_form_samples_per_s=closed_form_samples_per_s,
        form=form,
        sharding=sharding,
        offload=offload,
        replicate=replicate,
        graphs=graphs,
        a2a_overlap=a2a_overlap,
        offload_share=offload_share,
        chunks=chunks,
    )


def shortfall(stage: int, missing_bytes: int) -> str:
    """The stage that does not fit, and by how much."""
    return f"memory: stage {stage} misses {readable(missing_bytes)}"


def memory_reason(what: str, *, stage: int, missing_bytes: int, device_bytes: int, configurations: int) -> Reason:
    """The nearest miss of a class of configurations."""
    return Reason(
        rule=f"a stage must fit the device's usable memory ({readable(device_bytes)})",
        detail=f"{what}: stage {stage} misses {readable(missing_bytes)}",
        configurations=configurations,
        stage=stage,
        missing_bytes=missing_bytes,
    )


def readable(size_bytes: int) -> str:
    """Bytes to three or four digits in the largest unit below them, powers of 1024 as all sizes of memory."""
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"
