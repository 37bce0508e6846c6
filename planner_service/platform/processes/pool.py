"""Pools: a few workers answer questions, one at a time each, and every answer can be given up immediately.

submit ──▶ queue (bounded) ──▶ a worker (kept warm, ended when idle) ──▶ Ticket.future
                └──────── Ticket.cancel: leaves the queue, or ends the worker ────────┘

A `WorkerProcess` is a worker in a process of its own; `child` is its other end.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Generic, Protocol, TypeVar, assert_never

import planner_service
from pipeplan.errors import PipeplanError, UnavailableError
from planner_service.platform.processes.child import OUT_OF_MEMORY, Done, Exhausted, Message, News, Refused

Q = TypeVar("Q")
N = TypeVar("N")
A = TypeVar("A")
Q_contra = TypeVar("Q_contra", contravariant=True)
N_co = TypeVar("N_co", covariant=True)
A_co = TypeVar("A_co", covariant=True)

IDLE_S = 60.0
"""How long a worker without work is kept."""

RETRY_AFTER_S = 2.0


class PoolWorker(Protocol[Q_contra, N_co, A_co]):
    """Answers one question at a time. Another thread may call `kill`, which ends the current answer."""

    @property
    def alive(self) -> bool:
        """Whether it can take a question."""

    def ask(self, question: Q_contra, observe: Callable[[N_co], None]) -> A_co:
        """The answer. Raises the question's errors, and a separate error if the worker ends."""

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
class ChildProcess:
    """A module to run as a process, its arguments, and the error for its end, with the signal or status in words."""

    program: str
    arguments: tuple[str, ...]
    ended: Callable[[End, str], PipeplanError]


