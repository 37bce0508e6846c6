"""Solve: the planners by name, and the one function that runs them."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from pipeplan.documents.accuracy import basis_of
from pipeplan.documents.engines import OUR_RUNTIME, engine_named
from pipeplan.documents.forms import AXES
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Answer, Plan, Reason
from pipeplan.errors import MissingDependencyError, require, require_one_of
from pipeplan.planners.auto.planner import auto
from pipeplan.planners.complete import play
from pipeplan.planners.gpipe import gpipe
from pipeplan.planners.on_chain import on_chain
from pipeplan.planners.pipedream.planner import pipedream
from pipeplan.planners.played import by_play
from pipeplan.planners.problem import Observer, Planner, PlanningProblem, unobserved
from pipeplan.planners.two_bw.planner import two_bw
from pipeplan.planners.whole.planner import whole
from pipeplan.programs.schedule import UPDATES_LATE
from pipeplan.simulation.predict import updates_late


def exact(problem: PlanningProblem, observe: Observer = unobserved) -> Answer:
    """The solver's planner; OR-tools is imported on the first call. Raises MissingDependencyError without it."""
    if find_spec("ortools") is None:
        raise MissingDependencyError("the planner exact needs OR-tools: pip install 'pipeplan[exact]'")
    from pipeplan.planners.exact.planner import MAX_BLOCKS
    from pipeplan.planners.exact.planner import exact as planner

    return on_chain(partial(planner, observe=observe), blocks_at_most=MAX_BLOCKS)(problem)


PLANNERS: dict[str, Planner] = {
    "pipedream": pipedream,
    "pipedream-2bw": on_chain(two_bw),
    "gpipe": on_chain(gpipe),
    "exact": exact,
}
"""The planners by their closed forms. All of them plan graphs: pipedream over all cuts, the others over the cuts of one
order of the blocks (`on_chain`).
"""
PLANNERS["auto"] = partial(auto, planners={**PLANNERS, "exact": partial(by_play, "exact", exact)})

PLAYED = "played"
"""The default of `Options.semantics`: plans are compared by their plays."""

VERSIONS: dict[str, str] = dict.fromkeys(PLANNERS, "2.24.0")
"""Semantic versions of what the planners answer. A change that makes a planner answer a request differently raises its
version: the minor one where plans are faster or more problems have one, the major one where plans mean something else.
"""


def solve(planner: str, problem: PlanningProblem, observe: Observer = unobserved) -> Answer:
    """The planner's answer to the problem as its calibration corrects it, played, with the ids of the documents given.

    Raises InvalidInputError for an unknown planner, or for a problem that the planner does not support.
    """
    problem = asked_of(planner, problem)
    asked = partial(exact, observe=observe) if planner == "exact" else PLANNERS[planner]
    if problem.options.engine is not None:
        asked = whole
    elif planner != "auto" and (problem.options.semantics or PLAYED) == PLAYED:
        asked = partial(by_play, planner, asked)
    answer = asked(problem.corrected)
    profiles = problem.profile, *problem.other_profiles
    notes = tuple(dict.fromkeys(note for each in profiles for note in each.notes))
    if not isinstance(answer, Plan):
        left_out = (note.partition(": ") for note in notes)
        return replace(answer, reasons=(*answer.reasons, *(Reason(rule=what, detail=why) for what, _, why in left_out)))
    late = problem.options.synchronous and updates_late(answer)
    require(
        not late, "synchronous", f"must be off for {answer.schedule} on {answer.depth} stages, {UPDATES_LATE}", True
    )
    simulated = play(answer) if answer.simulated is None else answer.simulated
    idle, devices = problem.cluster.devices - answer.workers, problem.cluster.devices
    rule = f"{idle} of {devices} devices stay idle: no plan of the search is faster with them"
    warnings = (*answer.warnings, *notes, *([rule] if idle else []))
    basis = basis_of(profiles, answer.engine)
    answer = replace(answer, planner_version=VERSIONS[planner], simulated=simulated, warnings=warnings, basis=basis)
    if problem.calibration is None:
        return answer
    return replace(
        answer,
        profile_id=content_id(problem.profile),
        cluster_id=content_id(problem.cluster),
        calibration_id=content_id(problem.calibration),
    )


def asked_of(planner: str, problem: PlanningProblem) -> PlanningProblem:
    """The problem as the planner gets it (`for_engine`). This is quick, and refuses what no search could change.

    Raises InvalidInputError for an unknown planner, for types of devices that it cannot mix, and for semantics and
    engines that it does not support.
    """
    require_one_of(PLANNERS, "planner", planner)
    types = [device.name for device in problem.cluster.types]
    rule = f"must be of one type for the planner {planner}: exact and auto plan for several"
    require(len(types) == 1 or planner in ("exact", "auto"), "cluster.groups", rule, types)
    semantics = problem.options.semantics or PLAYED
    rule = f"must be {PLAYED} for the planner auto, which compares plays"
    require(planner != "auto" or semantics == PLAYED, "semantics", rule, semantics)
    rule = f"must be {PLAYED} or paper for the planner {planner}: the released program is PipeDream's"
    require(planner == "pipedream" or semantics != "release", "semantics", rule, semantics)

    return for_engine(planner, problem)


def for_engine(planner: str, problem: PlanningProblem) -> PlanningProblem:
    """The problem without the options that do not apply to our runtime, whose only degrees are pipeline and data.

    Raises InvalidInputError for degrees that it does not have, and for planners other than auto for other engines.
    """
    options = problem.options
    engine = engine_named(options.engine or OUR_RUNTIME)
    if engine.name != OUR_RUNTIME:
        require(planner == "auto", "planner", f"must be auto for the engine {engine.name}", planner)
        return problem
    for axis in (
        *AXES,
        "expert_tensor",
        "sequence_parallel",
        "sharding",
        "offload",
        "offload_share",
        "replicate",
        "graphs",
        "a2a_overlap",
    ):
        value = getattr(options, axis)
        rule = f"must be left out for the engine {engine.name}, which runs whole blocks and states: name an --engine"
        require(value is not True and value in (None, False, 1, "none"), axis, rule, value)  # True == 1
    unit, known = options.recompute_unit, engine.recomputes
    rule = f"must be one of {', '.join(known)} for the engine {engine.name}"
    require(unit is None or unit in known, "recompute_unit", rule, unit)
    whole = replace(options, engine=None, sharding=None, sequence_parallel=None, tensor=None, context=None, expert=None)
    whole = replace(whole, expert_tensor=None, offload=None, offload_share=None, replicate=None)
    whole = replace(whole, graphs=None, a2a_overlap=False)
    return replace(problem, options=whole)
