"""Solver process: answers planners' questions, one after another.

python -m planner_service.plans.solver_process MEMORY_BYTES     0: no limit
"""

import sys
import time
from collections.abc import Callable

from pipeplan.documents.plan import Answer
from pipeplan.planners.problem import Observer, PlanningProblem
from pipeplan.planners.solve import solve
from planner_service.plans.questions import Answered, PlannerQuestion
from planner_service.platform.processes.child import serve

Ask = Callable[[str, PlanningProblem, Observer], Answer]
"""Solves: a planner's name, a problem and an observer of the search -> the answer."""


def main(ask: Ask = solve) -> None:
    """Answers until standard input ends."""

    def answered(question: PlannerQuestion, observe: Observer) -> Answered:
        problem = question.pose()
        start_s = time.perf_counter()
        answer = ask(question.planner, problem, observe)
        return Answered(answer=answer, solve_time_s=time.perf_counter() - start_s)

    serve(answered, memory_bytes=int(sys.argv[1]))


if __name__ == "__main__":
    main()
