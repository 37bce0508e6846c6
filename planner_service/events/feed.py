"""Feed: follows events as they come, for many followers, without a thread or a connection for each.

A single query every LOOK_S tells which of the followed subjects have new events; their followers then read them. So it
does not matter which process of the service wrote an event, and a follower costs nothing while nothing happens.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress

from pipeplan.errors import ServiceError, UnavailableError
from pipeplan.protocol.runs import Event
from planner_service.events import service as events
from planner_service.events.store import Subject
from planner_service.platform.context import Context

LOOK_S = 0.2
RETRY_AFTER_S = 5.0


class Feed:
    """The events of the subjects that are followed, for at most so many followers at a time."""

    def __init__(self, context: Context, *, followers: int) -> None:
        self._context = context
        self._most = followers
        self._followers: defaultdict[Subject, set[asyncio.Event]] = defaultdict(set)
        self._newest: dict[Subject, int] = {}
        self._watch: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def followers(self) -> int:
        """How many there are."""
        return sum(len(of_subject) for of_subject in self._followers.values())

    def require_room(self) -> None:
        """Raises UnavailableError where there are too many, or the service is stopping."""
        if self._closed:
            raise UnavailableError("the service is stopping", RETRY_AFTER_S)
        if self.followers >= self._most:
            raise UnavailableError(f"{self._most} streams of events are followed already", RETRY_AFTER_S)

    async def follow(
        self, subject: Subject, after: int, *, silence_s: float, longest_s: float
    ) -> AsyncGenerator[Event | None, None]:
        """The events after a number, and None whenever none came for `silence_s`; it ends with the subject's last one.

        It also ends after `longest_s`, or when the service stops: a follower comes back with the last number it has.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + longest_s
        with self._following(subject) as news:
            while not self._closed and loop.time() < until_s:
                news.clear()
                page: list[Event] = []
                with suppress(ServiceError):  # while the database is away there is nothing to report
                    page = await asyncio.to_thread(events.after, self._context, subject, after)
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
        """Wakes the subject's followers: this process has written an event, which need not wait for the next look."""
        for news in self._followers.get(subject, ()):
            news.set()

    def _wake(self) -> None:
        """Wakes all followers."""
        for of_subject in self._followers.values():
            for news in of_subject:
                news.set()

    @contextmanager
    def _following(self, subject: Subject) -> Iterator[asyncio.Event]:
        """Counts a follower in, and gives what wakes it. The table is looked at only while there are followers."""
        news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._followers[subject].add(news)
        if self._watch is None:
            self._watch = asyncio.create_task(self._look())
        try:
            yield news
        finally:
            self._followers[subject].discard(news)
            if not self._followers[subject]:
                del self._followers[subject]
                self._newest.pop(subject, None)
            if not self._followers and self._watch is not None:
                self._watch.cancel()
                self._watch = None

    async def _look(self) -> None:
        """Looks at the table again and again, and wakes the followers of what has new events."""
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(ServiceError):
                newest = await asyncio.to_thread(events.newest, self._context, tuple(self._followers))
                for subject, number in newest.items():
                    if subject in self._followers and self._newest.get(subject) != number:
                        self._newest[subject] = number
                        self.hint(subject)
