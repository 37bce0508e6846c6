"""Whole: the fastest play of a model among everything that an engine runs (`planners.auto` asks it for other engines).

The search is that of `auto`: configurations by their bounds, the highest first; before them some that are likely to be
fast, to have a rate early that rules others out. What is compared is played, on the cluster whose devices are groups.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from pipeplan.documents.engines import TrainingEngine, engine_named
from pipeplan.documents.forms import AXES, ModelForm
from pipeplan.documents.plan import Answer, Infeasible, Plan, Reason
from pipeplan.errors import InvalidInputError, require
from pipeplan.planners.auto.planner import NAME, fastest
from pipeplan.planners.auto.proposals import PlannersAsked, Proposer
from pipeplan.planners.auto.ranking import LONGEST_PLAY, Ranking
from pipeplan.planners.problem import PlanningProblem, refuse_unused
from pipeplan.planners.reasons import memory_reason
from pipeplan.planners.whole.choices import choices
from pipeplan.planners.whole.degrees import Degrees, Recipe
from pipeplan.planners.whole.made import placement
from pipeplan.planners.whole.space import WholeSpace
from pipeplan.schedules.registry import schedule_named

USED = (
    "microbatch_size",
    "schedule",
    "stages",
    "chunks",
    "recompute",
    "recompute_unit",
    "engine",
    "tensor",
    "sequence_parallel",
    "context",
    "expert",
    "data",
    "sharding",
)
"""The options that it has a use for."""

LIKELY = 24
"""So many configurations are played first if their bounds allow."""

MOVED = 20_000
"""Instructions of plans whose cuts were moved."""

PLAYED_INSTRUCTIONS = 300_000
"""Of all plans together: a second."""


def whole(problem: PlanningProblem) -> Answer:
    """The fastest plan for the engine that is asked for, with the form of its blocks.

    Raises InvalidInputError for a profile without forms, options that the engine cannot have, and degrees that the
    profile has no form for.
    """
    space, ranking = whole_space(problem)
    asked = PlannersAsked()
    for placed in islice(space.likely(), LIKELY):
        stops = placed.split()
        plan = None if stops is None else placed.plan(stops)
        if plan is not None:
            asked.propose(plan, Proposer(NAME))
    if not asked.proposals:
        found = ((each, each.split()) for each in space.configurations())
        plan = next((plan for each, stops in found if stops and (plan := each.plan(stops))), None)
        if plan is None:
            return _infeasible(space)
        asked.propose(plan, Proposer(NAME))
    answer = fastest(NAME, asked, [space], ranking)
    return replace(answer, choices=choices(space, answer)) if isinstance(answer, Plan) else answer


def whole_space(problem: PlanningProblem) -> tuple[WholeSpace, Ranking]:
    """What is searched, and a ranking of its plays."""
    options = problem.options
    engine = engine_named(options.engine or "")
    refuse_unused(f"auto for the engine {engine.name}", options, USED)
    rule = f"must have forms for the engine {engine.name}: estimate the model with --model, or profile its forms"
    require(bool(problem.profile.forms), "profile.forms", rule, problem.profile.model.name)
    types = [device.name for device in problem.cluster.types]
    require(len(types) == 1, "cluster.groups", f"must be of one type for the engine {engine.name}", types)
    require(options.memory == "training", "memory", f"must be training for the engine {engine.name}", options.memory)
    if options.schedule is not None:
        known = engine.schedules or ()
        rule = f"must be one of {', '.join(known)} for the engine {engine.name}"
        require(schedule_named(options.schedule).name in known, "schedule", rule, options.schedule)
    known = tuple(dict.fromkeys((*engine.shardings, *engine.pipelined_shardings)))
    rule = f"must be one of {', '.join(known)} for the engine {engine.name}"
    require(options.sharding in (None, *known), "sharding", rule, options.sharding)
    if options.data is not None:
        rule = f"must divide the batch ({problem.batch_size} samples)"
        require(problem.batch_size % options.data == 0, "data", rule, options.data)
    forms = forms_for(problem, engine)
    fused = replace(problem, options=replace(options, split_backward=False))
    ranking = Ranking(
        problem=fused, left=PLAYED_INSTRUCTIONS, longest_answer=LONGEST_PLAY, for_front=0, for_moves=MOVED
    )
    return WholeSpace(problem=problem, engine=engine, forms=tuple(forms)), ranking


def remade(problem: PlanningProblem, plan: Plan) -> Plan:
    """The plan with the degrees, stages and placement of one for another engine, with its costs and without its price.

    Raises InvalidInputError for what the engine or the profile does not have, and for stages that do not fit.
    """
    space, _ = whole_space(replace(problem, options=replace(problem.options, engine=plan.engine)))
    known = [each.form for each in space.forms]
    require(plan.form in known, "form", "must be one that the profile has and the options allow", plan.form)
    first, stops = plan.stages[0], tuple(stage.stop for stage in plan.stages)
    recompute = first.recompute_unit if first.recompute else "none"
    degrees = Degrees(
        recipe=Recipe(
            form=plan.form, microbatch_size=plan.microbatch_size, recompute=recompute, sharding=plan.sharding
        ),
        pipeline=plan.depth // plan.chunks,
        chunks=plan.chunks,
        data=plan.width or 1,
        microbatches=plan.microbatches,
    )
    inside = plan.placement == placement(degrees, replicas_inside=True)
    made = space.maker(degrees).plan(stops, replicas_inside=inside)
    if made is None:
        raise InvalidInputError("stages", "must fit their devices", stops)
    return made


def forms_for(problem: PlanningProblem, engine: TrainingEngine) -> Sequence[ModelForm]:
    """The forms that the engine runs and the options allow; sequence parallelism wherever there is a choice."""
    options, able = problem.options, list(problem.profile.forms)
    for axis in AXES:
        asked = getattr(options, axis)
        able = [each for each in able if axis in engine.axes or getattr(each.form, axis) == 1]
        known = sorted({getattr(each.form, axis) for each in able})
        rule = f"must be one of {', '.join(map(str, known))}: the profile has forms for these on {engine.name}"
        require(asked is None or asked in known, axis, rule, asked)
        able = [each for each in able if asked in (None, getattr(each.form, axis))]
    able = [each for each in able if engine.sequence_parallel or not each.form.sequence_parallel]
    wanted = options.sequence_parallel
    able = [each for each in able if wanted is None or each.form.tensor == 1 or each.form.sequence_parallel == wanted]
    able = [each for each in able if problem.cluster.devices % each.form.devices == 0]
    rule = f"must have a form that {engine.name} runs on the cluster's {problem.cluster.devices} devices"
    require(bool(able), "profile.forms", rule, [each.form for each in problem.profile.forms][:4])
    return able


def _infeasible(space: WholeSpace) -> Infeasible:
    """How far the nearest configuration is from fitting."""
    if space.considered == 0:
        problem = space.problem
        detail = (
            f"no degrees that {space.engine.name} runs and the options allow divide {problem.cluster.devices} devices "
            f"and a batch of {problem.batch_size} in microbatches that the profile has"
        )
        nothing = Reason(rule="degrees must divide the devices and the batch", detail=detail)
        return Infeasible(planner=NAME, reasons=(nothing,), configurations_considered=0)
    degrees, rank, missing = space.nearest_miss()
    reason = memory_reason(
        degrees.named,
        stage=rank,
        missing_bytes=missing,
        device_bytes=space.problem.cluster.device.usable_bytes,
        configurations=space.considered,
    )
    return Infeasible(planner=NAME, reasons=(reason,), configurations_considered=space.considered)
