"""Auto: the configuration that is fastest when its instruction streams are played.

The planners' closed forms know neither latency nor transfers that share a port, nor how well compute hides them; the
streams do. Every planner proposes its answer. In addition, the shapes of all schedules with equal replicas are searched
on every placement, the highest bound first (`search`). One ranking covers them all:

1. Those that fit come first: by their planner's accounting, and by the peak of the play (`memory=training`). No stage
   may update after more samples than the batch has.
2. Then the throughput of the play decides. At most `PLAYED_INSTRUCTIONS` instructions are played, and `MOST_SPLITS`
   configurations split into stages; the certificate says how far the answer may be from the best of the space.
3. Ties: fewer devices, then fewer stages, then the order in which they were proposed.

Ranks with several stages (interleaved, or in a V) are searched as well, although no planner proposes them (`chunks`).
Where the profile has a split backward, plans with a flush are played with 2BP as well, and those of 1F1B as ZB-H1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from pipeplan.documents.plan import Alternative, Answer, Infeasible, Plan, Reason
from pipeplan.errors import InvalidInputError, PipeplanError, require
from pipeplan.planners.auto.chunks import CHUNKED, ChunkedSpace, asks_for_chunks
from pipeplan.planners.auto.proposals import PlannersAsked, Proposer, ask_all, pareto_front
from pipeplan.planners.auto.ranking import Ranked, Ranking, has_split_backward
from pipeplan.planners.auto.search import PlayedSearch
from pipeplan.planners.auto.space import SEARCHED, PlayedSpace
from pipeplan.planners.on_chain import better_order, chains, may_be_reordered, reordered
from pipeplan.planners.pipedream.played import PlayedPartitions
from pipeplan.planners.problem import Options, Planner, PlanningProblem
from pipeplan.planners.reasons import readable
from pipeplan.planners.spaces import Space
from pipeplan.schedules.registry import schedule_named, with_whole_backward

NAME = "auto"

TWO_BW = "pipedream-2bw"
PIPEDREAM = "pipedream"

SHOWN_MISSES = 10
"""For each planner, the number of alternatives shown that do not fit."""


def auto(problem: PlanningProblem, planners: Mapping[str, Planner]) -> Answer:
    """The fastest play among the proposals of all planners that accept the problem.

    A planner that cannot answer is left out, and an alternative says why. Raises InvalidInputError if none can.
    """
    _require_split_backward(problem)
    searched, in_chunks = with_whole_backwards(problem), asks_for_chunks(problem)
    asked = ask_all(searched, {} if in_chunks else planners)
    if not asked.answers and not asked.infeasible and not in_chunks:
        raise _refusal(asked.refused)  # from a planner that supports the schedule and the options
    answer = fastest(NAME, asked, _spaces(searched, asked), Ranking(problem=problem))
    if not isinstance(answer, Plan):
        return answer
    others = answer.planner != NAME
    cost_model = f"{answer.planner}: {answer.cost_model}" if others else answer.cost_model
    return replace(answer, cost_model=cost_model, planner=NAME)


def _refusal(refused: Sequence[tuple[Proposer, PipeplanError]]) -> PipeplanError:
    """Why no planner accepts the problem: a planner's rule for a value, or the options that none takes together."""
    errors = [error for _, error in refused]
    unused = [e for e in errors if isinstance(e, InvalidInputError) and e.rule.startswith("is not an option")]
    telling = [e for e in errors if e not in unused and not _of_another_schedule(e)]
    if telling or not unused:
        return (telling or errors)[0]
    first = unused[0]
    if len(unused) == len(errors) and len({error.field for error in unused}) == 1:
        return InvalidInputError(first.field, "is an option that no planner uses here", first.value)
    named = dict.fromkeys(f"{proposer}: {error}" for proposer, error in refused)
    rule = f"is an option that no planner takes together with the others ({'; '.join(named)})"
    return InvalidInputError(first.field, rule, first.value)


