"""A solver's process: planners' questions, answered one after the other.

python -m planner_service.solvers.process MEMORY_BYTES     0: no limit
"""

import sys
import time
from collections.abc import Callable

from pipeplan.documents.plan import Answer
from pipeplan.planners.problem import Observer, PlanningProblem
from pipeplan.planners.solve import solve
from planner_service.processes.child import serve
from planner_service.solvers.messages import Answered, Question

Ask = Callable[[str, PlanningProblem, Observer], Answer]
"""A planner's name, a problem and who listens in, the answer out."""


def main(ask: Ask = solve) -> None:
    """Answers until standard input ends."""

    def answered(question: Question, observe: Observer) -> Answered:
        problem = question.pose()
        start_s = time.perf_counter()
        answer = ask(question.planner, problem, observe)
        return Answered(answer=answer, solve_time_s=time.perf_counter() - start_s)

    serve(answered, memory_bytes=int(sys.argv[1]))


if __name__ == "__main__":
    main()
