"""Plan jobs: requests for plans as jobs, which the service's own solvers do.

The functions are the transactions of a plan job. `PlanRunner` does the jobs that wait, in this process's solvers, under
leases like any agent's. Every process of the service has one; the process that leases a job does it. When a process
dies, its leases expire, and the jobs go to another process, or to itself after a restart. A job that is cancelled
through any process ends its search.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from pipeplan.documents.identity import canonical_json
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.errors import DeadlineError, LeaseLostError, PipeplanError, ServiceError, UnavailableError
from pipeplan.formats import four_digits
from pipeplan.planners.problem import SearchProgress as Search
from pipeplan.protocol.jobs import Failure, Heartbeat, Job, Lease, LeaseRequest, PlanTask, Progress, Release
from pipeplan.protocol.plans import PlanRequest
from planner_service.events.store import Subject
from planner_service.jobs import service as jobs
from planner_service.jobs import store as storage
from planner_service.jobs.kinds import JobKind
from planner_service.plans import service as plans
from planner_service.plans.questions import Answered, PlannerQuestion, Posed
from planner_service.plans.solver import SolverPool
from planner_service.platform.context import Context

T = TypeVar("T")
LOG = logging.getLogger("pipeplan.plans")

POLL_S = 1.0
"""How often the runner reads the queue without being woken."""

LOOK_S = 0.5
"""The interval of checks whether a search has ended, and whether its lease is still valid."""

TELL_S = 1.0
"""The minimum interval between two progress reports."""

AWAY_S = 1.0
"""How long it waits before it retries a database that did not answer."""


def _check(context: Context, task: PlanTask) -> None:
    """Raises InvalidInputError for a request that no planner takes."""
    asked = plans.posed(context, task.request, longest_s=context.longest_search_s)
    context.parsing.read_stored(Posed.check, asked, asked.size)


PLAN = JobKind(name="plan", check=_check, by_service=True)
"""The kind of job that asks a planner. The service's own solvers do it."""


def enqueue(context: Context, request: PlanRequest, *, asked_by: str | None = None) -> Job:
    """Enqueues a plan. Raises InvalidInputError for a request that no planner takes."""
    return jobs.enqueue(context, PlanTask(request=request), asked_by=asked_by)


def take(context: Context, service: str) -> Lease | None:
    """Leases the oldest plan in the queue, or returns None."""
    # Agents cannot ask for this kind: the protocol's model has no such value.
    return jobs.lease(context, LeaseRequest.model_construct(agent=service, kinds=("plan",), instance=None))


def posed(context: Context, lease: Lease) -> Posed:
    return plans.posed(context, _request(lease.job), longest_s=context.longest_search_s)


def beat(context: Context, lease: Lease, progress: Progress | None) -> bool:
    """Renews the lease; returns whether the job continues. Raises LeaseLostError if another owner has it by now."""
    return not jobs.heartbeat(context, lease.job.id, Heartbeat(token=lease.token, progress=progress)).cancelled


def is_held(context: Context, lease: Lease) -> bool:
    """Whether the job is still leased, and under this very lease, by its fence. Writes nothing."""
    with context.database.read() as connection:
        job = storage.get(connection, lease.job.id)
    return job is not None and job.state == "leased" and job.fence == lease.job.fence


def finish(context: Context, lease: Lease, answered: Answered) -> Job:
    """Ends the job with the plan, or with the reasons why none fits, and stores either with it."""

    def end(connection: Connection, job: Job) -> None:
        created = plans.keep(context, connection, _request(job), answered, asked_by=job.asked_by)
        answer: dict[str, object] = {"solve_time_s": answered.solve_time_s}
        if isinstance(answered.answer, Infeasible):
            answer["infeasible"] = asdict(answered.answer)
        storage.succeed(
            connection,
            job.id,
            result_id=created.plan_id or job.id,
            beside={"plan_id": created.plan_id, "answer": canonical_json(answer)},
            now=context.now(),
        )

    return jobs.conclude(context, lease.job.id, lease.token, end)