def fastest(
    name: str,
    asked: PlannersAsked,
    spaces: Sequence[Space],
    ranking: Ranking,
    *,
    afterwards: Callable[[], None] = lambda: None,
) -> Answer:
    """The fastest play of the planners' answers and of the spaces; it keeps the name of its planner.

    `afterwards` may add candidates that the search has left out to the ranking.
    """
    in_chunks = any(isinstance(space, ChunkedSpace) for space in spaces)
    if not asked.proposals and not in_chunks:
        return _infeasible(name, asked)
    partitions = [space for space in spaces if isinstance(space, PlayedPartitions)]
    search = PlayedSearch(
        spaces=spaces,
        ranking=ranking,
        further=OtherOrders(spaces=spaces).better,
        moved=lambda plan: chain.from_iterable(space.moved(plan) for space in partitions),
    )
    if spaces:
        search.run(asked.proposals)
        afterwards()
    else:
        ranking.add_answers(asked.proposals)
    ranking.sort()
    if not ranking.fitting:
        return _infeasible(name, asked, ranking.exceeding, search if in_chunks else None)
    best = ranking.fitting[0]
    return replace(
        best.plan,
        planner=best.proposal.proposer.planner,
        configurations_considered=asked.considered + search.configurations,
        alternatives=(*_alternatives(asked, ranking), *search.alternatives()),
        pareto=tuple(_pareto(ranking.fitting)),
        certificate=search.certificate(best) if spaces and best.played else best.plan.certificate,
    )


@dataclass(slots=True, kw_only=True)
class OtherOrders:
    """The spaces of a graph on orders of its blocks that are better for a plan. No order is taken twice."""

    spaces: Sequence[Space]
    _taken: set[tuple[int, ...]] = field(default_factory=set)

    def better(self, plan: Plan) -> Sequence[Space]:
        """The spaces on an order with better cuts for the plan's stages; none where there is none, or for a chain."""
        anywhere = [
            space for space in self.spaces if isinstance(space, PlayedSpace) and may_be_reordered(space.problem)
        ]
        if not anywhere:
            return ()
        order = better_order(anywhere[0].problem, plan)
        if order is None or order in self._taken:
            return ()
        self._taken.add(order)
        return [replace(space, problem=reordered(space.problem, order)) for space in anywhere]


def with_whole_backwards(problem: PlanningProblem) -> PlanningProblem:
    """The problem for planners and spaces: for ZB-H1 that of 1F1B, whose stages are then played under ZB-H1."""
    schedule = problem.options.schedule
    if schedule is None or with_whole_backward(schedule) == schedule:
        return problem
    return replace(problem, options=replace(problem.options, schedule=with_whole_backward(schedule)))


def _require_split_backward(problem: PlanningProblem) -> None:
    """Raises InvalidInputError if a split backward is requested that the profile lacks, or that is turned off."""
    options, rule = problem.options, "needs a profile with backward_input_s and backward_weight_s"
    if options.split_backward:
        require(has_split_backward(problem), "split_backward", rule, True)
    if with_whole_backwards(problem) is not problem:
        require(has_split_backward(problem), "schedule", rule, options.schedule)
        rule = f"must not be off for {options.schedule}, which splits the backward"
        require(options.split_backward is not False, "split_backward", rule, False)


def searched_schedules(options: Options) -> tuple[str, ...]:
    """The schedules of which every shape is searched: all, those without late gradients, or the requested one."""
    known = [name for name in (*SEARCHED, *CHUNKED) if options.schedule in (None, name)]
    return tuple(name for name in known if schedule_named(name).synchronous or not options.synchronous)


def _spaces(problem: PlanningProblem, asked: PlannersAsked) -> list[Space]:
    """The spaces of the planners that accept the problem."""
    known = searched_schedules(problem.options)
    answered = {plan.planner for plan in asked.answers} | {answer.planner for _, answer in asked.infeasible}
    spaces: list[Space] = [
        PlayedPartitions(problem=Proposer(PIPEDREAM, plan.microbatch_size).asked(problem), whole=False)
        for plan in asked.answers
        if plan.planner == PIPEDREAM
    ]
    if not problem.options.safe_batch and (TWO_BW in answered or asks_for_chunks(problem)):
        spaces += played_spaces(problem, known)
    return spaces


def played_spaces(problem: PlanningProblem, schedules: Sequence[str]) -> list[Space]:
    """The spaces of these schedules; ranks that hold several stages have a separate one."""
    in_chunks = [name for name in schedules if schedule_named(name).chunked]
    others = () if problem.options.chunks is not None else tuple(name for name in schedules if name not in in_chunks)
    every = [PlayedSpace(problem=chain, schedules=others) for chain in chains(problem)]
    spaces: list[Space] = [*every] if others else []
    if not in_chunks:
        return spaces
    # If the split backward was not measured, the price of a schedule that splits it is only a guess.
    guessed = problem.options.schedule is None and not has_split_backward(problem)
    for counted_on in (True, False):
        own = [name for name in in_chunks if counted_on != (guessed and schedule_named(name).splits_backward)]
        if own:
            spaces.append(ChunkedSpace(model=every[0].model, schedules=own, counted_on=counted_on))
    return spaces


