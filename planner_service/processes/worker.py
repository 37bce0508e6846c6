"""Workers: what answers one question at a time, as whoever asks sees it."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Generic, Protocol, TypeVar, assert_never

import planner_service
from pipeplan.errors import PipeplanError
from planner_service.processes.child import OUT_OF_MEMORY
from planner_service.processes.messages import Done, Exhausted, Message, News, Refused

Q = TypeVar("Q")
N = TypeVar("N")
A = TypeVar("A")
Q_contra = TypeVar("Q_contra", contravariant=True)
N_co = TypeVar("N_co", covariant=True)
A_co = TypeVar("A_co", covariant=True)


class Worker(Protocol[Q_contra, N_co, A_co]):
    """What answers one question at a time. `kill` may be called by another thread and ends the answer at hand."""

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""

    def ask(self, question: Q_contra, observe: Callable[[N_co], None]) -> A_co:
        """The answer. Raises what the question raises, and an error that says so where the worker itself ends."""

    def kill(self) -> None:
        """Ends it without waiting."""

    def close(self) -> None:
        """Ends it and waits."""


class End(Enum):
    """Why a process has ended without an answer."""

    KILLED = auto()
    OUT_OF_MEMORY = auto()
    OUT_OF_TIME = auto()
    CRASHED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A module to execute as a process, what it is given, and how its end is worded: `how` names signal or status."""

    program: str
    arguments: tuple[str, ...]
    ended: Callable[[End, str], PipeplanError]


class WorkerProcess(Generic[Q, N, A]):
    """A process of its own."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._process = subprocess.Popen(
            [sys.executable, "-m", child.program, *child.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(planner_service.__file__).parent.parent,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # an interrupt from the terminal is for the service to deal with
        )

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def ask(self, question: Q, observe: Callable[[N], None]) -> A:
        """Sends the question and follows what comes back."""
        assert self._process.stdin is not None
        try:
            pickle.dump(question, self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
            while isinstance(message := self._receive(), News):
                observe(message.content)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise self._ended() from error
        match message:
            case Done():
                return message.answer
            case Refused():
                raise message.error
            case Exhausted():
                self.close()
                raise self._child.ended(End.OUT_OF_MEMORY, "out of memory")
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

    def _receive(self) -> Message[N, A]:
        assert self._process.stdout is not None
        message: Message[N, A] = pickle.load(self._process.stdout)
        return message

    def _ended(self) -> PipeplanError:
        status = self._process.wait()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return self._child.ended(_end_of(status), how)


def _end_of(status: int) -> End:
    if status == -signal.SIGKILL:
        return End.KILLED
    if status in (-signal.SIGABRT, OUT_OF_MEMORY):
        return End.OUT_OF_MEMORY
    if status == -getattr(signal, "SIGPROF", 0):
        return End.OUT_OF_TIME
    return End.CRASHED
