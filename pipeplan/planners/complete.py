"""Complete: makes the whole plan, with its costs, from a planner's decision; and plays its streams.

Streams are played with the plan's costs as far as that takes less than a second: without a flush until the time of a
batch repeats. Where a batch is too long, two shorter ones are played, and the result is extrapolated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isclose, lcm

from pipeplan.costs.estimate import estimate
from pipeplan.costs.graph import in_order
from pipeplan.costs.memory import fixed_copies, keeps_master_weights
from pipeplan.costs.tied import copied_bytes, tied_stages
from pipeplan.documents.certificate import Certificate
from pipeplan.documents.engines import engine_named
from pipeplan.documents.identity import known_id
from pipeplan.documents.plan import Alternative, ClosedForm, Plan, Simulated, Stage, Worker
from pipeplan.documents.stage_costs import StageCosts
from pipeplan.documents.stage_memory import BY_WEIGHT
from pipeplan.planners.batches import minibatches, pace, played_batches, stands_for_all
from pipeplan.planners.bound import least_batch_s
from pipeplan.planners.problem import CutGraph, PlanningProblem
from pipeplan.programs.timeline import flushed_batch_s
from pipeplan.schedules.registry import schedule_named
from pipeplan.simulation.predict import TIES_APART, keeps_ties_apart

SIMULATED_INSTRUCTIONS = 250_000
"""Upper bound on the instructions of an answer that are played for its price, in less than a second."""

_FLUSHED_BATCHES = 3
"""The batches played of a schedule with a flush. They are equal but for the first, which fills the pipeline, and the
last, whose exchange has nothing to overlap with. An engine that exchanges after the backward needs no last one.
"""

_BATCHES = 4
"""The fewest batches that are played of a schedule without a flush."""

_TIMES_FILLED = 16
"""How often a schedule without a flush fills the pipeline in a play at least: its start and end differ from the rest.
"""

_ROUNDING = 1e-9
"""Plays of one plan whose figures differ by no more are the same: of equal batches, one is played."""

_SHORTER = (2, 3)
"""Microbatches of the shorter batches from which a longer one is extrapolated, in multiples of a pipeline's ranks."""


def play(plan: Plan, *, instructions: int = SIMULATED_INSTRUCTIONS, needed: float = 0.0) -> Simulated | None:
    """The play of the plan's streams over enough batches for a steady state (`batches.pace`), or as the limit allows.

    If a batch has too many instructions, two shorter ones are played, and the result is extrapolated; no batch is then
    shorter than the bound (`least_batch_s`). The result is None if the two shorter ones together have too many
    instructions as well, and for stages of unequal replicas, whose batches cannot be shortened. The play of a plan with
    fewer samples a second than `needed` need not be steady.
    """
    played, batches = _to_play(plan, instructions)
    if not batches:
        return None
    most = max(instructions, SIMULATED_INSTRUCTIONS) // sum(map(_instructions, played))
    plays = [_Played.of(each, batches) for each in played]
    while not all(each.steady or each.rate < needed for each in plays) and 2 * batches <= most:
        batches *= 2
        plays = [_Played.of(each, batches) for each in played]
    return plays[0].simulated() if played == (plan,) else _extrapolated(plan, *plays)


def _extrapolated(plan: Plan, less: "_Played", more: "_Played") -> Simulated:
    """The figures of the whole batch, from two shorter ones."""
    beyond = (plan.microbatches - more.plan.microbatches) / (more.plan.microbatches - less.plan.microbatches)

    def line(low: float, high: float) -> float:
        return high + (high - low) * beyond

    whole = _Played(
        batches=more.batches,
        batch_s=max(line(less.batch_s, more.batch_s), least_batch_s(plan)),
        span_s=line(less.span_s, more.span_s),
        busy_s=tuple(map(line, less.busy_s, more.busy_s)),
        peak_bytes=tuple(round(line(*pair)) for pair in zip(less.peak_bytes, more.peak_bytes, strict=True)),
        plan=plan,
    )
    return replace(whole.simulated(), extrapolated_from=more.plan.microbatches)


def play_later(plan: Plan, *, instructions: int) -> Simulated | None:
    """The play of a plan that was stored without one, marked as added. It is what planners would play now; if that is
    too long, a play of at most `instructions` instructions.
    """
    for limit in (min(SIMULATED_INSTRUCTIONS, instructions), instructions):
        simulated = play(plan, instructions=limit)
        if simulated is not None:
            return replace(simulated, added_within=limit)
    return None


