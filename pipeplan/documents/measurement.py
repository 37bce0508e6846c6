"""Measurement: what one block costs at one microbatch size: times and bytes."""

from dataclasses import dataclass, replace
from typing import ClassVar

from pipeplan.documents.names import STRICT
from pipeplan.errors import require, require_amount, require_count

KNOWN_BYTES = (
    "input_bytes",
    "output_bytes",
    "activation_bytes",
    "workspace_bytes",
    "kept_output_bytes",
    "passed_bytes",
)
"""The fields of a measurement that are bytes, and are never None."""

_SPLIT_BYTES = ("split_activation_bytes", "split_shared_bytes", "split_gradient_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One block at one microbatch size. Times are for the whole microbatch, bytes for all its samples.

    - `backward_s` is the fused backward.
    - `backward_input_s` and `backward_weight_s` are 2BP's p1 and p2, where they were measured: p1 with what the forward
      before it takes longer.
    - `deferred_share` is p2's share of both as it was measured, 0 where the block defers nothing.
    - `weight_gradient_bytes` is what stays allocated between p1 and p2 (None: not known).
    - `activation_bytes` is what stays allocated from forward to backward on a stage of this block alone, parameters
      excluded.
    - `shared_bytes` is what of it is there already, or is not kept, on a stage that has the block before it as well:
      most often the tensor between the two. Where it is given, 0 included, the block's input is among its activations,
      whether the block needs it or not (None: neither is known, and nothing is taken to be shared).
    - `kept_output_bytes` is what of `output_bytes` is among the activations: until the backward, an output that is sent
      takes only the rest in addition (0: not known, or nothing).
    - `passed_bytes` is what of `output_bytes` is the block's input itself, passed on: a stage that keeps the inputs of
      all its blocks keeps it once (0: not known, or nothing).
    - `split_activation_bytes` and `split_shared_bytes` are these where the backward is split: calls that 2BP replaces
      keep other tensors. `split_gradient_bytes` is what p1 makes of the weights' gradients (None: not known).
    - `workspace_bytes` is the transient peak above what is kept; spreads are interquartile ranges.
    """

    microbatch_size: int
    forward_s: float
    backward_s: float
    input_bytes: int
    output_bytes: int
    activation_bytes: int
    backward_input_s: float | None = None
    backward_weight_s: float | None = None
    workspace_bytes: int = 0
    forward_spread_s: float | None = None
    backward_spread_s: float | None = None
    weight_gradient_bytes: int | None = None
    deferred_share: float | None = None
    shared_bytes: int | None = None
    kept_output_bytes: int = 0
    split_activation_bytes: int | None = None
    split_shared_bytes: int | None = None
    split_gradient_bytes: int | None = None
    passed_bytes: int = 0

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_count("microbatch_size", self.microbatch_size)
        for field in ("forward_s", "backward_s", *KNOWN_BYTES):
            require_amount(field, getattr(self, field))
        spreads = ("forward_spread_s", "backward_spread_s")
        for field in ("backward_input_s", "backward_weight_s", "weight_gradient_bytes", *_SPLIT_BYTES, *spreads):
            if getattr(self, field) is not None:
                require_amount(field, getattr(self, field))
        if self.shared_bytes is not None:
            require_amount("shared_bytes", self.shared_bytes)
            rule = f"must be at most activation_bytes, {self.activation_bytes}, of which it is a part"
            require(self.shared_bytes <= self.activation_bytes, "shared_bytes", rule, self.shared_bytes)
        most = min(self.output_bytes, self.activation_bytes)
        rule = f"must be at most output_bytes and activation_bytes, {most}, of both of which it is a part"
        require(self.kept_output_bytes <= most, "kept_output_bytes", rule, self.kept_output_bytes)
        most = min(self.input_bytes, self.output_bytes)
        rule = f"must be at most input_bytes and output_bytes, {most}, of both of which it is a part"
        require(self.passed_bytes <= most, "passed_bytes", rule, self.passed_bytes)
        both = (self.backward_input_s is None) == (self.backward_weight_s is None)
        require(both, "backward_input_s", "must be given together with backward_weight_s", self.backward_input_s)
        known = [getattr(self, field) is not None for field in _SPLIT_BYTES]
        rule = "must be given together with split_shared_bytes and split_gradient_bytes"
        require(all(known) or not any(known), "split_activation_bytes", rule, self.split_activation_bytes)
        rule = f"must be at most split_activation_bytes, {self.split_activation_bytes}, of which it is a part"
        shared, kept = self.split_shared_bytes or 0, self.split_activation_bytes or 0
        require(shared <= kept, "split_shared_bytes", rule, self.split_shared_bytes)
        share = self.deferred_share
        if share is not None:
            require(0 <= share <= 1, "deferred_share", "must be from 0 to 1", share)
            sound = share > 0 or not self.backward_weight_s
            require(sound, "deferred_share", "must be more than 0 where backward_weight_s is", share)

    @property
    def compute_s(self) -> float:
        """Forward and backward together: PipeDream's T_l."""
        return self.forward_s + self.backward_s

    @property
    def added_bytes(self) -> int:
        """The activations that the block adds to those of a stage that ends before it."""
        return self.activation_bytes - (self.shared_bytes or 0)

    @property
    def again_bytes(self) -> int:
        """What the block holds when it has run again, beside its input: its output, and what else its graph keeps."""
        made_bytes = self.output_bytes - self.passed_bytes
        known_bytes = max(self.kept_output_bytes - self.passed_bytes, 0)
        known_bytes += 0 if self.shared_bytes is None else self.input_bytes
        return made_bytes + max(self.activation_bytes - known_bytes, 0)

    @property
    def when_split(self) -> "Measurement":
        """The same with the activations of a forward whose backward is split, as far as they are known."""
        if self.split_activation_bytes is None:
            return self
        return replace(
            self,
            activation_bytes=self.split_activation_bytes,
            shared_bytes=self.split_shared_bytes,
            kept_output_bytes=min(self.kept_output_bytes, self.split_activation_bytes),
        )


def interpolate(below: Measurement, above: Measurement, microbatch_size: int) -> Measurement:
    """A block between two sizes at which it was measured: linear in the size, bytes to the nearest whole one.

    A split backward is there if both have one; spreads are those of measurements, and not there. Shared bytes that are
    known at one of the sizes are 0 at the other.
    """
    share = (microbatch_size - below.microbatch_size) / (above.microbatch_size - below.microbatch_size)

    def between(field: str) -> float:
        low: float = getattr(below, field) or 0
        high: float = getattr(above, field) or 0
        return low + share * (high - low)

    split = below.backward_input_s is not None and above.backward_input_s is not None
    kept = below.weight_gradient_bytes is not None and above.weight_gradient_bytes is not None
    shares = below.shared_bytes is not None or above.shared_bytes is not None
    of_split = below.split_activation_bytes is not None and above.split_activation_bytes is not None
    return Measurement(
        microbatch_size=microbatch_size,
        forward_s=between("forward_s"),
        backward_s=between("backward_s"),
        backward_input_s=between("backward_input_s") if split else None,
        backward_weight_s=between("backward_weight_s") if split else None,
        weight_gradient_bytes=round(between("weight_gradient_bytes")) if kept else None,
        shared_bytes=round(between("shared_bytes")) if shares else None,
        **{field: round(between(field)) for field in (*KNOWN_BYTES, *(_SPLIT_BYTES if of_split else ()))},
    )
