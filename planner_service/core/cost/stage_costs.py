"""StageCosts: what one stage's instructions cost on one worker. The simulator knows nothing else about a model."""

from dataclasses import dataclass

from planner_service.core.schedule.footprint import Held


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds a microbatch and bytes a worker. Transfers are what the stage sends: outputs on, gradients back."""

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

    def held_bytes(self, held: Held) -> int:
        """The bytes of what a worker holds after an instruction: `fixed_bytes` are there from start to end."""
        return (
            self.fixed_bytes
            + held.versions * self.version_bytes
            + held.activations * self.activation_bytes
            + held.inputs * self.input_bytes
        )


def unit_costs(*, forward_s: float, backward_input_s: float, backward_weight_s: float) -> StageCosts:
    """A stage in which only compute costs anything: what the papers' pictures assume. One byte a held thing."""
    return StageCosts(
        microbatch_size=1,
        forward_s=forward_s,
        backward_s=backward_input_s + backward_weight_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        recompute_s=forward_s,
    )
