"""Calibration: the cost terms that measured runs show, and how they correct a profile and a cluster.

A calibration is applied to the planner's inputs, never to its answers: planners and the simulator see a profile and a
cluster with the figures that the runs showed, and do not know of the calibration.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from pipeplan.documents.cluster import Cluster, is_same, is_unknown
from pipeplan.documents.names import STRICT, require_line
from pipeplan.documents.profile import DTYPE_BYTES, Device, Model, Profile
from pipeplan.errors import require, require_amount, require_count

OVERHEADS = (
    "forward_without_graph",
    "recompute",
    "backward_after_forward",
    "instruction_s",
    "message_s_per_byte",
    "update_s_per_byte",
    "version_s_per_byte",
    "exchange_factor",
)
"""The terms that replace those of the profile's `overheads`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One corrected term: the median of the observations, the interquartile range around it, and their number."""

    value: float
    spread: float = 0.0
    observations: int = 1

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_amount("value", self.value)
        require_amount("spread", self.spread)
        require_count("observations", self.observations)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFactors:
    """The factors of the blocks' measured seconds, in the profile's order.

    `observations` counts the stages that runs showed; `spread` is the root mean square of their deviations from the
    factors, as a share.
    """

    values: tuple[float, ...]
    spread: float = 0.0
    observations: int = 1

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        for value in self.values:
            require_amount("values", value, positive=True)
        require_amount("spread", self.spread)
        require_count("observations", self.observations)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTerms:
    """A level of the network, measured by transfers between stages."""

    level: int
    bandwidth_bytes_per_s: float
    latency_s: float
    observations: int

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_count("level", self.level, at_least=0)
        require_amount("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, positive=True)
        require_amount("latency_s", self.latency_s)
        require_count("observations", self.observations)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUsed:
    """A run from which the calibration was made: its measured throughput, and its predictions without and with the
    calibration.
    """

    plan_id: str
    schedule: str
    depth: int
    workers: int
    microbatch_size: int
    microbatches: int
    measured_samples_per_s: float
    profile_samples_per_s: float
    calibrated_samples_per_s: float

    __pydantic_config__: ClassVar = STRICT

    @property
    def error_before(self) -> float:
        """(predicted - measured) / measured of the throughput, from the profile alone."""
        return self.profile_samples_per_s / self.measured_samples_per_s - 1

    @property
    def error_after(self) -> float:
        """The same error with the calibration."""
        return self.calibrated_samples_per_s / self.measured_samples_per_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The cost terms that runs of one model on one device showed. None, or no entry: the runs do not show it.

    `profile_id` and `cluster_id` name the corrected documents. The terms by the names that they have in a profile's
    `overheads` replace those; the factors multiply the blocks' seconds and activation bytes at every microbatch size.
    `context_bytes` is what a process held beside the tensors, `allocator_reserve` the share of the rest that a GPU's
    allocator held without a tensor being there.
    """

    model: Model
    device: str
    dtype: str
    profile_id: str
    cluster_id: str
    runs: tuple[RunUsed, ...]
    forward: BlockFactors | None = None
    backward: BlockFactors | None = None
    backward_input: BlockFactors | None = None
    backward_weight: BlockFactors | None = None
    forward_without_graph: Term | None = None
    recompute: Term | None = None
    backward_after_forward: Term | None = None
    instruction_s: Term | None = None
    update_s_per_byte: Term | None = None
    version_s_per_byte: Term | None = None
    exchange_factor: Term | None = None
    levels: tuple[LevelTerms, ...] = ()
    activation_factor: Term | None = None
    context_bytes: Term | None = None
    allocator_reserve: Term | None = None
    message_s_per_byte: Term | None = None

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_line("device", self.device)
        require(self.dtype in DTYPE_BYTES, "dtype", f"must be one of {', '.join(DTYPE_BYTES)}", self.dtype)
        lengths = {len(factors.values) for factors in self.block_factors if factors is not None}
        require(len(lengths) <= 1, "forward", "must have as many values as the other factors", sorted(lengths))

    @property
    def block_factors(self) -> tuple[BlockFactors | None, ...]:
        """The four kinds."""
        return (self.forward, self.backward, self.backward_input, self.backward_weight)


def require_match(calibration: Calibration, profile: Profile, cluster: Cluster) -> None:
    """Raises InvalidInputError if the calibration is of another model, device or dtype, or of other blocks."""
    _same("calibration.model", calibration.model.name, profile.model.name)
    _same("calibration.device", calibration.device, profile.device.name)
    _same("calibration.dtype", calibration.dtype, profile.dtype)
    for factors in calibration.block_factors:
        if factors is not None:
            _same("calibration.blocks", len(factors.values), len(profile.blocks))
    for terms in calibration.levels:
        rule = f"must be one of the cluster's {len(cluster.levels)} levels, from 0"
        require(terms.level < len(cluster.levels), "calibration.levels", rule, terms.level)


def apply(calibration: Calibration, profile: Profile, cluster: Cluster) -> tuple[Profile, Cluster]:
    """The profile and the cluster as the runs showed them. Raises InvalidInputError if they do not match."""
    require_match(calibration, profile, cluster)
    return corrected_profile(calibration, profile), corrected_cluster(calibration, cluster)


def corrected_profile(calibration: Calibration, profile: Profile) -> Profile:
    """The profile with every term that the calibration has."""
    known = {name: getattr(calibration, name) for name in OVERHEADS}
    terms = {name: term.value for name, term in known.items() if term is not None}
    if "instruction_s" in terms and any(run.depth > 1 for run in calibration.runs):
        terms.setdefault("message_s_per_byte", 0.0)  # the other has all bytes of the runs' messages
    kept = calibration.activation_factor.value if calibration.activation_factor else 1.0

    blocks = []
    for index, block in enumerate(profile.blocks):
        forward, backward = _factor(calibration.forward, index), _factor(calibration.backward, index)
        # A split backward whose halves were not observed is corrected like the whole.
        backward_input = _factor(calibration.backward_input, index, unknown=backward)
        backward_weight = _factor(calibration.backward_weight, index, unknown=backward)
        measurements = tuple(
            replace(
                measured,
                forward_s=measured.forward_s * forward,
                backward_s=measured.backward_s * backward,
                backward_input_s=_scaled(measured.backward_input_s, backward_input),
                backward_weight_s=_scaled(measured.backward_weight_s, backward_weight),
                activation_bytes=round(measured.activation_bytes * kept),
                shared_bytes=_kept(measured.shared_bytes, kept),
                split_activation_bytes=_kept(measured.split_activation_bytes, kept),
                split_shared_bytes=_kept(measured.split_shared_bytes, kept),
                kept_output_bytes=min(measured.kept_output_bytes, round(measured.activation_bytes * kept)),
            )
            for measured in block.measurements
        )
        blocks.append(replace(block, measurements=measurements))

    return replace(
        profile,
        device=_corrected_device(calibration, profile.device),
        blocks=tuple(blocks),
        overheads=replace(profile.overheads, **terms),
    )


def corrected_cluster(calibration: Calibration, cluster: Cluster) -> Cluster:
    """The cluster with the levels that the runs' transfers crossed, and the memory beside the tensors."""
    levels = list(cluster.levels)
    for terms in calibration.levels:
        known = levels[terms.level]
        own = known.device_bandwidth_bytes_per_s  # transfers show this one, if there is one
        levels[terms.level] = replace(
            known,
            bandwidth_bytes_per_s=terms.bandwidth_bytes_per_s / known.device_share,
            device_bandwidth_bytes_per_s=own and terms.bandwidth_bytes_per_s,
            latency_s=terms.latency_s,
        )
    return replace(cluster, device=_corrected_device(calibration, cluster.device), levels=tuple(levels))


def mean_absolute_error(errors: Sequence[float]) -> float:
    """The mean of their absolute values; 0 of none."""
    return sum(abs(error) for error in errors) / len(errors) if errors else 0.0


def _same(field: str, given: object, wanted: object) -> None:
    require(given == wanted, field, f"must be the profile's, {wanted!r}", given)


def _corrected_device(calibration: Calibration, device: Device) -> Device:
    of_type = is_unknown(calibration.device) or is_same(calibration.device, device.name)
    if calibration.context_bytes is None or not of_type:
        return device
    held_bytes = min(round(calibration.context_bytes.value), device.memory_bytes - 1)
    reserve = device.allocator_reserve if calibration.allocator_reserve is None else calibration.allocator_reserve.value
    return replace(device, context_bytes=held_bytes, allocator_reserve=reserve)


def _kept(size_bytes: int | None, factor: float) -> int | None:
    return None if size_bytes is None else round(size_bytes * factor)


def _factor(factors: BlockFactors | None, index: int, *, unknown: float = 1.0) -> float:
    return unknown if factors is None else factors.values[index]


def _scaled(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor
