"""Played: a planner's answer by the play of its plans instead of its closed form (`--semantics played`).

The closed form's optimum is among the played plans, so no answer is slower. The search is `auto`'s, in the planner's
own space.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pipeplan.documents.plan import Answer, Plan
from pipeplan.errors import require
from pipeplan.planners.auto.chunks import ChunkedSpace
from pipeplan.planners.auto.model import SearchedModel
from pipeplan.planners.auto.planner import NAME as AUTO
from pipeplan.planners.auto.planner import fastest, played_spaces, searched_schedules, with_whole_backwards
from pipeplan.planners.auto.proposals import PlannersAsked, Proposer
from pipeplan.planners.auto.ranking import Ranking
from pipeplan.planners.auto.space import PlayedSpace
from pipeplan.planners.on_chain import chains
from pipeplan.planners.pipedream.played import PlayedPartitions
from pipeplan.planners.problem import Planner, PlanningProblem
from pipeplan.planners.spaces import Space
from pipeplan.planners.two_bw.shapes import unless_asked
from pipeplan.schedules.registry import schedule_named


def by_play(name: str, planner: Planner, problem: PlanningProblem) -> Answer:
    """The fastest play in the planner's space; `planner` itself answers by its closed form."""
    answer = planner(problem)
    if not isinstance(answer, Plan):
        return answer
    asked = PlannersAsked(answers=[answer])
    asked.propose(answer, Proposer(name))
    spaces, ranking = searched(name, problem)
    found = fastest(name, asked, spaces, ranking)
    return replace(found, planner=name, cost_model=answer.cost_model) if isinstance(found, Plan) else found


def searched(name: str, problem: PlanningProblem) -> tuple[Sequence[Space], Ranking]:
    """The spaces that a planner searches, and a ranking of its plays.

    `auto` adds a few partitions that depend on PipeDream's answer. If the options name an exchange, it searches only
    these. Raises InvalidInputError for an unknown planner.
    """
    options = problem.options
    if name == AUTO:
        asked = with_whole_backwards(problem)
        schedules = searched_schedules(asked.options)
        only_planners = options.safe_batch or options.synchronisation is not None
        return [] if only_planners else played_spaces(asked, schedules), Ranking(problem=problem)
    require(name in _SPACES, "planner", f"must be one of {AUTO}, {', '.join(_SPACES)}", name)
    whole = replace(problem, options=replace(options, split_backward=False))
    ranking = Ranking(problem=whole, within_batch=False)
    return () if options.safe_batch else _SPACES[name](problem), ranking


def _two_bw(problem: PlanningProblem) -> Sequence[Space]:
    schedule = problem.options.schedule
    schedules = unless_asked(problem.options) if schedule is None else (schedule,)
    return [PlayedSpace(problem=chain, schedules=schedules) for chain in chains(problem)]


def _gpipe(problem: PlanningProblem) -> Sequence[Space]:
    """One pipeline on all devices, or with the requested stages. It recomputes unless the options forbid it."""
    options = problem.options
    listed = chains(replace(problem, options=replace(options, recompute=options.recompute is not False)))
    depth = options.stages or min(problem.cluster.devices, len(listed[0].profile.blocks))
    return [PlayedSpace(problem=chain, schedules=("gpipe",), straight=depth, planner="gpipe") for chain in listed]


def _exact(problem: PlanningProblem) -> Sequence[Space]:
    schedule = problem.options.schedule
    if schedule is not None and schedule_named(schedule).chunked:
        model = SearchedModel(problem=chains(problem)[0])
        return [ChunkedSpace(model=model, schedules=(schedule,), planner="exact")]

    from pipeplan.planners.exact.planner import MAX_BLOCKS
    from pipeplan.planners.exact.played import PlayedShapes

    return [PlayedShapes(problem=chain) for chain in chains(problem, blocks_at_most=MAX_BLOCKS)]


_SPACES: Mapping[str, Callable[[PlanningProblem], Sequence[Space]]] = {
    "pipedream": lambda problem: [PlayedPartitions(problem=problem)],
    "pipedream-2bw": _two_bw,
    "gpipe": _gpipe,
    "exact": _exact,
}
