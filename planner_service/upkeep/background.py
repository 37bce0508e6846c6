"""Background: the chores of a service's process. It checks each one repeatedly, and never runs two at the same time."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from pipeplan.errors import PipeplanError
from planner_service.platform.context import Context
from planner_service.platform.rules import Rule
from planner_service.upkeep import backups, service
from planner_service.upkeep.backups import BackupPlan

LOOK_S = 10.0
"""How often a process checks whether a chore is due: an index lookup in a table of a few rows. It does so more often
where a chore is to be done more often.
"""

LOG = logging.getLogger("pipeplan.upkeep")


class Upkeep:
    """The chores of the settings: retention if there are rules, backups if there is a folder."""

    def __init__(
        self, context: Context, *, rules: Mapping[str, Rule], every_s: float, backing_up: BackupPlan | None
    ) -> None:
        self._stop = threading.Event()
        self._works: list[Callable[[], object]] = []
        self._look_s = LOOK_S
        if rules:
            self._look_s = min(self._look_s, every_s)
            self._works.append(partial(service.take_turn, context, rules, every_s, self._stop))
        if backing_up is not None:
            backups.prepare(backing_up.folder)
            self._look_s = min(self._look_s, backing_up.every_s)
            self._works.append(partial(backups.take_turn, context, backing_up))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Works until the block ends."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._stop.set()
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while self._works and not self._stop.is_set():
            for work in self._works:
                try:
                    await asyncio.to_thread(work)
                except PipeplanError as error:  # usually the database is away: its work waits
                    LOG.warning("upkeep continues later: %s", error)
            await asyncio.sleep(self._look_s)
