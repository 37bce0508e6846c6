"""Solvers: they answer planners' questions, one at a time, in a separate process or as a function in this process."""

import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from pipeplan.documents.plan import Answer
from pipeplan.errors import SolverError
from pipeplan.planners.problem import Observer, PlanningProblem, SearchProgress
from planner_service.plans.questions import Answered, PlannerQuestion
from planner_service.platform.context import Solve
from planner_service.platform.processes.pool import (
    IDLE_S,
    ChildProcess,
    End,
    Pool,
    PoolWorker,
    Ticket,
    Words,
    WorkerProcess,
)

Solver: TypeAlias = PoolWorker[PlannerQuestion, SearchProgress, Answered]
SolverPool: TypeAlias = Pool[PlannerQuestion, SearchProgress, Answered]
SolverTicket: TypeAlias = Ticket[PlannerQuestion, SearchProgress, Answered]

WORDS = Words(at_work="plans are being made", stopped="the search was stopped")


def solver_process(
    memory_bytes: int, program: str = "planner_service.plans.solver_process"
) -> WorkerProcess[PlannerQuestion, SearchProgress, Answered]:
    """A process that runs planners; OR-tools is loaded nowhere else. `program` is the module that it executes."""
    return WorkerProcess(
        ChildProcess(program=program, arguments=(str(memory_bytes),), ended=partial(_ended, memory_bytes))
    )


def solver_pool(start: Callable[[], Solver], *, solvers: int, queue: int, idle_s: float = IDLE_S) -> SolverPool:
    return Pool(start, WORDS, workers=solvers, queue=queue, idle_s=idle_s)


class FunctionSolver:
    """A function in this process. It cannot be ended; its answer is dropped instead."""

    def __init__(self, solve: Solve) -> None:
        self._solve = solve
        self.alive = True

    def ask(self, question: PlannerQuestion, observe: Observer) -> Answered:
        """Calls the function."""
        problem = question.pose()
        start_s = time.perf_counter()
        answer = self._solve(question.planner, problem)
        return Answered(answer=answer, solve_time_s=time.perf_counter() - start_s)

    def kill(self) -> None:
        """Takes no further questions."""
        self.alive = False

    close = kill


def solve_here(planner: str, problem: PlanningProblem) -> Answer:
    """The planner's answer, searched in this process. Only this loads the planners."""
    from pipeplan.planners.solve import solve

    return solve(planner, problem)


def _ended(memory_bytes: int, end: End, how: str) -> SolverError:
    if end is End.KILLED:
        return SolverError("the solver's process was killed: most likely the machine ran out of memory")
    if end is End.OUT_OF_MEMORY and memory_bytes:
        allowed = f"the {memory_bytes:,} bytes that a solver may have (PIPEPLAN_SOLVER_MEMORY_BYTES)"
        return SolverError(f"the search needed more memory than {allowed}")
    return SolverError(f"the solver's process ended {how} and gave no answer; the service's log has its output")
