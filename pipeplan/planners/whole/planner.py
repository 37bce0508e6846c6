"""Whole: the fastest play of a model among everything that an engine runs (`planners.auto` uses it for other engines).

The search is `auto`'s: configurations by their bounds, the highest first. Some that are likely to be fast come before
them, because an early high rate rules others out. Plans are played on a cluster whose devices are a form's groups.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, product

from pipeplan.costs.memory import keeps_master_weights
from pipeplan.documents.degrees import ANY_OFFLOAD, OFFLOADS, DegreeChoice
from pipeplan.documents.engines import TrainingEngine, cannot_offload, engine_named, with_optimizer
from pipeplan.documents.forms import AXES, SELECTIVE_UNITS, ModelForm
from pipeplan.documents.plan import Answer, Infeasible, Plan, Reason
from pipeplan.errors import InvalidInputError, require
from pipeplan.planners.auto.planner import NAME, fastest
from pipeplan.planners.auto.proposals import PlannersAsked, Proposal, Proposer
from pipeplan.planners.auto.ranking import CLOSE, Ranked, Ranking
from pipeplan.planners.bound import most_samples_per_s
from pipeplan.planners.engine_options import require_engine_options
from pipeplan.planners.problem import Options, PlanningProblem, refuse_unused
from pipeplan.planners.spaces import moved_by_a_block
from pipeplan.planners.whole.budget import BUDGET
from pipeplan.planners.whole.choices import choices, compared, rates_of
from pipeplan.planners.whole.degrees import Degrees, recompute_ways, selective_units
from pipeplan.planners.whole.misses import left_by_options, nearest_miss
from pipeplan.planners.whole.space import PlacedDegrees, WholeSpace

USED = (
    *("engine", "microbatch_size", "schedule", "stages", "chunks", "recompute", "recompute_unit", "data"),
    *("tensor", "sequence_parallel", "context", "expert", "expert_tensor", "sharding", "replicate"),
    *("graphs", "a2a_overlap", "offload", "offload_share"),
)
"""The options that the planner uses."""


def whole(problem: PlanningProblem) -> Answer:
    """The fastest plan for the requested engine, with the form of its blocks.

    Offloading is searched if nothing fits without it, or if the options request it. Raises InvalidInputError for a
    profile without forms, options that the engine does not support, and degrees that the profile has no form for.
    """
    space, ranking = whole_space(problem)
    asked = PlannersAsked()
    for plan in _different(space):
        asked.propose(plan, Proposer(NAME))
    if not asked.proposals:
        found = ((each, each.split()) for each in space.configurations())
        fitting = next((made for each, stops in found if stops and (made := each.plan(stops))), None)
        if fitting is None and problem.options.offload is None and problem.cluster.host is not None:
            return whole(offloading(problem))
        if fitting is None:
            reasons = (nearest_miss(space),) if space.considered else _nothing_left(space)
            return Infeasible(planner=NAME, reasons=reasons, configurations_considered=space.considered)
        asked.propose(fitting, Proposer(NAME))
    highest = max(most_samples_per_s(proposal.plan) for proposal in asked.proposals)
    for proposal in asked.proposals:
        if ranking.best_rate >= highest * BUDGET.near:
            break
        ranking.add(proposal, longest=BUDGET.longest_play)
    for_search = ranking.left
    _step_on(space, ranking)
    ranking.left = for_search
    answer = fastest(NAME, asked, [space], ranking, afterwards=lambda: _step_on(space, ranking))
    if not isinstance(answer, Plan):
        return answer
    return replace(answer, choices=(*choices(space, answer), *_on_host(space, answer)))


def _on_host(space: WholeSpace, answer: Plan) -> Iterator[DegreeChoice]:
    """The plays of plans that offload, for an answer that does not, if the options leave it open."""
    problem = space.problem
    if problem.options.offload is not None or problem.cluster.host is None:
        return
    asked, (_, ranking) = PlannersAsked(), whole_space(offloading(problem))
    offloaded = replace(space, problem=offloading(problem), offloaded_only=True)
    asked.propose(answer, Proposer(NAME))
    ranking.add(asked.proposals[0])
    ranking.left = BUDGET.host_instructions
    fastest(NAME, asked, [offloaded], ranking)
    if ranking.best is not None and ranking.best.plan.offload != OFFLOADS[0]:
        _step_on(offloaded, ranking)
    for offload in OFFLOADS[1:]:
        played = [each for each in ranking.fitting if each.played and each.plan.offload == offload]
        if played:
            best = min(played, key=Ranked.preference).plan
            yield compared(("offload", offload), OFFLOADS[0], best, rates_of(answer), BUDGET.host_instructions)


def _different(space: WholeSpace) -> Iterator[Plan]:
    """Plans that are likely to be fast, one for each form, data, most blocks of a rank, and one stage or several."""
    seen = set[object]()
    for placed in space.with_stages(islice(space.likely(), BUDGET.among)):
        degrees = placed.degrees
        kind = degrees.recipe.form, degrees.data, _most_blocks(space, degrees), degrees.chunks > 1
        plan = None if kind in seen else placed.plan(placed.splits()[0])
        if plan is not None:
            seen.add(kind)
            yield plan
        if len(seen) == BUDGET.first_plays:
            return


def _step_on(space: WholeSpace, ranking: Ranking) -> None:
    """Plays the plans that are one step from the fastest, and continues from any faster one.

    On a slow network, bounds and estimates are inaccurate, but equally so for similar plans.
    """
    left_behind, order = set[Degrees](), BUDGET.first_plays
    ranking.left = BUDGET.step_instructions
    while (best := ranking.best) is not None and (degrees := Degrees.of(best.plan)) not in left_behind:
        left_behind.add(degrees)
        inside = next((at for at, worker in enumerate(best.plan.placement) if worker.stage > 0), degrees.data)
        own = [each for each in space.near(degrees, steps=0) if each.inside == inside]
        others = ((each, stops) for each in own for stops in (*each.splits()[: BUDGET.step_splits], each.most_even()))
        enough = best.samples_per_s * (1 + CLOSE)
        near = _in_turns(space, space.with_stages(each for each in space.near(degrees) if each.most > enough))
        near_splits = list(moved_by_a_block(tuple(stage.stop for stage in best.plan.stages)))
        moved = (
            (each, stops) for each in own for stops in sorted(near_splits, key=each.most_of)[-BUDGET.step_splits :]
        )
        for placed, stops in chain(others, ((each, each.split()) for each in near), moved):
            plan = None if stops is None or placed.most_of(stops) <= enough else placed.plan(stops)
            if plan is None or most_samples_per_s(plan) <= enough:
                continue
            order, fastest_yet = order + 1, ranking.best_rate
            ranking.add(Proposal(plan=plan, proposer=Proposer(NAME), order=order), longest=BUDGET.longest_play)
            if ranking.left <= 0:
                return
            if ranking.best_rate > fastest_yet and placed.degrees != degrees:  # any gain: other plans are near it
                break
            enough = ranking.enough


def _in_turns(space: WholeSpace, every: Iterable[PlacedDegrees]) -> list[PlacedDegrees]:
    """The same, by turns of their kinds: within a kind, estimates have similar errors.

    A kind ignores the sharding. It also ignores the number of ranks, if replicas and the maximum blocks of a rank are
    equal.
    """
    turns, known = list[tuple[int, int, PlacedDegrees]](), Counter[object]()
    for number, placed in enumerate(every):
        degrees, recipe = placed.degrees, placed.degrees.recipe
        own = recipe.form, recipe.microbatch_size, recipe.recompute, recipe.offload
        kind = own, degrees.data, _most_blocks(space, degrees), degrees.chunks > 1
        turns.append((known[kind], number, placed))
        known[kind] += 1
    return [placed for _, _, placed in sorted(turns, key=lambda turn: turn[:2])]


def _most_blocks(space: WholeSpace, degrees: Degrees) -> int:
    """The maximum blocks of a rank, if ranks share them evenly."""
    return -(-len(space.forms[0].blocks) // degrees.pipeline)


def offloading(problem: PlanningProblem) -> PlanningProblem:
    """The problem with all offloading allowed."""
    return replace(problem, options=replace(problem.options, offload=ANY_OFFLOAD))


def whole_space(problem: PlanningProblem) -> tuple[WholeSpace, Ranking]:
    """The space to be searched, and a ranking of its plays."""
    options = problem.options
    engine = with_optimizer(engine_named(options.engine or ""), options.optimizer_or_default)
    refuse_unused(f"auto for the engine {engine.name}", options, USED)
    rule = f"must have forms for the engine {engine.name}: estimate the model with --model, or profile its forms"
    require(bool(problem.profile.forms), "profile.forms", rule, problem.profile.model.name)
    types = [device.name for device in problem.cluster.types]
    require(len(types) == 1, "cluster.groups", f"must be of one type for the engine {engine.name}", types)
    masters, dtype = options.master_weights, problem.profile.dtype
    usual = keeps_master_weights(dtype, None)
    rule = f"must be left out or {'on' if usual else 'off'} for the engine {engine.name} with weights in {dtype}"
    require(masters in (None, usual), "master_weights", rule, masters)
    require(options.memory == "training", "memory", f"must be training for the engine {engine.name}", options.memory)
    require_engine_options(options, devices=problem.cluster.devices, batch_size=problem.batch_size)
    require_host(problem, engine)
    forms = forms_for(problem, engine)
    unit, parts = options.recompute_unit, {part for each in forms for part in selective_units(each)}
    lacking = {
        "attention": "in this profile attention's core keeps nothing that it could make again, as with fused kernels "
        "(`pipeplan-agent profile --attention unfused` estimates others)",
        "operation": "this profile says nothing of single operations that run again",
        "modules": "modules are norms, activations and projections of experts and of attention by latents (MLA), and "
        "this profile has none",
    }
    known = unit not in lacking or unit in parts
    require(known, "recompute_unit", f"must be left out or block: {lacking.get(unit or '')}", unit)
    require_room(problem, forms[0])
    fused = replace(problem, options=replace(options, split_backward=False))
    ranking = Ranking(
        problem=fused,
        left=BUDGET.played_instructions,
        longest=BUDGET.longest_play,
        longest_answer=BUDGET.longest_play,
        for_front=0,
        for_climb=BUDGET.climb_instructions,
        reserved=0,
    )
    return WholeSpace(problem=problem, engine=engine, forms=tuple(forms)), ranking


def require_host(problem: PlanningProblem, engine: TrainingEngine) -> None:
    """Raises InvalidInputError for offloading that the engine does not support, or to a host that is not described."""
    asked, options = problem.options.offload, problem.options
    if asked in (None, OFFLOADS[0]):
        return
    rule = "must give a device's share of it, to offload: memory_bytes, bandwidth_bytes_per_s and update_bytes_per_s"
    require(problem.cluster.host is not None, "cluster.host", rule, None)
    if asked == ANY_OFFLOAD:
        return
    recomputes = tuple(recompute_ways(problem, engine, SELECTIVE_UNITS))
    shardings = dict.fromkeys((*engine.shardings, *engine.pipelined_shardings))
    ways = product([each for each in shardings if options.sharding in (None, each)], recomputes, (False, True))
    rules = [
        cannot_offload(engine, asked or "", sharding=sharding, recompute=recompute, pipelined=pipelined)
        for sharding, recompute, pipelined in ways
        if options.stages is None or pipelined == (options.stages > 1)
    ]
    rule = next((rule for rule in rules if rule), f"needs a recomputation that {engine.name} has")
    require(None in rules, "offload", rule, asked)


def remade(problem: PlanningProblem, plan: Plan) -> Plan:
    """The plan made again for its engine, with the same degrees, stages and placement, with costs but without a price.

    Raises InvalidInputError for a form or degree that the engine or the profile does not have, and for stages that do
    not fit.
    """
    space, _ = whole_space(replace(problem, options=replace(problem.options, engine=plan.engine)))
    known = [each.form for each in space.forms]
    require(plan.form in known, "form", "must be one that the profile has and the options allow", plan.form)
    degrees, stops = Degrees.of(plan), tuple(stage.stop for stage in plan.stages)
    inside = next((at for at, worker in enumerate(plan.placement) if worker.stage > 0), degrees.data)
    made = space.maker(degrees).plan(stops, inside=inside)
    if made is None:
        raise InvalidInputError("stages", "must fit their devices", stops)
    return made


def forms_for(problem: PlanningProblem, engine: TrainingEngine) -> Sequence[ModelForm]:
    """The forms that the engine, the options and the number of devices allow. Raises InvalidInputError without any."""
    options, wanted = problem.options, problem.options.sequence_parallel
    able = [each for each in problem.profile.forms if engine.sequence_parallel or not each.form.sequence_parallel]
    able = [each for each in able if engine.whole_experts or each.form.expert_tensor is None]
    for axis in AXES:
        able = [each for each in able if axis in engine.axes or getattr(each.form, axis) == 1]
    ways = {each.form.sequence_parallel for each in able if each.form.tensor > 1}
    rule = f"must be {'off' if wanted else 'on'} or left out, as in the profile's forms for {engine.name}"
    require(wanted is None or wanted in (ways or {wanted}), "sequence_parallel", rule, wanted)
    able = [each for each in able if wanted is None or each.form.tensor == 1 or each.form.sequence_parallel == wanted]
    for axis in (*AXES, "expert_tensor"):
        name, asked = f"{axis}_degree" if axis == "expert_tensor" else axis, getattr(options, axis)
        known = sorted({getattr(each.form, name) for each in able})
        rule = f"must be one of {', '.join(map(str, known))}: the profile has forms for these on {engine.name}"
        require(asked is None or asked in known, axis, rule, asked)
        able = [each for each in able if asked in (None, getattr(each.form, name))]
    able = [each for each in able if problem.cluster.devices % each.form.devices == 0]
    shares_experts = any(each.form.expert > 1 for each in able)
    rule = "must be off: the profile has no experts that devices share, or the options share none"
    require(shares_experts or not options.a2a_overlap, "a2a_overlap", rule, options.a2a_overlap)
    rule = f"must have a form that {engine.name} runs on the cluster's {problem.cluster.devices} devices"
    require(bool(able), "profile.forms", rule, [each.form for each in problem.profile.forms][:4])
    return able


def require_room(problem: PlanningProblem, model: ModelForm) -> None:
    """Raises InvalidInputError for degrees that need more blocks than there are, or for a size without a form."""
    options, blocks = problem.options, len(model.blocks)
    require((options.stages or 1) <= blocks, "stages", f"must be at most {blocks}, a block for each", options.stages)
    chunks, sharing = options.chunks or 1, options.stages or min(2, options.chunks or 1)
    rule = f"must be at most {blocks // sharing}: {sharing} ranks share {blocks} blocks"
    require(chunks * sharing <= blocks, "chunks", rule, chunks)
    size = options.microbatch_size
    rule = f"must be one of {', '.join(map(str, model.microbatch_sizes))}: the profile's forms have these"
    require(size is None or size in model.microbatch_sizes, "microbatch_size", rule, size)


def _nothing_left(space: WholeSpace) -> tuple[Reason, ...]:
    """Why there is no configuration at all."""
    problem, name = space.problem, space.engine.name
    devices, batch_size = problem.cluster.devices, problem.batch_size

    def count(options: Options) -> int:
        try:
            return whole_space(replace(problem, options=options))[0].considered
        except InvalidInputError:
            return 0

    where = f"{name} on {devices} devices with a batch of {batch_size}"
    reasons = left_by_options(problem.options, count, where)
    if reasons:
        return reasons
    sizes = space.forms[0].microbatch_sizes
    if all(batch_size % size for size in sizes):
        rule = f"the batch must be whole microbatches of {', '.join(map(str, sizes))} samples, which the profile has"
        return (Reason(rule=rule, detail=f"{where} has no configuration"),)
    return (Reason(rule="devices that share a block must be whole groups of a level", detail=f"{where} has none"),)
