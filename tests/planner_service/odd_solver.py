"""A solver's process whose planners misbehave, by name: one wants too much memory, one crashes, one never answers."""

import os
import signal
import time

from pipeplan.documents.plan import Answer
from pipeplan.planners.problem import Observer, PlanningProblem, SearchProgress
from pipeplan.planners.solve import solve
from planner_service.plans.solver_process import main


def misbehave(planner: str, problem: PlanningProblem, observe: Observer) -> Answer:
    """Does what the planner's name says."""
    if planner == "greedy":
        bytearray(2**40)
    if planner == "crash":
        raise KeyError("a fault of ours")
    if planner == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if planner == "talkative":
        os.write(1, b"a library prints something")
        return solve("pipedream-2bw", problem)
    if planner == "endless":
        observe(SearchProgress(best_s=0.5, bound_s=0.25, open_shapes=3, spent=1.0, limit=4.0))
        time.sleep(1000)
    return solve(planner, problem, observe)


if __name__ == "__main__":
    main(misbehave)
