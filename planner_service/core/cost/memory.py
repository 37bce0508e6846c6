"""The memory term: what a worker of a stage holds at its peak, as counts of four quantities.

`paper` is the law of PipeDream-2BW, appendix A.1.2, to the byte: weight versions, activations and inputs, nothing
else. `training` is what a user's device holds: besides the versions the gradients and the optimizer's states, the
activations that are really in flight on this stage, and the largest transient of one block.
"""

from dataclasses import dataclass

OPTIMIZER_COPIES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Copies of the weights that an optimizer keeps as its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """How often a stage's weights, activations (of one microbatch), input and largest transient are held."""

    weights: int
    activations: int
    inputs: int
    transients: int

    def counts(self) -> tuple[int, int, int, int]:
        """As a row, for tables of many stages."""
        return (self.weights, self.activations, self.inputs, self.transients)


def copies(
    accounting: str, schedule: str, optimizer: str, *, recompute: bool, depth: int, stage: int, microbatches: int
) -> Copies:
    """What a worker of a stage holds in a pipeline whose stages have equal replicas."""
    if accounting == "paper":
        return paper_copies(schedule, recompute=recompute, depth=depth, microbatches=microbatches)
    held = in_flight(schedule, depth=depth, stage=stage, microbatches=microbatches)
    return training_copies(schedule, optimizer, recompute=recompute, held=held)


def in_flight(schedule: str, *, depth: int, stage: int, microbatches: int) -> int:
    """Microbatches between forward and backward on a stage of a pipeline whose stages have equal replicas.

    The 1F1B family holds depth - stage (PipeDream 2018, section 3.3), GPipe the whole batch, the others one.
    """
    match schedule:
        case "gpipe":
            return microbatches
        case "1f1b":
            return min(depth - stage, microbatches)
        case "pipedream" | "pipedream-2bw":
            return depth - stage
        case _:
            return 1


def weight_versions(schedule: str, held: int) -> int:
    """Weight versions alive on a stage with `held` microbatches in flight: as many for PipeDream, two for 2BW."""
    if schedule == "pipedream":
        return held
    return 2 if schedule == "pipedream-2bw" else 1


def paper_copies(schedule: str, *, recompute: bool, depth: int, microbatches: int) -> Copies:
    """Appendix A.1.2 on every stage: 2|W| + d|A| + d|I|, with recomputation 2|W| + |A| + d|I|.

    PipeDream-Flush holds one version, GPipe (which recomputes) |W| + |A| + m|I|; without pipelining d is 1.
    """
    kept = in_flight(schedule, depth=depth, stage=0, microbatches=microbatches)
    if schedule == "1f1b":
        kept = depth
    return Copies(
        weights=weight_versions(schedule, kept), activations=1 if recompute else kept, inputs=kept, transients=0
    )


def training_copies(schedule: str, optimizer: str, *, recompute: bool, held: int) -> Copies:
    """Versions, one copy of gradients, the optimizer's states, and what `held` microbatches in flight keep.

    A stage that recomputes keeps their inputs, and one microbatch's activations while its backward runs.
    """
    return Copies(
        weights=weight_versions(schedule, held) + 1 + OPTIMIZER_COPIES[optimizer],
        activations=1 if recompute else held,
        inputs=held if recompute else 0,
        transients=1,
    )
