"""Verify: checks a plan by its own numbers, without trusting the search that found it."""

from dataclasses import dataclass, fields, is_dataclass, replace
from math import inf, isclose

from pipeplan.documents.degrees import ANY_OFFLOAD
from pipeplan.documents.engines import OUR_RUNTIME
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Plan, Simulated
from pipeplan.errors import PipeplanError
from pipeplan.planners.auto.certificate import check_search
from pipeplan.planners.auto.search import METHOD as SEARCHED
from pipeplan.planners.complete import Decision, complete, play_again, same_play
from pipeplan.planners.pipedream.certificate import check_certificate
from pipeplan.planners.played import searched
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.whole.planner import remade, whole_space
from pipeplan.schedules.registry import schedule_named, with_whole_backward
from pipeplan.simulation.predict import updates_late

_COMPUTED = (
    "dtype",
    "autocast",
    "precision",
    "placement",
    "stages",
    "costs",
    "closed_form",
    "optimal_in_flight",
    "master_weights",
    "estimated",
    "interpolated",
    "tied",
)
"""The fields computed from a plan's decisions. For our runtime's plans, the stages' figures are taken as they are."""

_ROUNDING = 1e-9

NEEDED = "machines needed"
"""The certificate that holds a witness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: whether it `holds`, and in `detail` how, or what is wrong.

    `gap`: of an optimality whose numbers are right, how far the plan may be from the optimum, as a share.
    """

    what: str
    holds: bool
    detail: str
    gap: float | None = None


def verify(plan: Plan, problem: PlanningProblem) -> tuple[Finding, ...]:
    """Checks a plan's origin, its costs, its streams and its optimality. The plan is what it claims to be if all hold.

    `problem` is the one that was planned for, with its options. The optimality is that of the plan's own certificate. A
    witness is checked as it is; the claim of a search by play is checked by searching its space again. Other
    certificates prove nothing. The plan is proven where the gap is no larger than `PROVEN_GAP` as well.
    """
    simulated = play_again(plan)
    return (_origin(plan, problem), _costs(plan, problem), _played(plan, simulated), _optimal(plan, problem, simulated))


def _origin(plan: Plan, problem: PlanningProblem) -> Finding:
    ids = {
        "profile": (plan.profile_id, content_id(problem.profile)),
        "cluster": (plan.cluster_id, content_id(problem.cluster)),
        "calibration": (plan.calibration_id, problem.calibration and content_id(problem.calibration)),
        "optimizer": (plan.optimizer, problem.options.optimizer_or_default),
        "accounting of memory": (plan.memory_accounting, problem.options.memory),
    }
    others = [
        f"the plan's {name} is {its or 'none'}, this is {given or 'none'}"
        for name, (its, given) in ids.items()
        if its != given
    ]
    others += [
        f"the plan's {name} is {_said(its)}, the options fix it to {_said(asked)}"
        for name, its, asked in _fixed(plan, problem)
        if asked is not None and its != asked
    ]
    return Finding(
        what="origin", holds=not others, detail="; ".join(others) or "made from this profile and this cluster"
    )


