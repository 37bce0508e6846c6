"""What the planners answer by their closed forms: the papers' optima."""

from dataclasses import replace

from pipeplan.documents.plan import Answer
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.solve import solve


def on_paper(planner: str, problem: PlanningProblem) -> Answer:
    """The planner's answer with `--semantics paper`, unless the problem asks for others."""
    options = problem.options
    return solve(planner, replace(problem, options=replace(options, semantics=options.semantics or "paper")))
