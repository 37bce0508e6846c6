"""Feed: passes events on to many followers as they come, without a thread or a connection for each.

A single query every LOOK_S tells which of the followed subjects have new events; these are then read once for all of
their followers. It therefore does not matter which process of the service wrote an event. A follower costs nothing
while nothing happens, and many followers of one run cost as much as one.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress

from pipeplan.errors import ServiceError, UnavailableError
from pipeplan.protocol.runs import Event
from planner_service.events import service as events
from planner_service.events.store import Subject
from planner_service.platform.context import Context

LOOK_S = 0.2
RETRY_AFTER_S = 5.0


class _Followed:
    """A subject with followers, and its latest events: a page of them, in their order and without a gap.

    Each follower reads earlier ones itself.
    """

    def __init__(self, context: Context, subject: Subject, after: int) -> None:
        self.followers: set[asyncio.Event] = set()
        self._context = context
        self._subject = subject
        self._events: deque[Event] = deque()
        self._before = after  # the number before the first kept event
        self._last = after
        self._reading = asyncio.Lock()
        self._hints = 1
        self._answered = 0  # how many hints had come when the events were last read

    def hint(self) -> None:
        """The table may have more."""
        self._hints += 1
        for news in self.followers:
            news.set()

    async def after(self, number: int) -> list[Event]:
        """The next page of events after a number. Raises ServiceError."""
        async with self._reading:
            while number >= self._before and self._answered != self._hints:
                hints = self._hints
                page = await asyncio.to_thread(events.after, self._context, self._subject, self._last)
                if len(page) < events.PAGE:
                    self._answered = hints
                self._events += page
                self._last = page[-1].number if page else self._last
                while len(self._events) > events.PAGE:
                    self._before = self._events.popleft().number
            if number >= self._before:
                return [event for event in self._events if event.number > number]
        return await asyncio.to_thread(events.after, self._context, self._subject, number)


class Feed:
    """The events of all followed subjects, for a limited number of followers at a time."""

    def __init__(self, context: Context, *, followers: int) -> None:
        self._context = context
        self._most = followers
        self._followed: dict[Subject, _Followed] = {}
        self._newest: dict[Subject, int] = {}
        self._watch: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def followers(self) -> int:
        return sum(len(followed.followers) for followed in self._followed.values())

    def require_room(self) -> None:
        """Raises UnavailableError if there are too many, or the service is stopping."""
        if self._closed:
            raise UnavailableError("the service is stopping", RETRY_AFTER_S)
        if self.followers >= self._most:
            raise UnavailableError(f"{self._most} streams of events are followed already", RETRY_AFTER_S)

    async def follow(
        self, subject: Subject, after: int, *, silence_s: float, longest_s: float
    ) -> AsyncGenerator[Event | None, None]:
        """Yields the events after a number, and None whenever none came for `silence_s`. It ends with the subject's
        last event.

        It also ends after `longest_s`, or when the service stops: a follower reconnects with the last number that it
        has.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + longest_s
        with self._following(subject, after) as (followed, news):
            while not self._closed and loop.time() < until_s:
                news.clear()
                page: list[Event] = []
                try:
                    page = await followed.after(after)
                except ServiceError:  # while the database is away there is nothing to report
                    self._newest.pop(subject, None)
                for event in page:
                    yield event
                    after = event.number
                if page and page[-1].ends:
                    return
                if len(page) == events.PAGE:
                    continue  # more is waiting in the table
                try:
                    async with asyncio.timeout(silence_s):
                        await news.wait()
                except TimeoutError:
                    yield None

    async def ends_within(self, subject: Subject, duration_s: float) -> bool:
        """Waits for the subject's last event; whether it came in time."""
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(duration_s),
                aclosing(self.follow(subject, 0, silence_s=duration_s, longest_s=duration_s)) as following,
            ):
                async for event in following:
                    if event is not None and event.ends:
                        return True
        return False

    def close(self) -> None:
        """Ends all streams. Any thread may call it."""
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def hint(self, subject: Subject) -> None:
        """Wakes the subject's followers: this process has written an event, so they need not wait for the next look."""
        if subject in self._followed:
            self._followed[subject].hint()

    def _wake(self) -> None:
        """Wakes all followers."""
        for followed in self._followed.values():
            followed.hint()

    @contextmanager
    def _following(self, subject: Subject, after: int) -> Iterator[tuple[_Followed, asyncio.Event]]:
        """Adds a follower, and returns the event that wakes it. The table is read only while there are followers."""
        news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        followed = self._followed.setdefault(subject, _Followed(self._context, subject, after))
        followed.followers.add(news)
        if self._watch is None:
            self._watch = asyncio.create_task(self._look())
        try:
            yield followed, news
        finally:
            followed.followers.discard(news)
            if not followed.followers:
                del self._followed[subject]
                self._newest.pop(subject, None)
            if not self._followed and self._watch is not None:
                self._watch.cancel()
                self._watch = None

    async def _look(self) -> None:
        """Polls the table, and wakes the followers of subjects with new events."""
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(ServiceError):
                newest = await asyncio.to_thread(events.newest, self._context, tuple(self._followed))
                for subject, number in newest.items():
                    if subject in self._followed and self._newest.get(subject) != number:
                        self._newest[subject] = number
                        self.hint(subject)
