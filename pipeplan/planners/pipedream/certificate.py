"""Certificate: why no partition is faster, as numbers that can be checked without trusting the search.

The witness is a number n(k) for every cut k, 0 for the end. For all j < k, n(j) <= n(k) + the fewest machines on which
the blocks between cut j and cut k take at most t. Added up along any pipeline within t, this shows that the pipeline
needs at least n(start) machines. If there are fewer, no pipeline is within t.

The check solves PipeDream's recurrence again, by plain loops; the steps have the numbers of `space`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, inf, sqrt

from pipeplan.documents.certificate import Certificate
from pipeplan.documents.plan import Plan
from pipeplan.errors import PipeplanError
from pipeplan.planners.pipedream.parts import Partition
from pipeplan.planners.pipedream.space import LevelLinks
from pipeplan.planners.pipedream.states import States, cut_states
from pipeplan.planners.pipedream.terms import FACTORS, network, released
from pipeplan.planners.problem import PlanningProblem

QUANTITY = "slowest stage, seconds a minibatch"

_ROUNDING = 1e-12
"""The relative difference of sums in another order; the gap of a witness to its bound is larger."""

_EQUAL = 1e-11
"""Times that differ by less are equal, relatively."""

_CHECKED = 5_000_000
"""Upper bound on the stages that the check's plain recurrence solves: some ten seconds."""

_CLAIMS = {
    "recurrence": "Every partition was compared, by the recurrence: solving it again gives the bound.",
    "recurrence without messages": "Every partition was compared, by the recurrence, as if no messages were under way: "
    "no partition is below the bound. Of those above it that fit with their messages, not all were compared.",
    "fewest that fit": "Below the bound the stages that fit their devices need more machines than there are; above it "
    "the search for what fits is not complete.",
}


def certificate(problem: PlanningProblem, found: Partition) -> Certificate | None:
    """The search's proof of its answer. None for the released program, which searches in another way, and for stages
    that do not fill the units of each level: they may be faster than all partitions of the recurrence.
    """
    proof = found.proof
    if released(problem) or proof.bound_s > found.cost_s * (1 + _EQUAL):
        return None
    if proof.method != "probe":
        return Certificate(
            method=proof.method,
            quantity=QUANTITY,
            value=found.cost_s,
            bound=proof.bound_s,
            claim=_CLAIMS[proof.method],
        )

    # the witness in words
    units = units_of(problem)[-1].units
    unit = "machines" if len(units_of(problem)) == 1 else "units of the outermost level"
    t = f"{proof.refuted_s:.6g} s"
    claim = (
        f"The witness holds t = {t}, just below the bound, and then machines_needed[k] for every cut k, first to last "
        f"(cuts whose boundary takes longer than t do not count). For all j < k: machines_needed[j] <= "
        f"machines_needed[k] + the fewest {unit} on which the blocks between the cuts j and k take at most t; "
        f"machines_needed[end] = 0. So "
    )
    if len(proof.rows) == 1:
        claim += f"the model needs {proof.rows[0][0]:.0f} > {units}."
    else:
        claim += (
            f"a plan needs {proof.rows[0][0]:.0f}; and by the second row, where machines_needed2[j] also is at most "
            f"machines_needed[k] + the fewest of two and more, one that uses all {units} with a replicated stage needs "
            f"{proof.rows[1][0]:.0f}. Without replicas none has exactly {units} stages."
        )
    return Certificate(
        method="machines needed",
        quantity=QUANTITY,
        value=found.cost_s,
        bound=proof.bound_s,
        claim=claim,
        witness=(proof.refuted_s, *(number for row in proof.rows for number in row)),
    )


def units_of(problem: PlanningProblem) -> list[LevelLinks]:
    """The search's levels: those of more than one unit."""
    levels = network(problem)
    return [links for links in levels if links.units > 1] or levels[-1:]


def check_certificate(plan: Plan, problem: PlanningProblem) -> None:
    """Checks the claim of the plan's certificate. Raises PipeplanError if it is false, or too large to be checked.

    Plain loops over pairs of cuts, O(n^2), that share nothing with the search but the terms of the papers. The plan's
    cost model decides how gradients are exchanged, unless `problem` requests an exchange.
    """
    held = plan.certificate
    if held is None:
        raise PipeplanError("the plan holds no certificate")
    _require(
        held.quantity == QUANTITY and held.value == plan.closed_form.time_per_microbatch_s, "it is not about this plan"
    )
    slowest_s = max(stage.time_s for stage in plan.stages)
    _require(slowest_s <= held.value * (1 + _EQUAL), "a stage is slower than its value")
    _require(0 < held.bound <= held.value * (1 + _EQUAL), "its bound is above its value")
    states = cut_states(problem.profile, plan.microbatch_size, cuts=problem.options.cuts).states
    exchange = problem.options.synchronisation or plan.cost_model.rpartition("/")[2]
    _require(exchange in FACTORS, "the plan's cost model names no exchange")
    check = _Check(states=states, levels=tuple(units_of(problem)), factor=FACTORS[exchange])
    if held.method == "machines needed":
        _check_witness(check, held, fewer=problem.options.fewer_machines)
    else:
        raise PipeplanError("a certificate without a witness cannot be checked: solve the problem again")


