"""Progress: what a solver tells while it searches. Whoever listens cannot change what it finds."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The best plan so far and what none can be faster than, in seconds a sample; and the shapes not yet decided.

    `best_s` is None before a plan is found. `spent` and `limit` are deterministic seconds.
    """

    best_s: float | None
    bound_s: float
    open_shapes: int
    spent: float
    limit: float


Observer = Callable[[Progress], None]


def unobserved(_: Progress) -> None:
    """Nobody listens."""
