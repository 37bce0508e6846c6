"""Profile: what a model costs, block by block, measured at one or more microbatch sizes."""

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from pipeplan.documents.forms import ModelForm
from pipeplan.documents.identity import Same
from pipeplan.documents.measurement import Measurement, interpolate
from pipeplan.documents.names import STRICT, parse_spec, require_line, require_name
from pipeplan.documents.tied import TiedWeights
from pipeplan.errors import require, require_amount, require_count, require_unique

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

AUTOCASTS = ("bfloat16", "float16")
"""What blocks with float32 weights may compute in."""


def require_autocast(autocast: str | None, dtype: str) -> None:
    """Raises InvalidInputError for a type that autocast does not have, or weights that it is not for."""
    require(autocast in (None, *AUTOCASTS), "autocast", f"must be one of {', '.join(AUTOCASTS)}", autocast)
    rule = f"must be left out for weights in {dtype}: it is for those in float32"
    require(autocast is None or dtype == "float32", "autocast", rule, autocast)


PRECISIONS: Mapping[str, float] = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""What linear layers with bfloat16 weights may compute in, and the bytes of an element with its scales. Transformer
Engine's names: 8 bits with a scale for each tensor, 8 bits with one for each 32 elements, 4 bits with one for each 16.
"""


def require_precision(precision: str | None, dtype: str) -> None:
    """Raises InvalidInputError for a precision that is none of ours, or weights that it is not for."""
    require(precision in (None, *PRECISIONS), "precision", f"must be one of {', '.join(PRECISIONS)}", precision)
    rule = f"must be left out for weights in {dtype}: it is for those in bfloat16"
    require(precision is None or dtype == "bfloat16", "precision", rule, precision)


def numbers(dtype: str, autocast: str | None, precision: str | None = None) -> str:
    """In words, what weights are in and what is computed in."""
    computes = autocast or (precision and f"{precision} in linear layers")
    return f"{dtype}, computing in {computes}" if computes else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or core) and the memory that a worker on it may use.

    `context_bytes` is what the framework, its kernels and communicators take before any tensor; `allocator_reserve` is
    the share of the rest that the allocator holds beyond tensors.
    """

    name: str
    memory_bytes: int
    context_bytes: int = 0
    allocator_reserve: float = 0.0

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_line("name", self.name)
        require_count("memory_bytes", self.memory_bytes)
        require_count("context_bytes", self.context_bytes, at_least=0)
        require(self.context_bytes < self.memory_bytes, "context_bytes", "must leave memory", self.context_bytes)
        require_amount("allocator_reserve", self.allocator_reserve)
        require(self.allocator_reserve < 1, "allocator_reserve", "must be below 1", self.allocator_reserve)

    @property
    def usable_bytes(self) -> int:
        """The bytes that tensors may take."""
        return int((self.memory_bytes - self.context_bytes) * (1 - self.allocator_reserve))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One process's use of a GPU: the most by tensors, the most by the allocator, and the rest at its end.

    `context_bytes` is the rest: the driver's context, the kernels that are loaded, and communicators' buffers.
    """

    allocated_bytes: int
    reserved_bytes: int
    context_bytes: int

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        for field in ("allocated_bytes", "reserved_bytes", "context_bytes"):
            require_count(field, getattr(self, field), at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The measured model; an agent builds it from `spec`."""

    name: str
    spec: str | None = None

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_name("name", self.name)
        if self.spec is not None:
            parse_spec(self.spec, field="spec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The unit that is profiled and never cut: its weights and its measurements by microbatch size.

    `cast_bytes` are those of the copies of 16 bits that autocast makes of its weights, once a version: all microbatches
    share them. `update_s` is what an update of its weights takes beyond `Overheads.update_s_per_byte` of their bytes:
    many small tensors take longer than a large one. `frozen_bytes` are those of the weights that are not trained.
    `buffer_bytes` come beside the weights: they are those of the modules' buffers.
    """

    name: str
    weight_bytes: int
    measurements: tuple[Measurement, ...]
    cast_bytes: int = 0
    update_s: float = 0.0
    frozen_bytes: int = 0
    buffer_bytes: int = 0

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_name("name", self.name)
        require_amount("weight_bytes", self.weight_bytes)
        for field in ("frozen_bytes", "buffer_bytes"):
            require_count(field, getattr(self, field), at_least=0)
        rule = f"must be at most weight_bytes, {self.weight_bytes}, of which it is a part"
        require(self.frozen_bytes <= self.weight_bytes, "frozen_bytes", rule, self.frozen_bytes)
        require_amount("update_s", self.update_s)
        require_count("cast_bytes", self.cast_bytes, at_least=0)
        rule = f"must be at most half of weight_bytes, {self.weight_bytes}: 16 bits for each 32"
        require(2 * self.cast_bytes <= self.weight_bytes, "cast_bytes", rule, self.cast_bytes)
        rule = "must hold at least one measurement"
        require(len(self.measurements) > 0, "measurements", rule, self.measurements)
        sizes = [m.microbatch_size for m in self.measurements]
        require_unique("measurements", "must not measure a microbatch size twice", sizes)

    @property
    def trained_bytes(self) -> int:
        """The weights that are trained: they alone have versions, gradients, optimizer states and exchanges."""
        return self.weight_bytes - self.frozen_bytes

    @property
    def untrained_bytes(self) -> int:
        """What a worker holds once from start to end: frozen weights and buffers."""
        return self.frozen_bytes + self.buffer_bytes

    def at(self, microbatch_size: int) -> Measurement:
        """The measurement at this size; one must exist (the profile holds the same sizes for all blocks)."""
        return next(m for m in self.measurements if m.microbatch_size == microbatch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """The measured costs of a step besides the blocks.

    `update_s_per_byte` is the time of the optimizer's update for each byte of weights, `update_s` what every update
    of a stage takes on top. `version_s_per_byte` is added
    where the update must leave the version before it intact. `instruction_s` is added to every forward, backward, send
    and receive, `message_s_per_byte` for each byte to sends and receives: what the rank itself is busy with, beside
    the link. `exchange_factor` is the time of a gradient exchange over that of its bytes on the slowest link.

    The other three are shares of the blocks' own times:

    - `forward_without_graph`: of a forward that keeps nothing for a backward (on a stage that recomputes);
    - `recompute`: of a forward that runs again;
    - `backward_after_forward`: of a backward right after its microbatch's forward, whose data is still in caches (on
      last stages, and after a recomputation).
    """

    update_s_per_byte: float = 0.0
    version_s_per_byte: float = 0.0
    instruction_s: float = 0.0
    forward_without_graph: float = 1.0
    recompute: float = 1.0
    backward_after_forward: float = 1.0
    exchange_factor: float = 1.0
    update_s: float = 0.0
    message_s_per_byte: float = 0.0

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        amounts = ("update_s_per_byte", "update_s", "version_s_per_byte", "instruction_s", "message_s_per_byte")
        for field in amounts:
            require_amount(field, getattr(self, field))
        for field in ("forward_without_graph", "recompute", "backward_after_forward", "exchange_factor"):
            require_amount(field, getattr(self, field), positive=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a profile was measured: rounds before and during, the clock, and how many devices were loaded at once.

    `rounds` is the fewest of any microbatch size. A profile that was computed from a datasheet has 0 rounds.
    `standard_error` is that of the mean time of a round, relative to it, of the size where it is largest.
    """

    warm_up_rounds: int
    rounds: int
    clock: str
    standard_error: float | None = None
    concurrent_devices: int = 1
    torch_version: str | None = None

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_count("warm_up_rounds", self.warm_up_rounds, at_least=0)
        require_count("rounds", self.rounds, at_least=0)
        require_amount("standard_error", self.standard_error or 0.0)
        require_count("concurrent_devices", self.concurrent_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model's blocks, in the order in which data passes them, as measured on one type of device.

    `edges` are there where the model is a graph: (i, j) says that block j reads the output of block i, and i < j. None
    is a chain. `estimated` says that the measurements were computed from a datasheet, not measured. `forms` has what
    one device does where several share the blocks. `autocast` is what the blocks' float32 weights computed in. `tied`
    are the trained weights that several blocks use, `tied_frozen` the frozen ones. `notes` are sentences on what an
    estimate leaves out of the model, and on degrees of which it has no forms, with the reason. `precision` is what
    linear layers compute in, where that is not the dtype.
    """

    model: Model
    device: Device
    dtype: str
    blocks: tuple[Block, ...]
    overheads: Overheads = Overheads()
    method: Method | None = None
    edges: tuple[tuple[int, int], ...] | None = None
    estimated: bool = False
    forms: tuple[ModelForm, ...] = ()
    autocast: str | None = None
    tied: tuple[TiedWeights, ...] = ()
    tied_frozen: tuple[TiedWeights, ...] = ()
    notes: tuple[str, ...] = ()
    precision: str | None = None

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        for sentence in self.notes:
            require_line("notes", sentence)
        require(self.dtype in DTYPE_BYTES, "dtype", f"must be one of {', '.join(DTYPE_BYTES)}", self.dtype)
        require_autocast(self.autocast, self.dtype)
        require_precision(self.precision, self.dtype)
        require(len(self.blocks) > 0, "blocks", "must hold at least one block", self.blocks)
        require_unique("blocks", "must not hold a name twice", [b.name for b in self.blocks])
        sizes = _sizes(self.blocks[0])
        for i, block in enumerate(self.blocks):
            rule = "must be 0 in a profile without autocast"
            require(self.autocast is not None or not block.cast_bytes, f"blocks.{i}.cast_bytes", rule, block.cast_bytes)
            rule = f"must measure the same microbatch sizes as the first block, {list(sizes)}"
            require(_sizes(block) == sizes, f"blocks.{i}.measurements", rule, list(_sizes(block)))
        for source, reader in self.edges or ():
            rule = f"must join two of the {len(self.blocks)} blocks, from an earlier one to a later one that reads it"
            require(0 <= source < reader < len(self.blocks), "edges", rule, (source, reader))
        require_unique("edges", "must not hold an edge twice", self.edges or ())
        for i, block in enumerate(self.blocks if self.edges is not None else ()):
            rule = "must be left out in a graph (edges), where a block may follow several others, and send others' on"
            for field, nothing in (("shared_bytes", None), ("kept_output_bytes", 0), ("passed_bytes", 0)):
                known = [getattr(m, field) for m in block.measurements if getattr(m, field) != nothing]
                require(not known, f"blocks.{i}.measurements.{field}", rule, known)
        require_unique("forms", "must not hold a form twice", [each.form for each in self.forms])
        for i, each in enumerate(self.forms):
            rule = f"must have one entry for each of the {len(self.blocks)} blocks"
            require(len(each.blocks) == len(self.blocks), f"forms.{i}.blocks", rule, len(each.blocks))
        for field, weights in (("tied", "weights"), ("tied_frozen", "frozen weights")):
            every: tuple[TiedWeights, ...] = getattr(self, field)
            for i, tied in enumerate(every):
                rule = f"must be below the number of blocks ({len(self.blocks)})"
                require(max(tied.blocks) < len(self.blocks), f"{field}.{i}", rule, max(tied.blocks))
                rule = f"must be at most the {weights} of block {tied.block}"
                block = self.blocks[tied.block]
                most = block.frozen_bytes if field == "tied_frozen" else block.trained_bytes
                require(tied.weight_bytes <= most, f"{field}.{i}.weight_bytes", rule, tied.weight_bytes)

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The measured sizes, ascending; the same for every block."""
        return _sizes(self.blocks[0])

    @property
    def weight_bytes(self) -> int:
        """The whole model's weights, in the profile's dtype."""
        return sum(b.weight_bytes for b in self.blocks)

    def at(self, microbatch_size: int) -> tuple[Measurement, ...]:
        """Every block at one size: as measured, or interpolated between the two sizes measured next to it.

        Raises InvalidInputError outside of the measured sizes.
        """
        measured = self.microbatch_sizes
        if microbatch_size in measured:
            return tuple(b.at(microbatch_size) for b in self.blocks)
        rule = f"must be one of the measured sizes {list(measured)}, or lie between them"
        require(measured[0] < microbatch_size < measured[-1], "microbatch_size", rule, microbatch_size)
        return _between(Same(self), microbatch_size)


@lru_cache(maxsize=32)
def _between(profile: Same, microbatch_size: int) -> tuple[Measurement, ...]:
    """Every block between two measured sizes. A search makes many plans of few sizes."""
    measured: tuple[int, ...] = profile.content.microbatch_sizes
    above = bisect(measured, microbatch_size)
    below_size, above_size = measured[above - 1], measured[above]
    blocks: tuple[Block, ...] = profile.content.blocks
    return tuple(interpolate(b.at(below_size), b.at(above_size), microbatch_size) for b in blocks)


def _sizes(block: Block) -> tuple[int, ...]:
    return tuple(sorted(m.microbatch_size for m in block.measurements))
