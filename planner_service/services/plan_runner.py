"""Plan runner: does the plan jobs that wait, in this process's solvers, under leases like any agent's.

Every process of the service has one; who leases a job does it. A process that dies lets its leases run out, and the
jobs go to another, or to itself after its start. A job that is cancelled through whichever process ends its search.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from pipeplan.errors import DeadlineError, LeaseLostError, PipeplanError, ServiceError, UnavailableError
from pipeplan.planners.problem import SearchProgress as Search
from planner_service.contract.jobs import Failure, Lease, Progress, Release
from planner_service.services import jobs, plan_jobs
from planner_service.services.context import Context
from planner_service.services.solver import SolverPool, SolverTicket
from planner_service.solvers.messages import Answered, Question

T = TypeVar("T")

POLL_S = 1.0
"""How often the queue is looked at where nobody says that there is something new."""

LOOK_S = 0.5
TELL_S = 1.0
AWAY_S = 1.0
LOG = logging.getLogger("pipeplan.plans")


class PlanRunner:
    """Leases plan jobs while solvers are free. `deadline_s` is the longest that one may take.

    `told` hears of the jobs whose end has just been written down.
    """

    def __init__(
        self, context: Context, pool: SolverPool, *, deadline_s: float, told: Callable[[str], None] = lambda _: None
    ) -> None:
        self.deadline_s = deadline_s
        self._told = told
        self._context = context
        self._pool = pool
        self._name = f"service-{socket.gethostname()}-{os.getpid()}"[:200]
        self._new = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def poke(self) -> None:
        """There is something new in the queue."""
        self._new.set()

    async def run(self) -> None:
        """Works until it is cancelled; what it is at then goes back to the queue."""
        try:
            while True:
                self._new.clear()
                with suppress(ServiceError):  # the database is away: what waits there waits
                    await self._start_all()
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):  # `wait_for` loses a cancellation that comes with the news
                        await self._new.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def _start_all(self) -> None:
        while len(self._tasks) < self._pool.workers and self._pool.free:
            lease = await asyncio.to_thread(plan_jobs.take, self._context, self._name)
            if lease is None:
                return
            task = asyncio.create_task(self._work(lease))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._new.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("a plan job failed in a way that the service does not know", exc_info=error)

    async def _work(self, lease: Lease) -> None:
        release = partial(jobs.release, self._context, lease.job.id, Release(token=lease.token))
        try:
            answered = await self._solve(lease)
            if answered is not None:
                await self._say(partial(plan_jobs.finish, self._context, lease, answered))
        except asyncio.CancelledError:
            with suppress(PipeplanError):
                await asyncio.to_thread(release)
            raise
        except LeaseLostError as error:
            LOG.warning("job %s: %s", lease.job.id, error)
        except UnavailableError:
            await self._say(release)
        except PipeplanError as error:
            failure = Failure(token=lease.token, error=str(error)[:4000])
            await self._say(partial(jobs.fail, self._context, lease.job.id, failure))
        self._told(lease.job.id)

    async def _solve(self, lease: Lease) -> Answered | None:
        """The planner's answer; None where nobody waits for it any more."""
        load = partial(plan_jobs.posed, self._context, lease, longest_s=self.deadline_s)
        posed = await asyncio.to_thread(load)
        heard: list[Search] = []
        question = Question(planner=posed.request.planner, pose=posed.problem)
        ticket = self._pool.submit(question, heard.append)
        try:
            return await self._follow(lease, ticket, heard)
        finally:
            ticket.cancel()

    async def _follow(self, lease: Lease, ticket: SolverTicket, heard: list[Search]) -> Answered | None:
        future = asyncio.wrap_future(ticket.future)
        loop = asyncio.get_running_loop()
        begun_s = beaten_s = loop.time()
        told: Search | None = None
        interval_s = self._context.lease_s / 3
        while True:
            await asyncio.wait({future}, timeout=min(LOOK_S, interval_s))
            if future.done():
                return future.result()
            now_s = loop.time()
            if now_s - begun_s > self.deadline_s:
                future.cancel()
                raise DeadlineError(f"the planner has not answered within {self.deadline_s:g} s")
            newest = heard[-1] if heard else None
            heard[:-1] = []
            news = newest is not told and now_s - beaten_s >= TELL_S
            if news or now_s - beaten_s >= interval_s:
                beaten_s, told = now_s, newest
                goes_on = await self._ask(partial(plan_jobs.beat, self._context, lease, _progress(newest)))
            else:
                goes_on = await self._ask(partial(plan_jobs.is_held, self._context, lease))
            if not goes_on:
                future.cancel()
                return None

    async def _ask(self, question: Callable[[], bool]) -> bool:
        """Whether the job goes on; a database that is away ends no search."""
        try:
            return await asyncio.to_thread(question)
        except LeaseLostError:
            return False
        except ServiceError:
            return True

    async def _say(self, word: Callable[[], T]) -> None:
        """Says a last word until it is taken: the lease runs out where that takes too long."""
        while True:
            try:
                await asyncio.to_thread(word)
            except LeaseLostError as error:
                LOG.warning("a plan job's end was not taken: %s", error)
            except ServiceError:
                await asyncio.sleep(AWAY_S)
                continue
            return


def _progress(search: Search | None) -> Progress | None:
    if search is None:
        return None
    done = int(100 * min(1.0, search.spent / search.limit)) if search.limit > 0 else 0
    best = "no plan yet" if search.best_s is None else f"{1 / search.best_s:,.4g} samples/s"
    bound = f", none beyond {1 / search.bound_s:,.4g}" if search.bound_s > 0 else ""
    return Progress(done=done, total=100, message=f"{best}{bound}; {search.open_shapes} combinations open")
