"""Proposals: all planners' answers to one problem."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.errors import InvalidInputError, MissingDependencyError, PipeplanError
from pipeplan.planners.problem import Planner, PlanningProblem

T = TypeVar("T")

MINIBATCHES = 4
"""The number of largest measured sizes for which PipeDream's planner is called: it plans one size at a time."""


@dataclass(frozen=True, slots=True)
class Proposer:
    """A planner, and its options in addition to the user's."""

    planner: str
    microbatch_size: int | None = None

    def asked(self, problem: PlanningProblem) -> PlanningProblem:
        """The problem for the planner."""
        options = replace(
            problem.options,
            microbatch_size=self.microbatch_size or problem.options.microbatch_size,
            split_backward=None,
            split_backward_half_way=False,
        )
        return replace(problem, options=options)

    def __str__(self) -> str:
        return f"{self.planner}{f' at {self.microbatch_size}' if self.microbatch_size else ''}"


ONLY_EXACT = Proposer("exact")
"""Called only if no other planner can express the problem: forced or forbidden cuts, or devices of several types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan, its proposer, and its position in the order in which planners were called."""

    plan: Plan
    proposer: Proposer
    order: int

    @property
    def way(self) -> object:
        """The choices besides its stages: its schedule and the form of its backward."""
        return self.plan.schedule, self.plan.split_backward, self.plan.split_backward_half_way

    @property
    def configuration(self) -> object:
        """Everything on which a run of it depends: two proposals with the same key are one."""
        plan = self.plan
        stages = tuple((s.start, s.stop, s.replicas, s.recompute, s.recompute_unit) for s in plan.stages)
        batch = (plan.microbatch_size, plan.microbatches, plan.split_backward, plan.split_backward_half_way)
        states = plan.sharding, plan.replicate, plan.offload, plan.offload_share, plan.graphs, plan.a2a_overlap
        return plan.schedule, plan.order, plan.form, states, stages, plan.placement, batch


@dataclass(slots=True, kw_only=True)
class PlannersAsked:
    """The planners' answers."""

    proposals: list[Proposal] = field(default_factory=list)
    answers: list[Plan] = field(default_factory=list)
    infeasible: list[tuple[Proposer, Infeasible]] = field(default_factory=list)
    refused: list[tuple[Proposer, PipeplanError]] = field(default_factory=list)

    @property
    def considered(self) -> int:
        """The configurations that all planners considered."""
        plans = sum(plan.configurations_considered for plan in self.answers)
        return plans + sum(answer.configurations_considered for _, answer in self.infeasible)

    def propose(self, plan: Plan, proposer: Proposer) -> None:
        """Adds a plan, unless the same has been proposed."""
        proposal = Proposal(plan=plan, proposer=proposer, order=len(self.proposals))
        if proposal.configuration not in {known.configuration for known in self.proposals}:
            self.proposals.append(proposal)


def ask_all(problem: PlanningProblem, planners: Mapping[str, Planner]) -> PlannersAsked:
    """Every planner's answer."""
    asked = PlannersAsked()
    for proposer in _proposers(problem, planners):
        try:
            answer = planners[proposer.planner](proposer.asked(problem))
        except (InvalidInputError, MissingDependencyError) as error:
            asked.refused.append((proposer, error))
            continue
        if isinstance(answer, Infeasible):
            asked.infeasible.append((proposer, answer))
        else:
            asked.answers.append(answer)
            asked.propose(answer, proposer)
    return asked


def _proposers(problem: PlanningProblem, planners: Mapping[str, Planner]) -> Iterator[Proposer]:
    """The planners to be called, in the order in which ties are decided; only `exact` supports several types."""
    if len(problem.cluster.types) > 1:
        return iter([ONLY_EXACT] if ONLY_EXACT.planner in planners else [])
    options = problem.options
    every = [Proposer("pipedream-2bw")]
    sizes = [size for size in problem.profile.microbatch_sizes if problem.batch_size % size == 0]
    free = options.microbatch_size is None and not options.synchronous
    if free and sizes and len(problem.profile.microbatch_sizes) > 1:
        every += [Proposer("pipedream", microbatch_size=size) for size in sizes[-MINIBATCHES:]]
    else:  # the user or the profile leaves no choice, or it is refused
        every += [Proposer("pipedream")]
    every += [Proposer("gpipe")]
    if options.forced_cuts or options.forbidden_cuts:
        every += [ONLY_EXACT]
    return (proposer for proposer in every if proposer.planner in planners)


def pareto_front(
    items: Iterable[T], *, throughput_samples_per_s: Callable[[T], float], memory_bytes: Callable[[T], int]
) -> list[T]:
    """The items that no other dominates: as fast or faster with less memory, or faster with as much. Fastest first.

    The first of the items that are equal in both stands for all of them. O(n log n).
    """
    front: list[T] = []
    for item in sorted(items, key=lambda each: (-throughput_samples_per_s(each), memory_bytes(each))):
        if not front or memory_bytes(item) < memory_bytes(front[-1]):
            front.append(item)
    return front
