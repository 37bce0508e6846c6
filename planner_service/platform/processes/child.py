"""What a child process says to whoever asks it, pickled, through its standard output.

A child process: questions come in on standard input, answers go out on standard output, one after the other.

Nothing is shared with whoever asks: ending the process ends the work, whatever it is at. It ends by itself with its
standard input: a service that is killed leaves none behind.
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

N = TypeVar("N")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class News(Generic[N]):
    """How far the child is."""

    content: N


@dataclass(frozen=True, slots=True)
class Done(Generic[A]):
    """The answer."""

    answer: A


@dataclass(frozen=True, slots=True)
class Refused:
    """What was asked raised this."""

    error: PipeplanError


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The memory that the process may have was not enough."""


Message = News[N] | Done[A] | Refused | Exhausted
"""Any number of News, then one of the others."""


Q = TypeVar("Q")

Tell = Callable[[N], None]
"""Takes news of the work at hand."""

TELL_S = 0.1
"""News is passed on no more often."""

OUT_OF_MEMORY = 77
"""The status of a process that could not even take its question in."""


def serve(answer: Callable[[Q, Tell[N]], A], *, memory_bytes: int, cpu_s: float = 0.0) -> None:
    """Answers until standard input ends. An answer that takes more processor time than `cpu_s` ends the process.

    0 is no limit. The end is the default of the timer's signal: no code of ours has to run for it.
    """
    limit_memory(memory_bytes)
    sys.excepthook = _end
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between the answers
    questions: SimpleQueue[Q] = SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin.buffer, questions), daemon=True).start()
    while True:
        question = questions.get()
        _limit_cpu(cpu_s)
        message = _message(answer, question, output)
        _limit_cpu(0.0)
        del question
        _send(output, message)


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


def _limit_cpu(limit_s: float) -> None:
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, limit_s)


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A fault of ours: reported on standard error, and the end. At once: the other thread holds standard input."""
    sys.__excepthook__(kind, error, trace)
    os._exit(1)


def _receive(source: BinaryIO, questions: "SimpleQueue[Q]") -> None:
    try:
        while True:
            questions.put(pickle.load(source))
    except EOFError:
        pass
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        os._exit(0)  # at once: the work at hand is nobody's any more


def _message(answer: Callable[[Q, Tell[N]], A], question: Q, output: BinaryIO) -> Message[N, A]:
    told_s = -TELL_S

    def tell(news: N) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= TELL_S:
            told_s = now_s
            _send(output, News(news))

    try:
        return Done(answer(question, tell))
    except PipeplanError as error:
        return Refused(error)
    except MemoryError:
        return Exhausted()


def _send(output: BinaryIO, message: Message[N, A]) -> None:
    pickle.dump(message, output, protocol=pickle.HIGHEST_PROTOCOL)
    output.flush()
