"""Solving: planners work in processes of their own, a few at a time, and every search can be stopped at once.

submit ──▶ queue (bounded) ──▶ a solver (kept warm, ended when idle) ──▶ Ticket.future
                └──────── Ticket.cancel: leaves the queue, or ends the solver ────────┘
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from planner_service.core.errors import SolverError, UnavailableError
from planner_service.core.planner.problem import Problem
from planner_service.services.solver import Solver
from planner_service.solvers.messages import Answered, Question
from planner_service.solvers.progress import Observer, unobserved

IDLE_S = 60.0
"""How long a solver is kept that has nothing to do."""

RETRY_AFTER_S = 2.0


@dataclass(slots=True, eq=False)
class Ticket:
    """A question that was taken. `future` is done with the answer, with what was raised, or cancelled."""

    question: Question
    observe: Observer
    future: "Future[Answered]" = field(default_factory=Future)
    _solver: Solver | None = None
    _cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """Stops the search: nothing of it goes on. May be called at any time, by any thread."""
        with self._lock:
            self._cancelled = True
            if self._solver is not None:
                self._solver.kill()
        self.future.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled

    def hold(self, solver: Solver) -> bool:
        """The solver works for this question from now on; not where it was cancelled before."""
        with self._lock:
            if not self._cancelled:
                self._solver = solver
            return not self._cancelled

    def release(self) -> bool:
        """The solver works for it no longer; says whether it was left alone."""
        with self._lock:
            self._solver = None
            return not self._cancelled


class Pool:
    """Solvers, at most so many at a time, and a queue before them.

    A solver starts when it is needed first; one that ends, or that was stopped, is replaced when it is needed next.
    """

    def __init__(self, start: Callable[[], Solver], *, solvers: int, queue: int, idle_s: float = IDLE_S) -> None:
        self.solvers = solvers
        self._start = start
        self._queue = queue
        self._idle_s = idle_s
        self._threads = ThreadPoolExecutor(solvers, thread_name_prefix="solver")
        self._lock = threading.Lock()
        self._tickets: set[Ticket] = set()
        self._idle: list[tuple[float, Solver]] = []
        self._timer: threading.Timer | None = None
        self._closed = False

    @property
    def free(self) -> int:
        """How many more questions would be worked on at once."""
        with self._lock:
            return 0 if self._closed else max(0, self.solvers - len(self._tickets))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is worked on, and nothing waits."""
        with self._lock:
            return not self._tickets

    def submit(self, planner: str, problem: Problem, observe: Observer = unobserved) -> Ticket:
        """Takes a question. Raises UnavailableError where too many wait, or the service is stopping."""
        ticket = Ticket(Question(planner=planner, problem=problem), observe)
        with self._lock:
            self._require_room()
            self._tickets.add(ticket)
            ticket.future = self._threads.submit(self._work, ticket)
        ticket.future.add_done_callback(lambda _: self._forget(ticket))
        return ticket

    def close(self) -> None:
        """Stops every search and ends every solver; nothing is taken any more."""
        with self._lock:
            self._closed = True
            tickets, idle = tuple(self._tickets), tuple(self._idle)
            self._idle.clear()
            if self._timer is not None:
                self._timer.cancel()
        for ticket in tickets:
            ticket.cancel()
        for _, solver in idle:
            solver.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _require_room(self) -> None:
        if self._closed:
            raise UnavailableError("the service is stopping", RETRY_AFTER_S)
        waiting = len(self._tickets) - self.solvers
        if waiting >= self._queue:
            raise UnavailableError(f"{self.solvers} plans are being made and {waiting} wait already", RETRY_AFTER_S)

    def _work(self, ticket: Ticket) -> Answered:
        solver = self._take()
        held = ticket.hold(solver)
        try:
            if not held:
                raise CancelledError
            return solver.ask(ticket.question, ticket.observe)
        except SolverError:
            if ticket.cancelled:
                raise UnavailableError("the search was stopped", RETRY_AFTER_S) from None
            raise
        finally:
            self._give_back(solver, intact=not held or ticket.release())

    def _take(self) -> Solver:
        with self._lock:
            while self._idle:
                _, solver = self._idle.pop()
                if solver.alive:
                    return solver
                solver.close()
        return self._start()

    def _give_back(self, solver: Solver, *, intact: bool) -> None:
        with self._lock:
            if intact and solver.alive and not self._closed:
                self._idle.append((time.monotonic(), solver))
                self._watch_idle()
                return
        solver.close()

    def _watch_idle(self) -> None:
        if self._timer is None and self._idle:
            self._timer = threading.Timer(self._idle_s, self._retire)
            self._timer.daemon = True
            self._timer.start()

    def _retire(self) -> None:
        """Ends the solvers that have had nothing to do for long."""
        latest_s = time.monotonic() - self._idle_s
        with self._lock:
            retired = [solver for since_s, solver in self._idle if since_s <= latest_s]
            self._idle = [(since_s, solver) for since_s, solver in self._idle if since_s > latest_s]
            self._timer = None
            self._watch_idle()
        for solver in retired:
            solver.close()

    def _forget(self, ticket: Ticket) -> None:
        with self._lock:
            self._tickets.discard(ticket)
