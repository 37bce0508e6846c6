"""StageCosts: what one stage's instructions cost on one worker. The simulator knows nothing else about a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pipeplan.documents.names import STRICT
from pipeplan.errors import require, require_amount, require_count


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds and bytes of one stage on one worker, a microbatch.

    - Transfers: `activation_transfer_s` and `gradient_transfer_s` are how long its output and its input's gradient
      occupy a link, `activation_latency_s` and `gradient_latency_s` what passes on top until they arrive, `latency_s`
      the same of both: older plans have one latency for both boundaries.
    - Overheads: `instruction_s` is added to every instruction but updates. `activation_message_s` is added to sends of
      its output and receives of the gradient, `gradient_message_s` to receives of its input and sends of the gradient,
      `message_s` to all of them: older plans have one price for both boundaries.
    - Ports: `activation_port_devices` says how many devices share the port through which its output leaves them,
      `gradient_port_devices` the same of its input's gradient, `reduce_port_devices` of its gradient exchange; 0 is a
      link of its own. Where a device's own link is slower than the port, `activation_device_share` is what it carries
      of the port's bandwidth; likewise for the others.
    - Exchange: of `reduce_s`, `reduce_inside_s` passes no port: its latency, and what happens inside the units of
      devices that a port connects. `reduce_tail_s` is how long an exchange that overlaps with the backward goes on when
      that has ended (None: all of it; see `exchange_tail_s`).
    - Memory: `version_bytes` is one version of its weights, `fixed_bytes` what belongs to them (gradients, optimizer
      states, buffers). Of it, `own_gradient_bytes` is there only while gradients gather or are exchanged (0: not told
      apart); the rest is there from start to end. `gradient_bytes` is a further set of gradients.
      `activation_bytes` is a microbatch kept whole, `input_bytes` one of which only the stage's input is kept. Where a
      stage recomputes by block they are what a microbatch holds at most in its backward, and all its blocks' inputs.
      Where backwards are split, `split_activation_bytes` is a microbatch kept whole (None: as much),
      `weight_gradient_bytes` one between p1 and p2 (None: as much as one kept whole), and `early_gradient_bytes` what
      of its own gradients is there before the first p2 (None: all of it).
    """

    microbatch_size: int
    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    recompute_s: float = 0.0
    update_s: float = 0.0
    reduce_s: float = 0.0
    activation_transfer_s: float = 0.0
    gradient_transfer_s: float = 0.0
    latency_s: float = 0.0
    instruction_s: float = 0.0
    activation_bytes: int = 0
    input_bytes: int = 0
    version_bytes: int = 0
    fixed_bytes: int = 0
    activation_port_devices: int = 0
    gradient_port_devices: int = 0
    reduce_port_devices: int = 0
    weight_gradient_bytes: int | None = None
    reduce_tail_s: float | None = None
    gradient_bytes: int = 0
    reduce_inside_s: float = 0.0
    activation_device_share: float = 1.0
    gradient_device_share: float = 1.0
    reduce_device_share: float = 1.0
    message_s: float = 0.0
    own_gradient_bytes: int = 0
    split_activation_bytes: int | None = None
    early_gradient_bytes: int | None = None
    activation_message_s: float = 0.0
    gradient_message_s: float = 0.0
    activation_latency_s: float = 0.0
    gradient_latency_s: float = 0.0

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_count("microbatch_size", self.microbatch_size)
        for field in self.__slots__:
            value = getattr(self, field)
            if value is not None:
                require_amount(field, value)
        rule = f"must be at most fixed_bytes, {self.fixed_bytes}, of which it is a part"
        require(self.own_gradient_bytes <= self.fixed_bytes, "own_gradient_bytes", rule, self.own_gradient_bytes)

    def handing_over_s(self, *, onward: bool) -> float:
        """What a send or a receive takes the rank itself: `onward`, to or from the next stage, else the one before."""
        own_s = self.activation_message_s if onward else self.gradient_message_s
        return self.instruction_s + self.message_s + own_s

    def arrives_after_s(self, *, onward: bool) -> float:
        """The latency of its output, sent `onward`, or else of its input's gradient."""
        return self.latency_s + (self.activation_latency_s if onward else self.gradient_latency_s)

    def exchange_tail_s(self, *, split: bool) -> float:
        """How long a gradient exchange goes on when the backward that completes the gradients has ended.

        Where the backward is `split`, that is the p2 of one microbatch. It is shorter, and hides at least its share of
        what a whole backward hides: the longer a backward takes, the less each further second of it hides.
        """
        if self.reduce_tail_s is None:
            return self.reduce_s
        hidden_s = self.reduce_s - self.reduce_tail_s
        if split:
            hidden_s *= min(self.backward_weight_s / self.backward_s, 1.0) if self.backward_s > 0 else 0.0
        return self.reduce_s - hidden_s

    def held_bytes(self, counts: Sequence[int], *, split: bool) -> int:
        """`always_bytes`, and each of `each_held_bytes` times its count."""
        held = zip(counts, self.each_held_bytes(split=split), strict=True)
        return self.always_bytes + sum(count * each_bytes for count, each_bytes in held)

    @property
    def always_bytes(self) -> int:
        """The bytes held for the whole run."""
        return self.fixed_bytes - self.own_gradient_bytes

    def each_held_bytes(self, *, split: bool) -> tuple[int, ...]:
        """Bytes of each thing that a stage holds by count, in the order of `programs.footprint.Held`.

        `split`: it has backwards that are split.
        """
        known = split and self.split_activation_bytes is not None
        whole_bytes = (self.split_activation_bytes or 0) if known else self.activation_bytes
        deferred_bytes = whole_bytes if self.weight_gradient_bytes is None else self.weight_gradient_bytes
        own_bytes, early_bytes = self.own_gradient_bytes, self.early_gradient_bytes
        return (
            whole_bytes,
            self.input_bytes,
            self.version_bytes,
            deferred_bytes,
            own_bytes,
            own_bytes if early_bytes is None else early_bytes,
            self.gradient_bytes,
        )


def unit_costs(*, forward_s: float, backward_input_s: float, backward_weight_s: float) -> StageCosts:
    """A stage in which only compute costs anything: what the papers' pictures assume."""
    return StageCosts(
        microbatch_size=1,
        forward_s=forward_s,
        backward_s=backward_input_s + backward_weight_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        recompute_s=forward_s,
    )