def play_again(plan: Plan) -> Simulated | None:
    """A play like the plan's own: over as many batches, extrapolated where that one was. A plan without a play is
    played as planners do.

    None if it is too long to be played; a plan's own play may be as long as the plan says.
    """
    held = plan.simulated
    if held is None:
        return play(plan)
    played = plan if held.extrapolated_from is None else replace(plan, microbatches=held.extrapolated_from)
    limit = held.batches * _instructions(played)
    if limit > (held.added_within or SIMULATED_INSTRUCTIONS):
        return None
    plays = [_Played.of(each, held.batches) for each in ((plan,) if played is plan else _shorter_plans(plan))]
    again = plays[0].simulated() if played is plan else _extrapolated(plan, *plays)
    return replace(again, added_within=held.added_within)


def same_play(one: Simulated, other: Simulated) -> bool:
    """Whether two plays give the same, but for rounding."""
    counts = ("batches", "peak_memory_bytes", "extrapolated_from", "added_within")
    if any(getattr(one, name) != getattr(other, name) for name in counts):
        return False
    pairs = [(one.bubble_fraction, other.bubble_fraction)]
    if len(one.busy_fraction) != len(other.busy_fraction):
        return False
    pairs += zip(one.busy_fraction, other.busy_fraction, strict=True)
    rates = one.throughput_samples_per_s, other.throughput_samples_per_s
    return isclose(*rates, rel_tol=_ROUNDING) and all(abs(a - b) <= _ROUNDING for a, b in pairs)


def length(plan: Plan, simulated: Simulated | None = None, *, instructions: int = SIMULATED_INSTRUCTIONS) -> int:
    """How many instructions `play` plays with this limit: at least, or where it gave `simulated`."""
    played, batches = _to_play(plan, instructions)
    if simulated is not None:  # it was played over twice as many batches each time
        batches = 2 * simulated.batches - batches
    return batches * sum(map(_instructions, played))


def _to_play(plan: Plan, limit: int) -> tuple[tuple[Plan, ...], int]:
    """The plans played for a plan's price, itself or two shorter ones, and the number of batches of each; 0 if all are
    too long.
    """
    batches = _batches_to_play(plan, limit)
    if batches:
        return (plan,), batches
    shorter = _shorter_plans(plan)
    batches = min((_batches_to_play(each, limit) for each in shorter), default=0)
    whole = batches * _instructions(plan)
    if 0 < whole <= min(batches * sum(map(_instructions, shorter)), SIMULATED_INSTRUCTIONS):
        return (plan,), batches
    return shorter, batches


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """The figures of a play, with an entry for every lane. All grow linearly with the microbatches."""

    batches: int
    batch_s: float
    span_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    plan: Plan
    steady: bool = True

    @classmethod
    def of(cls, plan: Plan, batches: int) -> "_Played":
        played = played_batches(plan, batches)
        if schedule_named(plan.schedule).flushes:
            batch_s, steady = flushed_batch_s(played.batch_ends_s), True
        else:
            known = pace(plan, played)
            batch_s, steady = known.batch_s, known.steady
        if plan.width is not None:
            # In a short play exchanges may still fall behind, and under a flush a busy rank does for two or three
            # batches: the bound covers that.
            batch_s = max(batch_s, least_batch_s(plan))
        return cls(
            batches=batches,
            batch_s=batch_s,
            span_s=played.span_s,
            busy_s=played.busy_s,
            peak_bytes=played.peak_bytes,
            plan=plan,
            steady=steady,
        )

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.plan.microbatch_size * self.plan.microbatches * lcm(*self.plan.replicas) / self.batch_s

    def simulated(self) -> Simulated:
        """The rates and peaks, by rank."""
        plan, span_s = self.plan, self.span_s
        lanes: Sequence[int] = range(len(plan.placement))
        if stands_for_all(plan):
            lanes = [worker.stage for worker in plan.placement]
        total_s = span_s * len(self.busy_s)
        return Simulated(
            batches=self.batches,
            throughput_samples_per_s=self.rate,
            bubble_fraction=1.0 - sum(self.busy_s) / total_s if total_s > 0 else 0.0,
            busy_fraction=tuple(self.busy_s[lane] / span_s if span_s > 0 else 0.0 for lane in lanes),
            peak_memory_bytes=tuple(self.peak_bytes[lane] for lane in lanes),
        )


