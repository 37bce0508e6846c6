"""Certificate of a search by play: checked by searching its space again, without the first search's results.

The claim: no configuration of the space, with the stages that its closed form finds best, plays more than 1 / `bound`
samples a second, and with no other stages does any play more than 1 / `bound_of_all`. Each configuration is ruled out
by the first of the tests 1 to 4, which stand beside the code. `beyond` bounds everything that a space does not list.

The search rules configurations out in the same way. So the check of a true certificate takes no longer than the search.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from pipeplan.documents.certificate import Certificate
from pipeplan.documents.plan import Plan, Simulated
from pipeplan.errors import PipeplanError
from pipeplan.planners.auto.climb import FEW_SPLITS
from pipeplan.planners.auto.proposals import Proposal, Proposer
from pipeplan.planners.auto.ranking import Ranking
from pipeplan.planners.auto.search import ROUNDING
from pipeplan.planners.bound import most_samples_per_s
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.spaces import Configuration, Space

MOST_SPLITS = 6_000
"""Ten times the splits of a search: half a minute."""

MOST_INSTRUCTIONS = 6_000_000
"""Ten times the plays of a search: half a minute."""

_IN_PLANS = ("optimizer", "memory", "master_weights")
"""Options that a plan itself holds."""


def check_search(held: Certificate, simulated: Simulated | None, spaces: Sequence[Space], ranking: Ranking) -> str:
    """How every configuration of the spaces was ruled out, in numbers; `simulated` is the plan's play.

    Raises PipeplanError if the certificate claims nothing, or more than the numbers show.
    """
    if simulated is None or held.bound <= 0:
        raise PipeplanError("the plan's streams cannot be played" if simulated is None else "its bound is not above 0")
    value = 1 / simulated.throughput_samples_per_s
    if abs(held.value - value) > ROUNDING * value:
        raise PipeplanError(f"the certificate says {held.value:.6g} s a sample; the plan plays {value:.6g} s")
    if held.bound > value * (1 + ROUNDING):
        raise PipeplanError(
            f"the certificate's bound, {held.bound:.6g} s a sample, is above what the plan itself plays"
        )
    if not spaces:
        raise PipeplanError(f"{held.claim} With these options there is no space to search again")
    least = held.bound if held.bound_of_all is None else held.bound_of_all
    if not 0 < least <= held.bound:
        raise PipeplanError(f"the certificate's bound of any stages, {least:.6g} s a sample, is not below the other")
    ruled_out = _Elimination(
        spaces, replace(ranking, left=MOST_INSTRUCTIONS), most_per_s=1 / held.bound, most_of_all_per_s=1 / least
    ).run()
    return f"{held.optimality}: {ruled_out} ({_assumed(ranking.problem)})"


@dataclass(slots=True)
class _Elimination:
    """The configurations that could exceed `most_per_s`, the highest bound first, and how they were ruled out."""

    spaces: Sequence[Space]
    ranking: Ranking
    most_per_s: float
    most_of_all_per_s: float
    split: int = 0
    without_plan: int = 0
    plans_by_bound: int = 0
    played: int = 0

    def run(self) -> str:
        """Rules all of them out, and says how. Raises PipeplanError for the first that it cannot rule out."""
        for space in self.spaces:
            for configuration in space.configurations():
                # 1. The rate that no play of it exceeds (`space`) is not above the claim, or no fitting stages of it
                #    compute fast enough.
                if self._within(configuration.most):
                    break  # none of the others has a higher bound
                self._rule_out(configuration)
            if not self._within(space.beyond):
                beyond = f"what the search did not list may play up to {space.beyond:.6g} samples/s"
                raise PipeplanError(f"{beyond}, more than {self.most_per_s:.6g}")
        shapes = sum(space.considered for space in self.spaces)
        return (
            f"of {shapes} shapes, bounds left {self.split} configurations open (shapes on a placement): "
            f"{self.without_plan} have no plan that fits, and of the plans of the others {self.plans_by_bound} "
            f"were ruled out by their bound and {self.played} were played"
        )

    def _rule_out(self, configuration: Configuration) -> None:
        if self.split == MOST_SPLITS:
            rest = f"more than {MOST_SPLITS} configurations"
            raise PipeplanError(f"{rest} could play more than {self.most_per_s:.6g} samples/s, by their bounds")
        self.split += 1
        stops = configuration.split()
        plan = None if stops is None else configuration.plan(stops)
        self.without_plan += plan is None  # 2. No split of it into stages fits.
        self._rule_out_plans(configuration, plan, self.most_per_s)
        if stops and configuration.most_of_any() > self.most_of_all_per_s * (1 + ROUNDING):
            # All other stages that it can have must be few.
            splits = configuration.splits_above(self.most_of_all_per_s, stops)
            if splits.count > FEW_SPLITS:
                most = f"other stages than those compared could play up to {configuration.most_of_any():.6g} samples/s"
                raise PipeplanError(f"{most}, more than {self.most_of_all_per_s:.6g}")
            for other in splits:
                self._rule_out_plans(configuration, configuration.plan(other), self.most_of_all_per_s)

    def _rule_out_plans(self, configuration: Configuration, plan: Plan | None, most_per_s: float) -> None:
        """The plan, and its variants with a split backward."""
        for variant in () if plan is None else self.ranking.variants(plan):
            # 3. The bound (`planners.bound`) of each plan, also with a split backward, is not above the claim.
            if min(configuration.most, most_samples_per_s(variant)) <= most_per_s * (1 + ROUNDING):
                self.plans_by_bound += 1
            else:
                # 4. The plan does not fit when it is played, or plays no faster.
                self._play(Proposal(plan=variant, proposer=Proposer("space"), order=self.played))

    def _play(self, proposal: Proposal) -> None:
        self.played += 1
        if not self.ranking.add(proposal):
            plan, most = proposal.plan, most_samples_per_s(proposal.plan)
            name = f"{plan.schedule}, {plan.depth} stages x {plan.width}, microbatches of {plan.microbatch_size},"
            raise PipeplanError(f"{name} is too long to be played, and may play up to {most:.6g} samples/s")
        if not self._within(self.ranking.best_rate):
            found = max(self.ranking.fitting, key=lambda each: each.samples_per_s)
            raise PipeplanError(
                f"{found.named} plays {found.samples_per_s:.6g} samples/s; the certificate says that none plays more "
                f"than {self.most_per_s:.6g}"
            )

    def _within(self, samples_per_s: float) -> bool:
        return samples_per_s <= self.most_per_s * (1 + ROUNDING)


def _assumed(problem: PlanningProblem) -> str:
    """The batch and the options for which the claim holds: a plan does not hold the request that it answers."""
    options = problem.options
    given = [
        f"{field.name} {getattr(options, field.name)}"
        for field in fields(Options)
        if getattr(options, field.name) != field.default and field.name not in _IN_PLANS
    ]
    return f"asked for a batch of {problem.batch_size}, with {', '.join(given) or 'no further option'}"
