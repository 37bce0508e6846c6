"""Parsing: reads the documents that requests send or name.

A thread that parses holds Python's global lock, and so stops the whole process. A thread therefore reads only small
documents, which take milliseconds. A separate process reads each large one, within limits of time and memory; receiving
its result is cheap.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

from pipeplan.errors import PipeplanError, TooLargeError, UnavailableError
from planner_service.platform.processes.pool import (
    RETRY_AFTER_S,
    ChildProcess,
    End,
    Pool,
    PoolWorker,
    Words,
    WorkerProcess,
)

T = TypeVar("T")
C = TypeVar("C")

SMALL_BYTES = 64 * 1024
"""The largest body that this process reads itself: the slowest one takes milliseconds."""

SMALL_STORED = 2**20
"""The characters of the largest stored document that this process reads itself, in 0.1 s: it was valid before."""

LONGEST_WAIT_S = 120.0
"""How long a request waits for its document, including time in the queue."""

WORDS = Words(at_work="large documents are being read", stopped="the service is stopping")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The text to read, and the function that reads it."""

    read: Callable[[Any], object]
    content: object


Parser: TypeAlias = PoolWorker[Sent, None, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsingLimits:
    """The number of large documents that are read at once and that wait, and the limits of each."""

    parsers: int = 1
    queue: int = 8
    memory_bytes: int = 2**31
    cpu_s: float = 30.0


def parser_process(
    limits: ParsingLimits, program: str = "planner_service.platform.parser_process"
) -> WorkerProcess[Sent, None, object]:
    """A process that reads documents."""
    arguments = (str(limits.memory_bytes), str(limits.cpu_s))
    return WorkerProcess(ChildProcess(program=program, arguments=arguments, ended=partial(_ended, limits)))


class Parsing:
    """Reads documents: small ones in one thread of this process, others in `limits.parsers` processes."""

    def __init__(self, limits: ParsingLimits = ParsingLimits(), start: Callable[[], Parser] | None = None) -> None:
        start = start or partial(parser_process, limits)
        self._pool: Pool[Sent, None, object] = Pool(start, WORDS, workers=limits.parsers, queue=limits.queue)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parser")  # several would outnumber the event loop

    async def read(self, read: Callable[[bytes], T], content: bytes) -> T:
        """The content of the body. Raises the errors of `read`, TooLargeError, and UnavailableError."""
        if len(content) <= SMALL_BYTES:
            return await asyncio.get_running_loop().run_in_executor(self._thread, read, content)
        ticket = self._pool.submit(Sent(read=read, content=content))
        future = asyncio.wrap_future(ticket.future)
        try:
            await asyncio.wait({future}, timeout=LONGEST_WAIT_S)
            if not future.done() or future.cancelled():
                raise UnavailableError("the document could not be read in time", RETRY_AFTER_S)
            return cast(T, future.result())
        finally:
            if not future.done():
                ticket.cancel()

    def read_stored(self, read: Callable[[C], T], content: C, size: int) -> T:
        """`read(content)` of a stored document of `size` characters, for a thread that may wait.

        Raises the errors of `read`, TooLargeError, and UnavailableError.
        """
        if size <= SMALL_STORED:
            return self._thread.submit(read, content).result()
        ticket = self._pool.submit(Sent(read=read, content=content))
        try:
            return cast(T, ticket.future.result(LONGEST_WAIT_S))
        except (CancelledError, TimeoutError) as error:
            raise UnavailableError("the document could not be read in time", RETRY_AFTER_S) from error
        finally:
            if not ticket.future.done():
                ticket.cancel()

    def require_room(self, size_bytes: int) -> None:
        """Raises UnavailableError if a body of this size would have to be refused, before it is received."""
        if size_bytes > SMALL_BYTES:
            self._pool.require_room()

    def close(self) -> None:
        """Ends all processes. Nothing can be read after that."""
        self._pool.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _ended(limits: ParsingLimits, end: End, how: str) -> PipeplanError:
    """The error of a document whose reading ended the process."""
    taken: dict[End, Any] = {
        End.OUT_OF_MEMORY: f"more than {limits.memory_bytes:,} bytes of memory (PIPEPLAN_PARSER_MEMORY_BYTES)",
        End.OUT_OF_TIME: f"more than {limits.cpu_s:g} s of processor time (PIPEPLAN_PARSER_CPU_S)",
        End.KILLED: "more memory than the machine has",
    }
    if end in taken:
        return TooLargeError(f"the document takes {taken[end]} to read")
    return TooLargeError(f"the document cannot be read: the process that read it ended {how}")
