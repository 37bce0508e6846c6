"""Reading: lists and streams of events, item by item, for blocking and for asynchronous programs.

`Pages` and `Following` know the next request, and what an answer changes; the iterators send it over a connection.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pipeplan.client.connection import AsyncConnection, Connection
from pipeplan.client.exchange import Steps, promised
from pipeplan.errors import ServiceError
from pipeplan.protocol.listing import MAX_LIMIT, Page
from pipeplan.protocol.runs import Event, events_in

T = TypeVar("T")

PATIENCE_S = 60.0
"""After this time without an event, a stream that breaks off is an error."""

SILENCE_S = 45.0
"""A stream of events that sends nothing for this time is broken: the service sends something three times as often."""

AGAIN_S = 0.3
"""The pause before a broken stream of events is requested again."""


@dataclass(slots=True, kw_only=True)
class Pages(Generic[T]):
    """A list, requested a page at a time: `limit` items of it, or all.

    `next_cursor` requests the items after those taken so far, once `held` is empty; None at the list's end.
    """

    fetch: Callable[[int, str | None], Steps[Page[T]]]
    limit: int | None
    next_cursor: str | None
    held: deque[T] = field(default_factory=deque)
    begun: bool = False

    def more(self) -> Steps[bool]:
        """Holds another item, if there is one: a page of the service may be empty and have others after it."""
        while not self.held:
            if self.limit == 0 or (self.begun and self.next_cursor is None):
                return False
            page = yield from self.fetch(min(self.limit or MAX_LIMIT, MAX_LIMIT), self.next_cursor)
            self.begun, self.next_cursor = True, page.next_cursor
            self.held.extend(page.items)
            if self.limit is not None:
                self.limit -= len(page.items)
        return True


@dataclass(slots=True, kw_only=True)
class Following:
    """The events of a job or a run from the one numbered `after`, over as many connections as it takes."""

    path: str
    after: int
    ended: bool = False
    heard_s: float = field(default_factory=time.monotonic)

    @property
    def headers(self) -> dict[str, str]:
        """The parameters of the next connection."""
        return {"Last-Event-ID": str(self.after)}

    def heard(self, event: Event) -> None:
        """Records what has come: a broken stream continues after it."""
        self.after, self.ended, self.heard_s = event.number, event.ends, time.monotonic()

    def broke(self, error: ServiceError) -> None:
        """Raises the error if no event came for too long."""
        if time.monotonic() - self.heard_s > PATIENCE_S:
            raise error


class Items(Iterator[T]):
    """The items of a list, one after another; pages are requested as they are needed."""

    def __init__(self, connection: Connection, pages: Pages[T]) -> None:
        self._connection = connection
        self._pages = pages

    def __next__(self) -> T:
        """The next item."""
        if not self._connection.run(self._pages.more()):
            raise StopIteration
        return self._pages.held.popleft()

    def page(self) -> Page[T]:
        """All remaining items, up to the limit, with the cursor of the items after them."""
        return Page(items=tuple(self), next_cursor=self._pages.next_cursor)


class AsyncItems(AsyncIterator[T]):
    """The items of a list, for `async for`."""

    def __init__(self, connection: AsyncConnection, pages: Pages[T]) -> None:
        self._connection = connection
        self._pages = pages

    async def __anext__(self) -> T:
        """The next item."""
        if not await self._connection.run(self._pages.more()):
            raise StopAsyncIteration
        return self._pages.held.popleft()

    async def page(self) -> Page[T]:
        """All remaining items, up to the limit, with the cursor of the items after them."""
        items = [item async for item in self]
        return Page(items=tuple(items), next_cursor=self._pages.next_cursor)


def follow(connection: Connection, following: Following) -> Iterator[Event]:
    """The events, as they happen."""
    while not following.ended:
        try:
            with connection.lines(following.path, following.headers, silence_s=SILENCE_S) as lines:
                if next(lines, None) is None:
                    return  # an empty answer: it had ended before
                events = events_in(lines)
                while (event := _next_of(events)) is not None:
                    following.heard(event)
                    yield event
        except ServiceError as error:
            following.broke(error)
        if not following.ended:
            time.sleep(AGAIN_S)


async def follow_async(connection: AsyncConnection, following: Following) -> AsyncIterator[Event]:
    """The events, as they happen."""
    while not following.ended:
        try:
            async with connection.lines(following.path, following.headers, silence_s=SILENCE_S) as lines:
                first = await anext(lines, None)
                if first is None:
                    return  # an empty answer: it had ended before
                block: list[str] = []
                async for line in lines:  # an empty line ends an event
                    block.append(line)
                    event = _next_of(events_in(block)) if not line else None
                    if event is not None:
                        following.heard(event)
                        yield event
                    block = block if line else []
        except ServiceError as error:
            following.broke(error)
        if not following.ended:
            await asyncio.sleep(AGAIN_S)


def _next_of(events: Iterator[Event]) -> Event | None:
    """The next event; None where there are no more. Raises ServiceError for a text that is no event."""
    with promised("event"):
        return next(events, None)
