"""Budget: the limits of the planner's searches."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBudget:
    """The limits of the planner's searches. Deterministic seconds are about as long as real ones: measured."""

    precision: float = 1e-9
    """Plans that are faster by less are ignored: sums of the same seconds in another order differ by less."""

    each_step_s: float = 3e-5
    """Deterministic seconds for each step of a lattice, without its entries."""

    each_target_s: float = 1e-5
    """Deterministic seconds for listing each node that a step leads to."""

    each_entry_s: float = 1e-8
    """Deterministic seconds for each entry of a step's table: it is computed once and read twice."""

    by_messages: int = 4
    """The ratio of an entry's time if messages count: most steps then have tables of their own."""

    each_pair_s: float = 3e-8
    """Deterministic seconds for each entry that the recurrence over ranks of two stages reads."""

    each_rank_s: float = 1.5e-3
    """Deterministic seconds for counting what a rank of several stages keeps."""

    each_stage_s: float = 3e-4
    """Deterministic seconds for moving the cuts of a stage until ranks take nearly equal times."""

    by_memory: int = 40
    """The ratio of that time if cuts are moved until ranks fit."""

    each_boolean_s: float = 1e-5
    """Deterministic seconds for making CP-SAT's model, for each boolean: the solver's own count leaves them out."""

    first_steps: tuple[float, ...] = (1.01, 1.02, 1.04, 1.08, 1.16, 1.32, inf)
    """Where to search for first stages of ranks that hardly fit, in multiples of the bound."""

    misses: int = 200
    """Upper bound on the shapes searched for their nearest miss if nothing fits."""

    reasons: int = 20
    """Upper bound on the misses named."""

    cached_bytes: int = 2**28
    """Upper bound on the tables that are kept for further reads."""

    played_shapes: int = 400
    """Upper bound on the shapes and placements that are played, the highest bounds first."""

    placements: int = 64
    """Upper bound on the placements of a shape that are played, where devices are of several types."""


BUDGET = SearchBudget()
