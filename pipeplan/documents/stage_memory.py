"""StageMemory: what a worker of a stage holds, by item."""

from dataclasses import dataclass, fields
from typing import ClassVar

from pipeplan.documents.names import STRICT

BY_WEIGHT = ("weights", "gradients", "master_weights", "optimizer_states")
"""The items that are in proportion to a stage's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What a worker of a stage holds at its peak, by item. The sum is the stage's `memory_bytes`.

    `activations` are those of the microbatches in flight (kept whole, or their inputs), `transient` the most that a
    block takes in addition while it runs, `buffers` what is being sent and received.
    """

    weights: int = 0
    gradients: int = 0
    master_weights: int = 0
    optimizer_states: int = 0
    activations: int = 0
    transient: int = 0
    buffers: int = 0

    __pydantic_config__: ClassVar = STRICT

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, item.name) for item in fields(self))