def _check_witness(check: "_Check", held: Certificate, *, fewer: bool) -> None:
    """Checks the inequality of every pair of cuts, and that more machines are needed than there are."""
    refuted_s, count = held.witness[0], len(check.states)
    rows = [held.witness[1 : 1 + count], held.witness[1 + count :]]
    _require(len(rows[0]) == count and len(rows[1]) in (0, count), "its witness has not a number for every cut")
    _require(held.bound <= refuted_s * (1 + _EQUAL), "its witness is about less than its bound")
    least, replicated = rows
    _require(least[-1] == 0, "no machines are needed after the end")
    for j, k in check.stages(refuted_s):
        need, two = check.needs(j, k, refuted_s, wanted=inf if replicated else least[j] - least[k])
        _require(least[j] <= least[k] + need, f"machines_needed[{j}] is above what a stage to {k} gives")
        if replicated:
            enough = min(replicated[k] + need if k < count - 1 else two, least[k] + two)
            _require(replicated[j] <= enough, f"machines_needed2[{j}] is above what a stage to {k} gives")
    units = check.levels[-1].units
    if not replicated:
        _require(least[0] > units, f"{least[0]:.0f} machines are there: no contradiction")
        return
    _require(not fewer and replicated[0] > units, f"{replicated[0]:.0f} machines are there: no contradiction")
    _require(units not in check.straight_depths(refuted_s), f"a pipeline of {units} stages is within the bottleneck")


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise PipeplanError(f"the certificate is false: {otherwise}")


@dataclass(frozen=True, kw_only=True)
class _Check:
    """The recurrence's terms, computed again one stage at a time."""

    states: States
    levels: tuple[LevelLinks, ...]
    factor: float
    _known: dict[tuple[int, int, int, int], float] = field(default_factory=dict)

    def stages(self, bottleneck_s: float) -> Iterator[tuple[int, int]]:
        """Pairs of cuts that the bottleneck allows."""
        count, limit = len(self.states), bottleneck_s * self.levels[-1].bandwidth_bytes_per_s * (1 + _ROUNDING)
        boundary = self.states.boundary_bytes.tolist()
        allowed = [k for k in range(count) if k in (0, count - 1) or 2 * boundary[k] <= limit]
        for j in allowed:
            yield from ((j, k) for k in allowed if self.between(j, k))

    def between(self, j: int, k: int) -> bool:
        """Whether a stage from cut j to cut k is allowed."""
        before = self.states.before
        return j < k if before is None else bool(before[j, k])

    def needs(self, j: int, k: int, bottleneck_s: float, wanted: float) -> tuple[float, float]:
        """The fewest units on which the blocks take at most the bottleneck, and the fewest of two and more.

        Both are lower bounds if a unit has units inside: its best case may already need `wanted` or more.
        """
        level = len(self.levels) - 1
        inside = 1
        for links in self.levels[:-1]:
            inside *= links.units
        unit_s = self._compute_s(j, k) / inside
        need = self._fewest(j, k, unit_s, bottleneck_s)
        if level > 0 and need[0] < wanted:
            need = self._fewest(j, k, self.value_s(level, j, k, self.levels[level - 1].units), bottleneck_s)
        return need

    def _fewest(self, j: int, k: int, unit_s: float, bottleneck_s: float) -> tuple[float, float]:
        # steps 1 and 2, solved for m
        exchange = self.factor * self._weight_bytes(j, k) / (self.levels[-1].bandwidth_bytes_per_s * bottleneck_s)
        exchange *= 1 - _ROUNDING
        by_exchange = (exchange + sqrt(exchange * (exchange - 4))) / 2 if exchange > 4 else 2.0
        two = float(max(2, ceil(unit_s / bottleneck_s * (1 - _ROUNDING)), ceil(by_exchange)))
        return 1.0 if unit_s * (1 - _ROUNDING) <= bottleneck_s else two, two

    def value_s(self, level: int, j: int, k: int, units: int) -> float:
        """A(j..k, units) of the level inside `level`, by the recurrence."""
        if level == 0:
            return self._compute_s(j, k)
        key = (level, j, k, units)
        if key in self._known:
            return self._known[key]
        _require(len(self._known) < _CHECKED, "it is too large to be checked")
        # step 3: a single stage
        best_s = self._stage_s(level, j, k, units)
        # step 4: an optimal pipeline to the cut, the boundary, a last stage
        for cut in range(len(self.states)):
            if self.between(j, cut) and self.between(cut, k):
                boundary_s = 2 * float(self.states.boundary_bytes[cut]) / self.levels[level - 1].bandwidth_bytes_per_s
                for last in range(1, units):
                    before_s = self.value_s(level, j, cut, units - last)
                    best_s = min(best_s, max(before_s, boundary_s, self._stage_s(level, cut, k, last)))
        self._known[key] = best_s
        return best_s

    def _stage_s(self, level: int, j: int, k: int, units: int) -> float:
        links = self.levels[level - 1]
        inside = self.levels[level - 2].units if level > 1 else 1
        # steps 1 and 2
        share = self.factor * (units - 1) / units
        exchange_s = share * self._weight_bytes(j, k) / links.bandwidth_bytes_per_s
        return max(self.value_s(level - 1, j, k, inside), exchange_s) / units

    def straight_depths(self, bottleneck_s: float) -> set[int]:
        """The numbers of one-unit stages that a pipeline within the bottleneck may have."""
        last = len(self.states) - 1
        depths: dict[int, set[int]] = {last: {0}}
        for j, k in reversed(list(self.stages(bottleneck_s))):
            need, _ = self.needs(j, k, bottleneck_s, wanted=2)
            if need == 1.0:
                depths.setdefault(j, set()).update(depth + 1 for depth in depths.get(k, ()))
        return depths.get(0, set())

    def _compute_s(self, j: int, k: int) -> float:
        return float(self.states.compute_s[k] - self.states.compute_s[j])

    def _weight_bytes(self, j: int, k: int) -> float:
        return float(self.states.weight_bytes[k] - self.states.weight_bytes[j])
