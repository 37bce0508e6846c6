"""Writers: the threads of requests that write to the database. They are few; requests that only read have other
threads.

A writer may wait for its turn for many seconds. If it waited in a thread that readers need too, writers that are
blocked would keep every reader from being answered.
"""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from anyio import CapacityLimiter
from anyio.lowlevel import RunVar
from anyio.to_thread import run_sync
from fastapi.routing import APIRoute

WRITERS = 8
"""How many threads write or wait for their turn; on PostgreSQL this leaves half of the connections."""

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

P = ParamSpec("P")
T = TypeVar("T")

_limiter: RunVar[CapacityLimiter] = RunVar("pipeplan_writers")


async def in_writer(function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """Calls a function that writes, in a writer's thread."""
    return await run_sync(partial(function, *given, **named), limiter=writers())


def writers() -> CapacityLimiter:
    """The writers' threads of this event loop."""
    try:
        return _limiter.get()
    except LookupError:
        made = CapacityLimiter(WRITERS)
        _limiter.set(made)
        return made


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