def _shorter_plans(plan: Plan) -> tuple[Plan, ...]:
    """The same plan with the microbatches of `_SHORTER`; none if it has no more microbatches, or cannot be shortened.

    Where half of a batch counts, the numbers are doubled, because an odd half would be rounded. Without a flush a batch
    takes as long as its microbatches, or as the exchange that overlaps them, which is therefore shortened as well.
    """
    halves = 2 if plan.split_backward_half_way else 1
    microbatches = [halves * times * plan.depth // plan.chunks for times in _SHORTER]
    unequal = plan.width is None or schedule_named(plan.schedule).update == "minibatch"
    if unequal or plan.microbatches <= microbatches[-1]:
        return ()
    shorter = []
    for count in microbatches:
        costs, share = plan.costs, count / plan.microbatches
        if not schedule_named(plan.schedule).flushes:
            costs = tuple(
                replace(
                    each,
                    reduce_s=share * each.reduce_s,
                    reduce_tail_s=None if each.reduce_tail_s is None else share * each.reduce_tail_s,
                )
                for each in costs
            )
        shorter.append(replace(plan, microbatches=count, costs=costs))
    return tuple(shorter)


def _batches_to_play(plan: Plan, limit: int) -> int:
    """The batches to play; without a flush fewer if they take too long, at least `_BATCHES`; 0 if all take too long."""
    affordable = limit // _instructions(plan)
    if schedule_named(plan.schedule).flushes:
        wanted = _FLUSHED_BATCHES if engine_named(plan.engine).overlaps else _FLUSHED_BATCHES - 1
        return wanted if affordable >= wanted else 0
    replicas = plan.stages[0].replicas if plan.width is None else 1
    wanted = max(_BATCHES + 1, -(-_TIMES_FILLED * plan.optimal_in_flight * replicas // minibatches(plan)))
    return min(wanted, affordable) if affordable >= _BATCHES else 0


def _instructions(plan: Plan) -> int:
    """The instructions of a batch.

    A minibatch has a forward, a backward, two sends and two receives; a worker has an exchange and an update, in ASP
    one for every other worker.
    """
    count = minibatches(plan)
    updates = count if schedule_named(plan.schedule).update == "minibatch" else 1
    if schedule_named(plan.schedule).update == "replica":
        updates = plan.stages[0].replicas ** 2
    return sum((7 if stage.recompute else 6) * count + 2 * updates for stage in plan.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a planner decides; everything else of a plan follows from it and the problem.

    `devices` are those of the ranks, where devices in between stay idle. `order` lists a graph's blocks in the order in
    which the stages hold them. `chunks`: the stages that a rank holds; the placement then lists their first ones.
    `copies_bytes`: by stage, the copies of trained and of frozen weights of other stages that its memory counts.
    """

    planner: str
    cost_model: str
    stages: tuple[Stage, ...]
    placement: tuple[Worker, ...]
    schedule: str
    microbatch_size: int
    microbatches: int
    batch_size: int
    closed_form: ClosedForm
    optimal_in_flight: int
    configurations_considered: int
    alternatives: tuple[Alternative, ...] = ()
    certificate: Certificate | None = None
    devices: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None
    chunks: int = 1
    copies_bytes: tuple[tuple[int, int], ...] = ()


def complete(problem: PlanningProblem, decision: Decision) -> Plan:
    """The plan, without its price: `solve` and `auto` play it.

    A decision on the chain of a graph becomes a plan of the graph. If every stage ends with the first blocks of the
    profile, as many as it has, the plan keeps the profile's own order, and can be run.
    """
    if problem.graph is not None:
        return complete(problem.graph.problem, _on_graph(problem.graph, decision))
    options = problem.options
    decision = replace(decision, stages=_with_copies(problem, decision))
    master_weights = keeps_master_weights(problem.profile.dtype, options.master_weights)
    plan = Plan(
        planner=decision.planner,
        cost_model=decision.cost_model,
        model=problem.profile.model,
        dtype=problem.profile.dtype,
        profile_id=known_id(problem.profile),
        cluster_id=known_id(problem.cluster),
        batch_size=decision.batch_size,
        stages=decision.stages,
        costs=_costs(problem, decision, master_weights=master_weights),
        placement=decision.placement,
        schedule=decision.schedule,
        microbatch_size=decision.microbatch_size,
        microbatches=decision.microbatches,
        optimizer=options.optimizer_or_default,
        memory_accounting=options.memory,
        closed_form=decision.closed_form,
        optimal_in_flight=decision.optimal_in_flight,
        configurations_considered=decision.configurations_considered,
        alternatives=decision.alternatives,
        order=None if problem.profile.edges is None else decision.order,
        certificate=decision.certificate,
        master_weights=master_weights,
        chunks=decision.chunks,
        estimated=problem.profile.estimated,
        interpolated=decision.microbatch_size not in problem.profile.microbatch_sizes,
        warnings=problem.warnings,
        autocast=problem.profile.autocast,
        tied=tied_stages(
            problem.profile,
            problem.cluster,
            decision.stages,
            decision.placement,
            order=decision.order,
            devices=decision.devices,
            in_v=schedule_named(decision.schedule).v_shaped,
        ),
    )
    if not keeps_ties_apart(plan):
        return plan
    return replace(plan, warnings=(*plan.warnings, f"{plan.schedule} {TIES_APART}"))


def _with_copies(problem: PlanningProblem, decision: Decision) -> tuple[Stage, ...]:
    """The stages with the memory of their copies of weights that other stages have as well. Planners count weights by
    block, and at most the copies that any stages have (`costs.tied.copies_apart`).
    """
    profile, options = problem.profile, problem.options
    if not (profile.tied or profile.tied_frozen):
        return decision.stages
    masters = keeps_master_weights(profile.dtype, options.master_weights)
    a_set = fixed_copies(profile.dtype, options.optimizer_or_default, master_weights=masters)[0]
    profile = profile if decision.order is None else in_order(profile, decision.order)
    stages = []
    all_counted = decision.copies_bytes or ((0, 0),) * len(decision.stages)
    for stage, (counted, frozen_counted) in zip(decision.stages, all_counted, strict=True):
        inside = stage.start, stage.stop
        copies_bytes, frozen_copies = (sum(copied_bytes(t, *inside)) for t in (profile.tied, profile.tied_frozen))
        weight_bytes = sum(block.trained_bytes for block in profile.blocks[slice(*inside)])
        if (known := stage.memory) is None:
            stages.append(stage)
            continue
        once_bytes = sum(block.untrained_bytes for block in profile.blocks[slice(*inside)]) + frozen_counted
        memory = replace(known, weights=known.weights - once_bytes)
        if copies_bytes != counted and weight_bytes + counted:
            more = (weight_bytes + copies_bytes) / (weight_bytes + counted)
            memory = replace(memory, **{name: round(getattr(memory, name) * more) for name in BY_WEIGHT})
            if options.memory == "training":  # late gradients are not in proportion: those of the copies count whole
                copied = known.gradients + (copies_bytes - counted) * a_set
                memory = replace(memory, gradients=max(memory.gradients, copied))
        memory = replace(memory, weights=memory.weights + once_bytes + frozen_copies - frozen_counted)
        stages.append(replace(stage, memory=memory, memory_bytes=stage.memory_bytes + memory.total - known.total))
    return tuple(stages)


def _on_graph(graph: CutGraph, decision: Decision) -> Decision:
    """A decision on the chain of a graph, in terms of the graph's blocks."""
    order, places = tuple(graph.order), graph.places
    stages = tuple(replace(each, start=places[each.start], stop=places[each.stop]) for each in decision.stages)
    if all(max(order[: stage.stop]) < stage.stop for stage in stages):
        order = tuple(range(len(order)))
    proven = decision.certificate and graph.among_places(decision.certificate)
    return replace(decision, stages=stages, order=order, certificate=proven)


def _costs(problem: PlanningProblem, decision: Decision, *, master_weights: bool) -> tuple[StageCosts, ...]:
    """Every stage's costs, from the profile of the type of its devices."""
    options = problem.options
    on_type = {
        name: estimate(
            problem.profile_on(name),
            problem.cluster,
            decision.stages,
            decision.placement,
            microbatch_size=decision.microbatch_size,
            optimizer=options.optimizer_or_default,
            schedule=schedule_named(decision.schedule),
            recompute_factor=options.recompute_factor,
            master_weights=master_weights,
            devices=decision.devices,
            order=decision.order,
            synchronisation=options.synchronisation or "all-reduce",
        )
        for name in {stage.device for stage in decision.stages}
    }
    return tuple(on_type[stage.device][index] for index, stage in enumerate(decision.stages))
