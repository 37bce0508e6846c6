"""StageCosts: what one stage's instructions cost on one worker. The simulator knows nothing else about a model."""

from dataclasses import dataclass
from typing import ClassVar

from pipeplan.documents.names import STRICT
from pipeplan.errors import require_amount, require_count


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds and bytes of one stage on one worker, a microbatch.

    - Transfers: `activation_transfer_s` and `gradient_transfer_s` are how long its output and its input's gradient
      occupy a link, `latency_s` what passes on top until they arrive.
    - Overheads: `instruction_s` is added to every instruction but updates, `message_s` to its sends and receives.
    - Ports: `activation_port_devices` says how many devices share the port through which its output leaves them,
      `gradient_port_devices` the same of its input's gradient, `reduce_port_devices` of its gradient exchange; 0 is a
      link of its own. Where a device's own link is slower than the port, `activation_device_share` is what it carries
      of the port's bandwidth; likewise for the others.
    - Exchange: of `reduce_s`, `reduce_inside_s` passes no port: its latency, and what happens inside the units of
      devices that a port connects. `reduce_tail_s` is how long an exchange that overlaps with the backward goes on when
      that has ended (None: all of it; see `exchange_tail_s`).
    - Memory: `version_bytes` is one version of its weights, `gradient_bytes` a set of gradients beyond the one that is
      always there, `fixed_bytes` what is there from start to end (gradients, optimizer states, buffers).
      `activation_bytes` is a microbatch kept whole, `input_bytes` one of which only the stage's input is kept. Where a
      stage recomputes by block they are what a microbatch holds at most in its backward, and all its blocks' inputs.
      `weight_gradient_bytes` is one between 2BP's p1 and p2 (None: as much as one kept whole).
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

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_count("microbatch_size", self.microbatch_size)
        for field in self.__slots__:
            value = getattr(self, field)
            if value is not None:
                require_amount(field, value)

    @property
    def handing_over_s(self) -> float:
        """What a send or a receive takes the rank itself."""
        return self.instruction_s + self.message_s

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

    def held_bytes(
        self, *, versions: int, activations: int, inputs: int, weight_gradients: int = 0, gradients: int = 0
    ) -> int:
        """Bytes of the fixed part, of weight versions, of microbatches kept whole, by their input and for p2, and of
        further sets of gradients.
        """
        counts = (activations, inputs, versions, weight_gradients, gradients)
        held = zip(counts, self.each_held_bytes, strict=True)
        return self.fixed_bytes + sum(count * each_bytes for count, each_bytes in held)

    @property
    def each_held_bytes(self) -> tuple[int, int, int, int, int]:
        """Bytes of a microbatch kept whole, by its input, of a weight version, for p2, and of further gradients."""
        deferred_bytes = self.activation_bytes if self.weight_gradient_bytes is None else self.weight_gradient_bytes
        return self.activation_bytes, self.input_bytes, self.version_bytes, deferred_bytes, self.gradient_bytes


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
