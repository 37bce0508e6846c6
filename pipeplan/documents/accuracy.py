"""Accuracy: the basis of estimated seconds, and the errors of such predictions.

KERNELS are the mean errors that `python -m benchmarks.kernels` prints, ITERATIONS those of `python -m
benchmarks.truth`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeplan.documents.cluster import known_types
from pipeplan.documents.profile import DTYPE_BYTES, Profile

_BITS = {"fp8": 8, "mxfp8": 8, "nvfp4": 4}
"""The bits in which products compute, by precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelErrors:
    """The mean errors of the kernels of one generation: of products by their bits, and of attention.

    `attention` is None where it was not measured, and is another generation's.
    """

    generation: str
    products: Mapping[int, float]
    attention: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationErrors:
    """The mean error of the seconds of measured iterations, of a generation of GPUs and an engine: of mixtures of
    experts, or of dense models.
    """

    generation: str
    engine: str
    mixture: bool
    rows: int
    error: float


_A100 = KernelErrors(generation="A100", products={16: 0.066}, attention=0.044)
_H100 = KernelErrors(generation="H100", products={16: 0.060, 8: 0.044}, attention=0.064)

KERNELS: Mapping[str, KernelErrors] = {
    "a100-40gb": _A100,
    "a100-80gb": _A100,
    "a800": _A100,
    "h100-sxm": _H100,
    "h800": _H100,
    "h200-sxm": KernelErrors(generation="H200", products={16: 0.064, 8: 0.047}, attention=0.051),
    "b200": KernelErrors(generation="B200", products={16: 0.084, 8: 0.055, 4: 0.118}, attention=0.067),
    "b300": KernelErrors(generation="B300", products={16: 0.094, 8: 0.056, 4: 0.118}),
    "gb200": KernelErrors(generation="GB200", products={16: 0.088, 8: 0.053, 4: 0.121}),
    "gb300": KernelErrors(generation="GB300", products={16: 0.074, 8: 0.052, 4: 0.115}),
    "l40s": KernelErrors(generation="L40S", products={16: 0.122, 8: 0.137}),
}
"""By the datasheets that have kernels of their own. An A800 and an H800 compute as an A100 and an H100."""

ITERATIONS = (
    IterationErrors(generation="A100", engine="deepspeed", mixture=False, rows=126, error=0.124),
    IterationErrors(generation="A100", engine="fsdp", mixture=False, rows=100, error=0.098),
    IterationErrors(generation="A100", engine="megatron", mixture=False, rows=9, error=0.049),
    IterationErrors(generation="B200", engine="megatron", mixture=False, rows=1, error=0.059),
    IterationErrors(generation="B200", engine="megatron", mixture=True, rows=4, error=0.315),
    IterationErrors(generation="B300", engine="megatron", mixture=True, rows=4, error=0.345),
    IterationErrors(generation="GB200", engine="fsdp", mixture=False, rows=1, error=0.339),
    IterationErrors(generation="GB200", engine="megatron", mixture=False, rows=9, error=0.048),
    IterationErrors(generation="GB200", engine="megatron", mixture=True, rows=3, error=0.244),
    IterationErrors(generation="GB300", engine="fsdp", mixture=False, rows=1, error=0.248),
    IterationErrors(generation="GB300", engine="megatron", mixture=False, rows=4, error=0.284),
    IterationErrors(generation="GB300", engine="megatron", mixture=True, rows=3, error=0.224),
    IterationErrors(generation="H100", engine="fsdp", mixture=False, rows=66, error=0.238),
    IterationErrors(generation="H100", engine="fsdp", mixture=True, rows=4, error=0.174),
    IterationErrors(generation="H100", engine="megatron", mixture=False, rows=20, error=0.062),
    IterationErrors(generation="H100", engine="megatron", mixture=True, rows=3, error=0.362),
    IterationErrors(generation="H200", engine="megatron", mixture=False, rows=2, error=0.002),
)


def basis_of(profiles: Sequence[Profile], engine: str) -> str | None:
    """A sentence on the basis of a plan's seconds for this engine; None where profiles were measured."""
    found = [_sentence(each, engine) for each in profiles if each.estimated]
    return "; ".join(dict.fromkeys(found)) or None


def _sentence(profile: Profile, engine: str) -> str:
    keys = known_types(profile.device.name)
    errors = KERNELS.get(next(iter(keys))) if len(keys) == 1 else None
    if errors is None:
        what = f"the vendor's peaks in the datasheet of {profile.device.name}, of which no kernels were measured"
    else:
        bits = _BITS.get(profile.precision or "", 8 * DTYPE_BYTES[profile.dtype])
        known = [(f"{bits}-bit products", errors.products.get(bits)), ("attention", errors.attention)]
        off = ", ".join(f"{kind} {error:.0%}" for kind, error in known if error is not None)
        parts = [f"{off} off on average"] if off else []
        parts += [f"{kind} not measured" for kind, error in known if error is None]
        what = f"kernels measured on this GPU ({errors.generation}: {', '.join(parts)})"
    generation = None if errors is None else errors.generation
    mixture = any(kind.expert_parameters > 0 for form in profile.forms for kind in form.kinds)
    models = "mixtures" if mixture else "dense models"
    wanted = generation, engine, mixture
    rows = next((each for each in ITERATIONS if (each.generation, each.engine, each.mixture) == wanted), None)
    if rows is None:
        return f"estimated from {what}; no measured iteration of {models} on this GPU with {engine} was predicted yet"
    return (
        f"estimated from {what}; such predictions were {rows.error:.0%} off on average over {rows.rows} measured "
        f"iteration{'s' * (rows.rows > 1)} ({models}, {rows.generation}, {engine})"
    )