def _fixed(plan: Plan, problem: PlanningProblem) -> list[tuple[str, object, object]]:
    """What options may fix: its name, the plan's value, and the requested one; None if they leave it open."""
    options, form = problem.options, plan.form
    one_minibatch = schedule_named(plan.schedule).update == "minibatch"  # PipeDream's, as large as was measured
    smaller = options.safe_batch and plan.batch_size < problem.batch_size
    again = {stage.recompute for stage in plan.stages}
    units = {stage.recompute_unit for stage in plan.stages if stage.recompute}
    starts = {stage.start for stage in plan.stages[1:]}
    return [
        ("batch size", plan.batch_size, None if one_minibatch or smaller else problem.batch_size),
        ("engine", plan.engine, options.engine),
        ("schedule", plan.schedule, options.schedule),
        ("number of stages", plan.depth // plan.chunks, options.stages),
        ("number of stages of a rank", plan.chunks, options.chunks),
        ("microbatch size", plan.microbatch_size, options.microbatch_size),
        ("recomputation", again.pop() if len(again) == 1 else "of some stages", options.recompute),
        ("unit of recomputation", ", ".join(sorted(units)), options.recompute_unit if units else None),
        ("split backward", plan.split_backward, False if options.split_backward is False else None),
        ("training as one process does", not updates_late(plan), True if options.synchronous else None),
        ("stages of one replica", max(plan.replicas) == 1, True if options.straight else None),
        ("cuts among the forced ones", starts.intersection(options.forced_cuts), set(options.forced_cuts)),
        ("cuts among the forbidden ones", starts.intersection(options.forbidden_cuts), set()),
        ("tensor parallelism", form.tensor, options.tensor),
        ("sequence parallelism", form.sequence_parallel, options.sequence_parallel if form.tensor > 1 else None),
        ("context parallelism", form.context, options.context),
        ("expert parallelism", form.expert, options.expert),
        ("tensor parallelism of experts", form.expert_tensor_degree, options.expert_tensor),
        ("number of replicas", plan.width, options.data),
        ("sharding", plan.sharding, options.sharding),
        ("launch by graphs", bool(plan.graphs), options.graphs),
        ("overlap of experts' all-to-all", plan.a2a_overlap, options.a2a_overlap or None),
        ("share of offloaded layers", plan.offload_share, options.offload_share),
        ("groups of replicas that share states", plan.replicate, options.replicate),
        ("offloading", plan.offload, None if options.offload == ANY_OFFLOAD else options.offload),
    ]


def _said(value: object) -> str:
    """A value in the words of a sentence."""
    if isinstance(value, set):
        return ", ".join(map(str, sorted(value))) or "none"
    if value is None:
        return "unequal"
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def _costs(plan: Plan, problem: PlanningProblem) -> Finding:
    """Whether the profile and the cluster give the plan's costs again; for other engines all of its stages as well."""
    if len(problem.cluster.types) > 1:
        detail = "not computed again: the plan does not say which devices between its own stay idle"
        return Finding(what="costs", holds=True, detail=detail)
    corrected = problem.corrected
    base = with_whole_backward(plan.schedule)
    decision = Decision(
        planner=plan.planner,
        cost_model=plan.cost_model,
        stages=plan.stages,
        placement=plan.placement,
        schedule=plan.schedule,
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        batch_size=plan.batch_size,
        closed_form=plan.closed_form,
        optimal_in_flight=plan.optimal_in_flight,
        configurations_considered=plan.configurations_considered,
        order=plan.order,
        chunks=plan.chunks,
    )
    try:
        if plan.engine != OUR_RUNTIME:
            made = [remade(corrected, plan)]
        else:  # a zero-bubble plan may have the costs of its base schedule
            every = [replace(decision, schedule=each) for each in dict.fromkeys((plan.schedule, base))]
            made = [replace(complete(corrected, each), stages=plan.stages) for each in every]
    except PipeplanError as error:
        return Finding(what="costs", holds=False, detail=str(error))
    differing = [_difference(each, plan) for each in made]
    wrong = differing[0] if all(differing) else None
    return Finding(
        what="costs", holds=wrong is None, detail=wrong or "computed again, its profile and its cluster give the same"
    )


def _difference(made: object, held: object, name: str = "") -> str | None:
    """The first field of a plan that differs when it is made again, with both values; None where all agree."""
    if isinstance(made, Plan):
        pairs: list[tuple[str, object, object]] = [
            (each, getattr(made, each), getattr(held, each)) for each in _COMPUTED
        ]
    elif is_dataclass(made) and type(made) is type(held):
        names = [field.name for field in fields(made)]
        pairs = [(f"{name}.{field}", getattr(made, field), getattr(held, field)) for field in names]
    elif isinstance(made, tuple) and isinstance(held, tuple) and len(made) == len(held):
        pairs = [(f"{name}[{index}]", *pair) for index, pair in enumerate(zip(made, held, strict=True))]
    else:
        numbers = isinstance(made, float) and isinstance(held, int | float)
        same = isclose(made, held, rel_tol=_ROUNDING) if numbers else made == held  # type: ignore[arg-type]
        return None if same else f"{name} is {held}; computed again it is {made}"
    return next((found for field, its, given in pairs if (found := _difference(its, given, field))), None)


def _played(plan: Plan, simulated: Simulated | None) -> Finding:
    if simulated is None:
        holds = plan.simulated is None
        detail = "its streams are too long to be played"
        if not holds:
            detail += ", yet it holds what they gave when played"
        return Finding(what="play", holds=holds, detail=detail)
    if plan.simulated is None:
        given = simulated.throughput_samples_per_s
        detail = f"it does not hold what its streams give: played, {given:.6g} samples/s"
        return Finding(what="play", holds=False, detail=detail)
    now, then = simulated.throughput_samples_per_s, plan.simulated.throughput_samples_per_s
    if not same_play(simulated, plan.simulated):
        return Finding(
            what="play", holds=False, detail=f"played, its streams give {now:.6g} samples/s; it says {then:.6g}"
        )
    return Finding(what="play", holds=True, detail=f"played again, its streams give the same {now:.6g} samples/s")


def _optimal(plan: Plan, problem: PlanningProblem, simulated: Simulated | None) -> Finding:
    held = plan.certificate
    if held is None or (held.method != NEEDED and not held.method.startswith(SEARCHED)):
        detail = "the plan holds no numbers that prove it" if held is None else f"by {held.method}: {held.claim}"
        return Finding(what="optimality", holds=False, detail=detail)
    detail = f"{held.optimality}: no plan has a {held.quantity} below {held.bound:.6g}"
    try:
        if held.method.startswith(SEARCHED):
            asked = problem.corrected
            if plan.engine == OUR_RUNTIME:
                spaces, ranking = searched(plan.planner, asked)
            else:
                options = replace(asked.options, engine=plan.engine)
                if options.offload is None and plan.offload != "none":
                    options = replace(options, offload=ANY_OFFLOAD)
                space, ranking = whole_space(replace(asked, options=options))
                spaces = [space]
            detail = check_search(held, simulated, spaces, ranking)
        else:
            check_certificate(plan, problem.corrected)
    except PipeplanError as error:
        return Finding(what="optimality", holds=False, detail=str(error))
    gap = held.gap_of_all
    return Finding(what="optimality", holds=True, detail=detail, gap=gap if gap < inf else None)
