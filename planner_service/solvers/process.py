"""A solver's process: questions come in on standard input, answers go out on standard output, one after the other.

    python -m planner_service.solvers.process MEMORY_BYTES     0: no limit

Nothing is shared with whoever asks: ending the process ends the search, whatever it is at. It ends by itself with its
standard input, so that a service that is killed leaves none behind.
"""

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import BinaryIO

from planner_service.core.errors import PipeplanError
from planner_service.core.plan import Answer
from planner_service.core.planner.problem import Problem
from planner_service.solvers.messages import Answered, Exhausted, Message, Question, Refused
from planner_service.solvers.progress import Observer, Progress
from planner_service.solvers.solve import solve

TELL_S = 0.1
"""Progress is told no more often."""


Ask = Callable[[str, Problem, Observer], Answer]
"""A planner's name, a problem and who listens in, the answer out."""


def main(ask: Ask = solve) -> None:
    """Answers until standard input ends."""
    limit_memory(int(sys.argv[1]))
    sys.excepthook = _end
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between the answers
    questions: SimpleQueue[Question] = SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin.buffer, questions), daemon=True).start()
    while True:
        _send(output, _answer(ask, questions.get(), output))


def limit_memory(limit_bytes: int) -> None:
    """Lets this process have so much memory of its own and no more, where the system can hold it to that."""
    if limit_bytes == 0 or sys.platform == "win32":
        return
    import resource

    # What is written to counts; the address space alone says little of threads' stacks and mapped libraries.
    for limit in (resource.RLIMIT_DATA,) if sys.platform == "linux" else (resource.RLIMIT_AS,):
        _, hard = resource.getrlimit(limit)
        most = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
        resource.setrlimit(limit, (most, hard))


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A fault of ours: told on standard error, and the end. At once, since the other thread holds standard input."""
    sys.__excepthook__(kind, error, trace)
    os._exit(1)


def _receive(source: BinaryIO, questions: "SimpleQueue[Question]") -> None:
    try:
        while True:
            questions.put(pickle.load(source))
    except EOFError:
        pass
    finally:
        os._exit(0)  # at once: the search at hand is nobody's any more


def _answer(ask: Ask, question: Question, output: BinaryIO) -> Message:
    told_s = -TELL_S

    def tell(progress: Progress) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= TELL_S:
            told_s = now_s
            _send(output, progress)

    start_s = time.perf_counter()
    try:
        answer = ask(question.planner, question.problem, tell)
    except PipeplanError as error:
        return Refused(error)
    except MemoryError:
        return Exhausted()
    return Answered(answer=answer, solve_time_s=time.perf_counter() - start_s)


def _send(output: BinaryIO, message: Message) -> None:
    pickle.dump(message, output, protocol=pickle.HIGHEST_PROTOCOL)
    output.flush()


if __name__ == "__main__":
    main()