def answer_of(context: Context, job: Job) -> plans.Created | None:
    """The answer of a job that has succeeded; None for any other."""
    if job.state != "succeeded":
        return None
    answer: Plan | Infeasible | None = job.infeasible
    if job.plan_id is not None:
        answer = plans.get(context, job.plan_id)
    if answer is None:
        return None
    return plans.Created(answer=answer, plan_id=job.plan_id, new=True, solve_time_s=job.solve_time_s or 0.0)


class PlanRunner:
    """Leases plan jobs while solvers are free. Calls `told` for every job whose end has just been stored."""

    def __init__(self, context: Context, pool: SolverPool, *, told: Callable[[Subject], None] = lambda _: None) -> None:
        self.deadline_s = context.longest_search_s
        self._told = told
        self._context = context
        self._pool = pool
        self._name = f"service-{socket.gethostname()}-{os.getpid()}"[:200]
        self._new = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def poke(self) -> None:
        """Wakes the runner: the queue has a new job."""
        self._new.set()

    async def run(self) -> None:
        """Works until it is cancelled; the jobs at hand then go back to the queue."""
        try:
            while True:
                self._new.clear()
                with suppress(ServiceError):  # the database is away: its jobs wait
                    while len(self._tasks) < self._pool.workers and self._pool.free:
                        lease = await asyncio.to_thread(take, self._context, self._name)
                        if lease is None:
                            break
                        task = asyncio.create_task(self._work(lease))
                        self._tasks.add(task)
                        task.add_done_callback(self._ended)
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):  # `wait_for` loses a cancellation that comes with the news
                        await self._new.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._new.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("a plan job failed in an unforeseen way", exc_info=error)

    async def _work(self, lease: Lease) -> None:
        release = partial(jobs.release, self._context, lease.job.id, Release(token=lease.token))
        try:
            answered = await self._solve(lease)
            if answered is not None:
                await self._say(partial(finish, self._context, lease, answered))
        except asyncio.CancelledError:
            with suppress(PipeplanError):
                await asyncio.to_thread(release)
            raise
        except LeaseLostError as error:
            LOG.warning("job %s: %s", lease.job.id, error)
        except UnavailableError:
            await self._say(release)
        except PipeplanError as error:
            failure = Failure(token=lease.token, error=error.outside[:4000])
            await self._say(partial(jobs.fail, self._context, lease.job.id, failure))
        self._told(("job", lease.job.id))

    async def _solve(self, lease: Lease) -> Answered | None:
        """The planner's answer; None if its lease has ended. Renews the lease during the search."""
        asked = await asyncio.to_thread(partial(posed, self._context, lease))
        heard: list[Search] = []
        question = PlannerQuestion(planner=asked.request.planner, pose=asked.problem)
        ticket = self._pool.submit(question, heard.append)
        try:
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
                    goes_on = await self._ask(partial(beat, self._context, lease, _progress(newest)))
                else:
                    goes_on = await self._ask(partial(is_held, self._context, lease))
                if not goes_on:
                    future.cancel()
                    return None
        finally:
            ticket.cancel()

    async def _ask(self, question: Callable[[], bool]) -> bool:
        """Whether the job continues; an unreachable database does not end a search."""
        try:
            return await asyncio.to_thread(question)
        except LeaseLostError:
            return False
        except ServiceError:
            return True

    async def _say(self, word: Callable[[], T]) -> None:
        """Repeats a final report until it is stored; the lease expires if that takes too long."""
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
    best = "no plan yet" if search.best_s is None else f"{four_digits(1 / search.best_s)} samples/s"
    bound = f", none beyond {four_digits(1 / search.bound_s)}" if search.bound_s > 0 else ""
    return Progress(done=done, total=100, message=f"{best}{bound}; {search.open_shapes} combinations open")


def _request(job: Job) -> PlanRequest:
    if not isinstance(job.task, PlanTask):
        raise LookupError(f"job {job.id} is of kind {job.task.kind}")
    return job.task.request