def _infeasible(
    name: str, asked: PlannersAsked, over: Sequence[Ranked] = (), searched: PlayedSearch | None = None
) -> Infeasible:
    """Every planner's nearest miss, the nearest of all first, then the planners that refused the problem."""
    reasons = [
        replace(reason, detail=f"{proposer}: {reason.detail}")
        for proposer, answer in asked.infeasible
        for reason in answer.reasons
    ]
    reasons.sort(key=lambda reason: (reason.missing_bytes is None, reason.missing_bytes or 0))
    played = [
        Reason(
            rule="a plan must fit the device's memory when it is played, and the batch",
            detail=f"{each.named}: {each.over}",
        )
        for each in over
    ]
    left_out = [
        Reason(rule="a planner must support the options that are asked for", detail=f"{proposer}: {error}")
        for proposer, error in asked.refused
    ]
    if searched and not played and not reasons:
        count = searched.configurations
        rule = "the stages of a rank must fit its device together, and the batch"
        detail = f"auto splits them nearly evenly and moves cuts; of {count} configurations none fits so"
        if not count:
            rule = "every stage must have a block, every rank a device, and a pipeline the microbatches of its schedule"
            detail = "no number of ranks, stages a rank, replicas and microbatches that the options allow has"
        played = [Reason(rule=rule, detail=detail)]
    considered = asked.considered + (searched.configurations if searched else 0)
    return Infeasible(planner=name, reasons=(*played, *reasons, *left_out), configurations_considered=considered)


def _alternatives(asked: PlannersAsked, ranking: Ranking) -> Iterator[Alternative]:
    """Everything but the answer, with the reason: slower, too large, or refused.

    The fastest of the plans that differ only in stages or placement stands for all of them.
    """
    best, *others = ranking.fitting
    for other in _one_of_each(others):
        rate = f"{other.samples_per_s:.4g} samples/s"
        if not other.played:
            found = _less(other, best) if other.samples_per_s < best.samples_per_s else "it may be faster"
            reason = f"too long to be played; about {rate}, {found}"
        elif other.samples_per_s == best.samples_per_s:
            reason = f"as fast when played: {rate}, on no fewer devices"
        else:
            reason = f"slower when played: {rate}, {_less(other, best)}"
        alike = "other stages or places, " if other.kind == best.kind else ""
        yield other.alternative(f"{'2BP, ' if other.plan.split_backward else ''}{alike}{reason}")
    for other in _one_of_each(ranking.exceeding):
        yield other.alternative(other.over or "")
    for answer in asked.answers:
        misses = [other for other in answer.alternatives if not other.closed_form_samples_per_s and other.memory_bytes]
        yield from misses[:SHOWN_MISSES]
    for proposer, infeasible in asked.infeasible:
        yield _nothing(proposer, f"{proposer}: no plan fits; {infeasible.reasons[0].detail}")
    for proposer, error in asked.refused:
        if not _of_another_schedule(error):  # a user who names a schedule knows that
            yield _nothing(proposer, f"{proposer} is left out: {error}")


def _of_another_schedule(error: PipeplanError) -> bool:
    """Whether a planner cannot make the schedule that the options name."""
    return isinstance(error, InvalidInputError) and error.field == "schedule"


def _one_of_each(ranked: Sequence[Ranked]) -> Iterator[Ranked]:
    """The first of each kind."""
    kinds = set()
    for each in ranked:
        if each.kind not in kinds:
            kinds.add(each.kind)
            yield each


def _nothing(proposer: Proposer, reason: str) -> Alternative:
    return Alternative(
        schedule=proposer.planner,
        depth=0,
        width=None,
        microbatch_size=0,
        microbatches=0,
        recompute=False,
        throughput_samples_per_s=None,
        memory_bytes=None,
        reason=reason,
    )


def _pareto(fitting: Sequence[Ranked]) -> Iterator[Alternative]:
    best = fitting[0]
    front = pareto_front(
        fitting,
        throughput_samples_per_s=lambda each: each.samples_per_s,
        memory_bytes=lambda each: each.memory_bytes,
    )
    for each in front:
        less_bytes = best.memory_bytes - each.memory_bytes
        if each is best:
            reason = "the answer"
        elif less_bytes > 0:
            reason = f"{readable(less_bytes)} less on a device, {_less(each, best)} throughput"
        else:  # no play is faster than the answer
            reason = f"too long to be played; it may be faster, with {readable(-less_bytes)} more on a device"
        yield each.alternative(reason)


def _less(other: Ranked, best: Ranked) -> str:
    percent = 100 * (1 - other.samples_per_s / best.samples_per_s)
    return f"{percent:.1f} % less" if percent >= 0.1 else "less than 0.1 % less"
