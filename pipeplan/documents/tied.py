"""Tied: weights that several blocks use, and what they cost the stages that hold these blocks."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from pipeplan.documents.names import STRICT
from pipeplan.errors import require, require_amount, require_count, require_unique


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeights:
    """Weights that several of a model's blocks use, such as an embedding and the output layer with the same weights.

    `block` counts the `weight_bytes` among its own. On another stage, the blocks in `also` have a copy of them.
    """

    block: int
    also: tuple[int, ...]
    weight_bytes: int

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_count("block", self.block, at_least=0)
        require(len(self.also) > 0, "also", "must hold at least one block", self.also)
        for block in self.also:
            require_count("also", block, at_least=0)
        require_unique("also", "must not hold a block twice, nor the one in `block`", (self.block, *self.also))
        require_count("weight_bytes", self.weight_bytes)

    @property
    def blocks(self) -> tuple[int, ...]:
        """All blocks that use them."""
        return (self.block, *self.also)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedStages:
    """Stages that share weights. Before every update, each replica's gradients of their copies are summed, which takes
    `seconds` once all of the stages have arrived.
    """

    stages: tuple[int, ...]
    seconds: float

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        rule = "must be two or more, from 0 on, in ascending order"
        ascending = all(before < after for before, after in pairwise(self.stages))
        require(len(self.stages) > 1 and self.stages[0] >= 0 and ascending, "stages", rule, self.stages)
        require_amount("seconds", self.seconds)
