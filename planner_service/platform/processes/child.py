"""A child process: it reads questions from standard input and answers on standard output, one after another.

Questions and messages are pickled. The process shares nothing with its parent: ending it ends its work at any moment.
It also ends by itself when its standard input ends, so a service that is killed leaves no processes.
"""

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import BinaryIO, Generic, TypeVar

from pipeplan.errors import PipeplanError

Q = TypeVar("Q")
N = TypeVar("N")
A = TypeVar("A")

Tell = Callable[[N], None]
"""Receives news of the current work."""

TELL_S = 0.1
"""The minimum time between two progress messages."""

OUT_OF_MEMORY = 77
"""The exit status of a process that could not even read its question."""


@dataclass(frozen=True, slots=True)
class News(Generic[N]):
    """The progress of the work."""

    content: N


@dataclass(frozen=True, slots=True)
class Done(Generic[A]):
    """The answer."""

    answer: A


@dataclass(frozen=True, slots=True)
class Refused:
    """The error that the question raised."""

    error: PipeplanError


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The work needs more memory than the process may use."""


Message = News[N] | Done[A] | Refused | Exhausted
"""A child's messages about one question: any number of News, then one of the others."""


def serve(answer: Callable[[Q, Tell[N]], A], *, memory_bytes: int, cpu_s: float = 0.0) -> None:
    """Answers until standard input ends. An answer that takes more processor time than `cpu_s` ends the process.

    0 is no limit. The default action of the timer's signal ends the process, without any of our code.
    """
    limit_memory(memory_bytes)
    sys.excepthook = _end
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's output must not mix with the answers
    questions: SimpleQueue[Q] = SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin.buffer, questions), daemon=True).start()

    told_s = 0.0

    def tell(news: N) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= TELL_S:
            told_s = now_s
            _send(output, News(news))

    message: Message[N, A]
    while True:
        question = questions.get()
        told_s = -TELL_S  # the first news of each question is sent at once
        _limit_cpu(cpu_s)
        try:
            message = Done(answer(question, tell))
        except PipeplanError as error:
            message = Refused(error)
        except MemoryError:
            message = Exhausted()
        _limit_cpu(0.0)
        del question
        _send(output, message)


def limit_memory(limit_bytes: int) -> None:
    """Limits the private memory of this process, if the system can enforce that."""
    if limit_bytes == 0 or sys.platform == "win32":
        return
    import resource

    # On Linux only memory that is written to counts: threads' stacks and mapped libraries take only address space.
    for limit in (resource.RLIMIT_DATA,) if sys.platform == "linux" else (resource.RLIMIT_AS,):
        _, hard = resource.getrlimit(limit)
        most = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
        resource.setrlimit(limit, (most, hard))


def _limit_cpu(limit_s: float) -> None:
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, limit_s)


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Reports a fault of ours and ends the process at once: the other thread holds standard input."""
    sys.__excepthook__(kind, error, trace)
    os._exit(1)


def _receive(source: BinaryIO, questions: "SimpleQueue[Q]") -> None:
    """Reads questions, and ends the process when its standard input ends."""
    try:
        while True:
            questions.put(pickle.load(source))
    except EOFError:
        pass
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        os._exit(0)  # at once: no process waits for the current work any more


def _send(output: BinaryIO, message: Message[N, A]) -> None:
    pickle.dump(message, output, protocol=pickle.HIGHEST_PROTOCOL)
    output.flush()
