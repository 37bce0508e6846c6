"""Played: what a planner answers by the play of its plans, instead of its closed form (`--semantics played`).

The closed form's optimum is one of the plans that are played, so that no answer is slower than it. The search is that
of `auto`, in the planner's own space.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from pipeplan.documents.plan import Answer, Plan
from pipeplan.planners.auto.planner import fastest
from pipeplan.planners.auto.proposals import PlannersAsked, Proposer
from pipeplan.planners.auto.ranking import Ranking
from pipeplan.planners.auto.search import Space
from pipeplan.planners.auto.space import PlayedSpace
from pipeplan.planners.on_chain import chained
from pipeplan.planners.pipedream.played import PlayedPartitions
from pipeplan.planners.problem import Planner, PlanningProblem
from pipeplan.planners.two_bw.shapes import UNLESS_ASKED


def by_play(name: str, planner: Planner, problem: PlanningProblem) -> Answer:
    """The fastest play in the planner's space; `planner` answers by its closed form."""
    answer = planner(problem)
    if not isinstance(answer, Plan):
        return answer
    asked = PlannersAsked(answers=[answer])
    asked.propose(answer, Proposer(name))
    options = replace(problem.options, split_backward=False)
    ranking = Ranking(problem=replace(problem, options=options), within_batch=False)
    spaces = [] if problem.options.safe_batch else [_SPACES[name](problem)]
    found = fastest(name, asked, spaces, ranking)
    return replace(found, planner=name, cost_model=answer.cost_model) if isinstance(found, Plan) else found


def _two_bw(problem: PlanningProblem) -> Space:
    schedule = problem.options.schedule
    schedules = UNLESS_ASKED if schedule is None else (schedule,)
    return PlayedSpace(problem=chained(problem), schedules=schedules)


def _gpipe(problem: PlanningProblem) -> Space:
    """One pipeline on all devices, or of the stages asked for, that recomputes unless it is asked not to."""
    options = problem.options
    chain = chained(replace(problem, options=replace(options, recompute=options.recompute is not False)))
    depth = options.stages or min(problem.cluster.devices, len(chain.profile.blocks))
    return PlayedSpace(problem=chain, schedules=("gpipe",), straight=depth, planner="gpipe")


def _exact(problem: PlanningProblem) -> Space:
    from pipeplan.planners.exact.planner import MAX_BLOCKS
    from pipeplan.planners.exact.played import PlayedShapes

    return PlayedShapes(problem=chained(problem, blocks_at_most=MAX_BLOCKS))


_SPACES: Mapping[str, Callable[[PlanningProblem], Space]] = {
    "pipedream": lambda problem: PlayedPartitions(problem=problem),
    "pipedream-2bw": _two_bw,
    "gpipe": _gpipe,
    "exact": _exact,
}
