"""Background: the work of a service's process outside requests: solvers, plan jobs, prices, followers of events."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from pipeplan.errors import ServiceError
from planner_service.access import idempotency
from planner_service.events.feed import Feed
from planner_service.jobs import service as jobs
from planner_service.plans.jobs import PlanRunner
from planner_service.plans.prices import PriceRunner, PriceWorker
from planner_service.plans.solver import Solver, solver_pool
from planner_service.platform.context import Context, utc_now

TIDY_S = 600.0
"""How often the stored answers for repeated requests are pruned."""

SETTLE_S = 1.0
"""How often expired leases are handled."""

LOOK_S = 0.05

WATCHES = 20
"""How often in a lease's length the loop's watchdog runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkBounds:
    """How many solvers run at the same time, how long a search within a request may take, and how much is played for a
    price.
    """

    solvers: int = 2
    queue: int = 32
    streams: int = 500
    deadline_s: float = 50.0
    price_instructions: int = 0


class Background:
    """Solvers, the runners of plan jobs and of prices, the feed of events; `stop` may be called at any time and ends
    parsing too.
    """

    def __init__(
        self,
        context: Context,
        start: Callable[[], Solver],
        bounds: WorkBounds,
        start_pricing: Callable[[], PriceWorker],
    ) -> None:
        self.bounds = bounds
        self.pool = solver_pool(start, solvers=bounds.solvers, queue=bounds.queue)
        self.feed = Feed(context, followers=bounds.streams)
        self.runner = PlanRunner(context, self.pool, told=self.feed.hint)
        self.prices = PriceRunner(context, start_pricing, instructions=bounds.price_instructions)
        self._context = context

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Works until the block ends."""
        works = [self.runner.run(), self.prices.run(), self._tidy(), self._settle()]
        if self._context.now is utc_now:  # a clock that a test sets needs no watchdog
            works.append(self._watch())
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self.stop()

    def stop(self) -> None:
        """Ends every search and every stream. The requests that wait for them then end."""
        self.feed.close()
        self.pool.close()
        self.prices.close()
        self._context.parsing.close()

    def wind_down(self, within_s: float) -> None:
        """Ends streams and plays at once, and searches with waiting requests after at most `within_s`.

        Blocks meanwhile: never call it in the event loop's thread.
        """
        self.feed.close()
        self.prices.close()
        until_s = time.monotonic() + within_s
        while not self.pool.is_idle and time.monotonic() < until_s:
            time.sleep(LOOK_S)
        self.pool.close()

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            with suppress(ServiceError):
                await asyncio.to_thread(idempotency.prune, self._context)

    async def _settle(self) -> None:
        """Handles expired leases, because reading a job does not."""
        while True:
            await asyncio.sleep(SETTLE_S)
            with suppress(ServiceError):
                await asyncio.to_thread(jobs.settle, self._context)

    async def _watch(self) -> None:
        """The watchdog of the loop: notices when the process stood still, or its clock was set."""
        context = self._context
        while True:
            context.absence.beat(context.now(), time.monotonic(), context.lease_s)
            await asyncio.sleep(context.lease_s / WATCHES)
