"""Prices: plans that were stored without a play are played in the background, one at a time, and keep their ids.

A planner plays no longer than a request may take, so a long plan is stored with its closed form alone. Every process of
the service looks for such plans when it starts and every `LOOK_S` seconds after that, the newest first:

1. It claims a plan by an update that has no effect after another process's claim. The claim of a process that dies
   expires.
2. A separate process plays the plan, within limits of instructions, memory and time.
3. The play is added by an update that has no effect if the plan has a play. If a play was too long, its limit is
   recorded: no process tries the same limit again.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeAlias

from pipeplan.errors import PipeplanError, ServiceError, SolverError, UnavailableError
from planner_service.plans import store as storage
from planner_service.plans.questions import Price, PriceQuestion
from planner_service.platform.context import Context
from planner_service.platform.processes.pool import ChildProcess, End, Pool, PoolWorker, Words, WorkerProcess

LOOK_S = 60.0
"""How often a process looks for plans without a price."""

CPU_S = 600.0
"""How much processor time the play of one plan may take."""

CLAIM_S = 3 * CPU_S
"""How long a process's claim keeps others from playing the plan."""

LOG = logging.getLogger("pipeplan.plans")
WORDS = Words(at_work="plans are being played", stopped="the play was stopped")

PriceWorker: TypeAlias = PoolWorker[PriceQuestion, None, Price | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayClaim:
    """A plan to play, and until when no other process does."""

    question: PriceQuestion
    until: datetime


def price_process(memory_bytes: int) -> WorkerProcess[PriceQuestion, None, Price | None]:
    """A process that plays plans."""

    def ended(end: End, how: str) -> PipeplanError:
        limits = {End.OUT_OF_MEMORY: f"{memory_bytes:,} bytes of memory", End.OUT_OF_TIME: f"{CPU_S:g} s"}
        return SolverError(f"the play took more than {limits[end]}" if end in limits else f"the play ended {how}")

    program, arguments = "planner_service.plans.price_process", (str(memory_bytes), str(CPU_S))
    return WorkerProcess(ChildProcess(program=program, arguments=arguments, ended=ended))


def claim(context: Context, instructions: int) -> PlayClaim | None:
    """Claims the next plan to be played with at most `instructions` instructions, or returns None."""
    while True:
        now = context.now()
        with context.database.read() as connection:  # usually there is none, and nothing is written
            plan_id = storage.without_price(connection, instructions, now)
        if plan_id is None:
            return None
        until = now + timedelta(seconds=CLAIM_S)
        with context.database.write() as connection:
            content = storage.claim(connection, plan_id, instructions, now, until)
        if content is not None:
            question = PriceQuestion(plan_id=plan_id, content=content, instructions=instructions)
            return PlayClaim(question=question, until=until)


def add(context: Context, claimed: PlayClaim, price: Price) -> bool:
    """Adds the play to the plan; False if the plan has one by now, or is gone."""
    with context.database.write() as connection:
        return storage.add_price(connection, claimed.question.plan_id, price)


def end(context: Context, claimed: PlayClaim, *, tried: bool) -> None:
    """Ends a claim without a play; `tried`: it was too long, and is not tried again with this limit."""
    question = claimed.question
    with context.database.write() as connection:
        storage.end_claim(connection, question.plan_id, claimed.until, question.instructions if tried else None)


class PriceRunner:
    """Plays the plans without a price, each with at most `instructions` instructions; with 0 it plays none."""

    def __init__(self, context: Context, start: Callable[[], PriceWorker], *, instructions: int) -> None:
        self._context = context
        self._instructions = instructions
        self._pool: Pool[PriceQuestion, None, Price | None] = Pool(start, WORDS, workers=1, queue=0)

    async def run(self) -> None:
        """Works until it is cancelled; the current plan then waits for another process."""
        if not self._instructions:
            return
        while True:
            with suppress(ServiceError):  # the database is away: its jobs wait
                while await self.play_next():
                    pass
            await asyncio.sleep(LOOK_S)

    async def play_next(self) -> bool:
        """Plays the next plan and adds the play; returns whether there was a plan."""
        claimed = await asyncio.to_thread(claim, self._context, self._instructions)
        if claimed is None:
            return False
        plan_id = claimed.question.plan_id
        try:
            ticket = self._pool.submit(claimed.question)
            try:
                price = await asyncio.wrap_future(ticket.future)
            finally:
                ticket.cancel()
        except (asyncio.CancelledError, UnavailableError):
            with suppress(PipeplanError):
                await asyncio.to_thread(end, self._context, claimed, tried=False)
            raise
        except PipeplanError as error:
            LOG.warning("plan %s could not be played: %s", plan_id, error)
            price = None
        if price is None:
            await asyncio.to_thread(end, self._context, claimed, tried=True)
        elif await asyncio.to_thread(add, self._context, claimed, price):
            LOG.info("plan %s was played: %.6g samples/s", plan_id, price.throughput_samples_per_s)
        return True

    def close(self) -> None:
        """Ends the current play, and starts no other. Any thread may call it."""
        self._pool.close()