class WorkerProcess(Generic[Q, N, A]):
    """A worker in a process of its own."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._process = subprocess.Popen(
            [sys.executable, "-m", child.program, *child.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(planner_service.__file__).parent.parent,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # the service handles an interrupt from the terminal
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: Q, observe: Callable[[N], None]) -> A:
        """Sends the question, passes the news on, and returns the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump(question, self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
            message: Message[N, A] = pickle.load(self._process.stdout)
            while isinstance(message, News):
                observe(message.content)
                message = pickle.load(self._process.stdout)
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
        self._process.kill()

    def close(self) -> None:
        """Ends the process, waits for its end, and closes its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # a part of the question may not have been sent
                    pipe.close()

    def _ended(self) -> PipeplanError:
        """The error of a process that has ended without an answer, by its exit status."""
        status = self._process.wait()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        end = End.CRASHED
        if status == -signal.SIGKILL:
            end = End.KILLED
        elif status in (-signal.SIGABRT, OUT_OF_MEMORY):
            end = End.OUT_OF_MEMORY
        elif status == -getattr(signal, "SIGPROF", 0):
            end = End.OUT_OF_TIME
        return self._child.ended(end, how)


def unobserved(_news: object) -> None:
    """Ignores news, for a caller that does not follow the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The words of a pool's refusals: "2 `at_work` and 5 wait already"; the answer "was stopped"."""

    at_work: str
    stopped: str


@dataclass(slots=True, eq=False)
class Ticket(Generic[Q, N, A]):
    """A question that a pool has taken. `future` ends with the answer, with the error raised, or cancelled."""

    question: Q
    observe: Callable[[N], None]
    future: "Future[A]" = field(default_factory=Future)
    _worker: PoolWorker[Q, N, A] | None = None
    _cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """Gives the answer up, and ends the work on it. Any thread may call it, at any time."""
        with self._lock:
            self._cancelled = True
            if self._worker is not None:
                self._worker.kill()
        self.future.cancel()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def hold(self, worker: PoolWorker[Q, N, A]) -> bool:
        """Gives the question to a worker; False where it was cancelled before."""
        with self._lock:
            if not self._cancelled:
                self._worker = worker
            return not self._cancelled

    def release(self) -> bool:
        """Takes the question from its worker; False where it was cancelled, which ended the worker."""
        with self._lock:
            self._worker = None
            return not self._cancelled


class Pool(Generic[Q, N, A]):
    """At most `workers` workers, and a queue of at most `queue` questions.

    A worker starts when it is first needed. One that has ended is replaced when the next one is needed.
    """

    def __init__(
        self,
        start: Callable[[], PoolWorker[Q, N, A]],
        words: Words,
        *,
        workers: int,
        queue: int,
        idle_s: float = IDLE_S,
    ) -> None:
        self.workers = workers
        self._words = words
        self._start = start
        self._queue = queue
        self._idle_s = idle_s
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="pool")
        self._lock = threading.Lock()
        self._tickets: set[Ticket[Q, N, A]] = set()
        self._idle: list[tuple[float, PoolWorker[Q, N, A]]] = []
        self._timer: threading.Timer | None = None
        self._closed = False

    @property
    def free(self) -> int:
        """How many more questions would get a worker immediately."""
        with self._lock:
            return 0 if self._closed else max(0, self.workers - len(self._tickets))

    @property
    def is_idle(self) -> bool:
        """Whether no question is in progress or waiting."""
        with self._lock:
            return not self._tickets

    def submit(self, question: Q, observe: Callable[[N], None] = unobserved) -> Ticket[Q, N, A]:
        """Takes a question. Raises UnavailableError if too many wait, or the service is stopping."""
        ticket = Ticket[Q, N, A](question, observe)
        with self._lock:
            self._require_room()
            self._tickets.add(ticket)
            ticket.future = self._threads.submit(self._work, ticket)

        def forget(_: object) -> None:
            with self._lock:
                self._tickets.discard(ticket)

        ticket.future.add_done_callback(forget)
        return ticket

    def require_room(self) -> None:
        """Raises UnavailableError if a question would not be taken now."""
        with self._lock:
            self._require_room()

    def close(self) -> None:
        """Stops all work and ends every worker. No question is taken after that."""
        with self._lock:
            self._closed = True
            tickets, idle = tuple(self._tickets), tuple(self._idle)
            self._idle.clear()
            if self._timer is not None:
                self._timer.cancel()
        for ticket in tickets:
            ticket.cancel()
        for _, worker in idle:
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _require_room(self) -> None:
        if self._closed:
            raise UnavailableError("the service is stopping", RETRY_AFTER_S)
        waiting = len(self._tickets) - self.workers
        if waiting >= self._queue:
            raise UnavailableError(f"{self.workers} {self._words.at_work} and {waiting} wait already", RETRY_AFTER_S)

    def _work(self, ticket: Ticket[Q, N, A]) -> A:
        """The answer to the question, by an idle worker or a new one, which is kept if it is still alive afterwards."""
        worker = None
        with self._lock:
            while worker is None and self._idle:
                _, idle = self._idle.pop()
                if idle.alive:
                    worker = idle
                else:
                    idle.close()
        if worker is None:
            worker = self._start()

        held = ticket.hold(worker)
        try:
            if not held:
                raise CancelledError
            return worker.ask(ticket.question, ticket.observe)
        except PipeplanError:
            if ticket.cancelled:
                raise UnavailableError(self._words.stopped, RETRY_AFTER_S) from None
            raise
        finally:
            intact = not held or ticket.release()
            with self._lock:
                kept = intact and worker.alive and not self._closed
                if kept:
                    self._idle.append((time.monotonic(), worker))
                    self._watch_idle()
            if not kept:
                worker.close()

    def _watch_idle(self) -> None:
        """Schedules the end of idle workers, unless it is scheduled already."""
        if self._timer is None and self._idle:
            self._timer = threading.Timer(self._idle_s, self._retire)
            self._timer.daemon = True
            self._timer.start()

    def _retire(self) -> None:
        """Ends the workers that have been idle for long."""
        latest_s = time.monotonic() - self._idle_s
        with self._lock:
            retired = [worker for since_s, worker in self._idle if since_s <= latest_s]
            self._idle = [(since_s, worker) for since_s, worker in self._idle if since_s > latest_s]
            self._timer = None
            self._watch_idle()
        for worker in retired:
            worker.close()
