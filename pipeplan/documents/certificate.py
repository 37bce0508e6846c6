"""Certificate: how far a plan may be from the optimum, and why."""

from dataclasses import dataclass
from math import ceil, floor, inf, log10
from typing import ClassVar

from pipeplan.documents.names import STRICT

PROVEN_GAP = 1e-6
"""An optimum is proven where the gap is no larger: bounds and plays are computed in floats, and differ by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Why no plan of the searched kind can be better than `bound`: a lower bound that a reader can check.

    `value` is the plan's `quantity`, which should be small; `gap` is (value - bound) / bound, at most `PROVEN_GAP` for
    a proven optimum, and infinite without a bound. `claim` says it in words. `witness` holds the numbers that prove it,
    named in the claim.

    A search by play may compare few of the stages that a configuration can have. `bound` is then that of the stages
    that it compared, and `bound_of_all` that of any.
    """

    method: str
    quantity: str
    value: float
    bound: float
    claim: str
    witness: tuple[float, ...] = ()
    bound_of_all: float | None = None

    __pydantic_config__: ClassVar = STRICT

    @property
    def gap(self) -> float:
        """Upper bound on the distance from the optimum, as a share, over the stages that were compared."""
        return self._gap_to(self.bound)

    @property
    def gap_of_all(self) -> float:
        """Upper bound on the distance from the optimum, as a share, over any stages."""
        return self._gap_to(self.bound if self.bound_of_all is None else self.bound_of_all)

    @property
    def proven(self) -> bool:
        """Whether no plan of the searched kind is better, with any stages."""
        return self.gap_of_all <= PROVEN_GAP

    @property
    def optimality(self) -> str:
        """`proven optimal to 1e-06`, or `within 2.2 % of the optimum`: the percentage is rounded up.

        Where few stages were compared: `the fastest of the stages that were compared, and within 12 % of the optimum`.
        """
        if self.proven:
            return f"proven optimal to {PROVEN_GAP:g}"
        if self.gap_of_all == inf:
            near = "not proven optimal: no bound is known"
        else:
            percent = 100 * self.gap_of_all
            step = 10.0 ** (floor(log10(percent)) - 1)
            near = f"within {ceil(percent / step - PROVEN_GAP) * step:,.10g} % of the optimum"
        return f"the fastest of the stages that were compared, and {near}" if self.gap <= PROVEN_GAP else near

    def _gap_to(self, bound: float) -> float:
        if self.value <= 0:
            return 0.0
        return max(self.value - bound, 0.0) / bound if bound > 0 else inf
