"""Solvers: what answers a planner's questions, one at a time: a process of its own, or a function in this one."""

import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol, assert_never

import planner_service
from planner_service.core.errors import SolverError
from planner_service.core.plan import Answer
from planner_service.core.planner.problem import Problem
from planner_service.services.context import Solve
from planner_service.solvers.messages import Answered, Exhausted, Message, Question, Refused
from planner_service.solvers.progress import Observer, Progress


class Solver(Protocol):
    """What answers one question at a time. `kill` may be called by another thread and ends the answer at hand."""

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""

    def ask(self, question: Question, observe: Observer) -> Answered:
        """The answer. Raises what the planner raises, SolverError where the solver itself ends."""

    def kill(self) -> None:
        """Ends it without waiting."""

    def close(self) -> None:
        """Ends it and waits."""


class SolverProcess:
    """A process that runs planners; OR-tools is loaded nowhere else. `program` is the module that it executes."""

    def __init__(self, memory_bytes: int, program: str = "planner_service.solvers.process") -> None:
        self._memory_bytes = memory_bytes
        self._process = subprocess.Popen(
            [sys.executable, "-m", program, str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(planner_service.__file__).parent.parent,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # an interrupt from the terminal is for the service to deal with
        )

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def ask(self, question: Question, observe: Observer) -> Answered:
        """Sends the question and follows what comes back."""
        assert self._process.stdin is not None
        try:
            pickle.dump(question, self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
            while isinstance(message := self._receive(), Progress):
                observe(message)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise SolverError(self._cause()) from error
        match message:
            case Answered():
                return message
            case Refused():
                raise message.error
            case Exhausted():
                self.close()
                raise SolverError(self._too_large())
            case _:
                assert_never(message)

    def kill(self) -> None:
        """Ends the process, whatever it is at."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process and takes leave of it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not sent any more
                    pipe.close()

    def _receive(self) -> Message:
        assert self._process.stdout is not None
        message: Message = pickle.load(self._process.stdout)
        return message

    def _cause(self) -> str:
        """Why the process has ended."""
        status = self._process.wait()
        if status == -signal.SIGKILL:
            return "the solver's process was killed: most likely the machine ran out of memory"
        if status == -signal.SIGABRT and self._memory_bytes:
            return self._too_large()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return f"the solver's process ended {how} and gave no answer; the service's log has what it said"

    def _too_large(self) -> str:
        allowed = f"the {self._memory_bytes:,} bytes that a solver may have (PIPEPLAN_SOLVER_MEMORY_BYTES)"
        return f"the search needed more memory than {allowed}"


class FunctionSolver:
    """A function in this process; it cannot be ended, and its answer is dropped instead."""

    def __init__(self, solve: Solve) -> None:
        self._solve = solve
        self.alive = True

    def ask(self, question: Question, observe: Observer) -> Answered:
        """Calls it."""
        start_s = time.perf_counter()
        answer = self._solve(question.planner, question.problem)
        return Answered(answer=answer, solve_time_s=time.perf_counter() - start_s)

    def kill(self) -> None:
        """Takes no further questions."""
        self.alive = False

    def close(self) -> None:
        """Takes no further questions."""
        self.alive = False


def solve_here(planner: str, problem: Problem) -> Answer:
    """The planner's answer, searched in this process, which loads the planners only then."""
    from planner_service.solvers.solve import solve

    return solve(planner, problem)
