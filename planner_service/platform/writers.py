"""Writers: the threads of requests that write to the database. They are few; requests that only read have other
threads.

A writer may wait for its turn for many seconds. If it waited in a thread that readers need too, writers that are
blocked would keep every reader from being answered. It waits no longer than PATIENCE_S from its arrival: for a thread,
for its turn and for the database's locks together.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from anyio import CapacityLimiter
from anyio.lowlevel import RunVar
from anyio.to_thread import run_sync
from fastapi.routing import APIRoute

from pipeplan.errors import UnavailableError
from planner_service.platform.turns import DEADLINE_S, PATIENCE_S, RETRY_AFTER_S

WRITERS = 8
"""How many threads write or wait for their turn; on PostgreSQL this leaves half of the connections."""

MOST_WAITING = 256
"""How many writers may wait for a thread. More could not finish in time, and are refused at once."""

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

P = ParamSpec("P")
T = TypeVar("T")

_limiter: RunVar[CapacityLimiter] = RunVar("pipeplan_writers")


async def in_writer(function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """Calls a function that writes, in a writer's thread.

    Raises UnavailableError where too many wait, or where no thread is free in time.
    """
    try:
        threads = _limiter.get()
    except LookupError:
        threads = CapacityLimiter(WRITERS)
        _limiter.set(threads)
    if threads.statistics().tasks_waiting >= MOST_WAITING:
        raise UnavailableError(f"{MOST_WAITING} requests wait to write to the database already", RETRY_AFTER_S)
    borrower, until_s = object(), time.monotonic() + PATIENCE_S
    try:
        async with asyncio.timeout(PATIENCE_S):
            await threads.acquire_on_behalf_of(borrower)
    except TimeoutError as error:
        rule = f"the request waited for {PATIENCE_S:g} s to write to the database: too many others do"
        raise UnavailableError(rule, RETRY_AFTER_S) from error
    reset = DEADLINE_S.set(until_s)
    try:
        return await run_sync(partial(function, *given, **named), limiter=CapacityLimiter(1))
    finally:
        DEADLINE_S.reset(reset)
        threads.release_on_behalf_of(borrower)


class WritingRoute(APIRoute):
    """A route whose function runs in a writer's thread if its method may change something."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        methods = options.get("methods") or ("GET",)
        if not SAFE.issuperset(methods) and not inspect.iscoroutinefunction(endpoint):
            plain = endpoint

            @wraps(plain)
            async def writing(*given: Any, **named: Any) -> Any:
                return await in_writer(plain, *given, **named)

            endpoint = writing
        super().__init__(path, endpoint, **options)
