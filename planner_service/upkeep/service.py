"""Retention: removes unneeded rows that its rules cover, in short writes with pauses for other writers.

Some rows always stay: jobs that have not ended; plans of kept runs, and targets of aliases, now or since then; the
documents of kept plans and of waiting jobs; agents at work; the newest event of each job and run; valid tokens; the
history of aliases. A lock needs no rows: it contains its plan and documents.
"""

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta

from sqlalchemy import Connection

from pipeplan.errors import ConflictError, PipeplanError, UnavailableError
from pipeplan.protocol.audit import Outcome
from planner_service.platform import trail
from planner_service.platform.context import Context
from planner_service.platform.rules import KEPT, Rule
from planner_service.upkeep import chores
from planner_service.upkeep import store as storage
from planner_service.upkeep.chores import ChoreClaim
from planner_service.upkeep.store import NOUNS, OldRows, Retained

CHORE = "retention"

WRITE_S = 0.05
"""How long one write should take, because the service's other writers wait for it."""

FIRST_ROWS, MOST_ROWS = 20, 500
"""The rows of the first write, and of the largest one: short writes are followed by larger ones."""

CLOCKS_DIFFER = timedelta(minutes=5)
"""By how much the clocks of services on one database may differ."""

OVERDUE_S = 86_400.0
"""A turn that was due longer ago than this is put off once: a clock that is ahead would make everything old."""

ATTEMPTS = 20
"""How often a write is tried if its rows are used again in the meantime."""

TURN_S = 20.0
"""How long a turn may take; the next one continues."""

NEXT_TURN_S = 60.0
"""After which time a turn that was not completed, or failed, continues."""

LOG = logging.getLogger("pipeplan.upkeep")


class _StoppedError(PipeplanError):
    """The turn is over, or another service has taken it: the remaining rows stay."""


class _TriedError(PipeplanError):
    """The removal was only a trial."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """One pass over the database: its limits, the number of removed rows, and its end.

    `claim` is None for a command, which needs no claim. A `trial` is a transaction that will be rolled back.
    """

    context: Context
    claim: ChoreClaim | None = None
    trial: Connection | None = None
    ends_s: float | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    rows: int = FIRST_ROWS

    def reading(self) -> AbstractContextManager[Connection]:
        return nullcontext(self.trial) if self.trial is not None else self.context.database.read()

    def writing(self) -> AbstractContextManager[Connection]:
        return nullcontext(self.trial) if self.trial is not None else self.context.database.write()

    def require_time(self) -> None:
        """Raises _StoppedError once the turn is over."""
        if self.stop.is_set() or (self.ends_s is not None and time.monotonic() > self.ends_s):
            raise _StoppedError("the turn is over")

    def require_claim(self, connection: Connection) -> None:
        """Raises _StoppedError if another service has taken over."""
        if self.claim is not None and not chores.is_held(connection, self.claim, self.context.now()):
            raise _StoppedError("another service has taken over")

    def rest(self, took_s: float) -> None:
        """Gives other writers as much time as the last write took, and sets the size of the next write."""
        self.rows = max(1, self.rows // 2) if took_s > WRITE_S else min(MOST_ROWS, 2 * self.rows)
        if self.trial is None:
            self.stop.wait(took_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """How many rows of each noun were removed, and whether the pass was completed."""

    removed: Mapping[str, int]
    done: bool


def prune(context: Context, rules: Mapping[str, Rule], *, dry_run: bool = False) -> dict[str, int]:
    """Removes rows by the rules; returns their number by noun. With `dry_run` all of it is rolled back."""
    removed: dict[str, int] = {}
    if not dry_run:
        asked = ", ".join(f"{noun} {rule}" for noun, rule in rules.items())
        _note(context, "begun", asked)
        sweep(Turn(context=context), rules, removed)
        _note(context, "done", ", ".join(f"{count} {noun}" for noun, count in removed.items()))
        return removed
    with suppress(_TriedError), context.database.write() as connection:
        sweep(Turn(context=context, trial=connection), rules, removed)
        raise _TriedError("only tried")  # this undoes it; others may write in the same transaction
    return removed


def _note(context: Context, outcome: Outcome, detail: str) -> None:
    """Notes a command that removes in many transactions: before the first of them, and after the last."""
    with context.database.write() as connection:
        trail.record(connection, "database.prune", None, context.now(), outcome=outcome, detail=detail)


def take_turn(context: Context, rules: Mapping[str, Rule], every_s: float, stop: threading.Event) -> Swept | None:
    """Removes rows by the rules if a pass is due and no other service has claimed it; otherwise returns None.

    After a clock was set forward, or the service was stopped for days, it removes nothing before one more interval has
    passed: an operator may correct the clock meanwhile.
    """
    claim = chores.claim(context, CHORE, every_s)
    if claim is None:
        return None
    if claim.overdue_s > OVERDUE_S:
        chores.end(context, claim, context.now() + timedelta(seconds=every_s))
        context.metrics.count_chore(CHORE, "stopped")
        late = f"retention was due {claim.overdue_s / 86_400:.1f} days ago"
        LOG.warning("%s and waits for %g s: was the service stopped, or is its clock ahead?", late, every_s)
        return Swept(removed={}, done=False)
    removed: dict[str, int] = {}
    done = False
    turn = Turn(context=context, claim=claim, ends_s=time.monotonic() + TURN_S, stop=stop)
    try:
        sweep(turn, rules, removed)
        done = True
    except _StoppedError as error:
        LOG.info("retention continues later: %s", error)
    finally:
        for noun, count in removed.items():
            context.metrics.removed.labels(noun).inc(count)
        wait_s = every_s if done else min(every_s, NEXT_TURN_S)
        chores.end(context, claim, context.now() + timedelta(seconds=wait_s))
    context.metrics.count_chore(CHORE, "done" if done else "stopped")
    went = {noun: count for noun, count in removed.items() if count}
    if went:
        LOG.info("retention removed %s", ", ".join(f"{count} {noun}" for noun, count in went.items()))
    return Swept(removed=removed, done=done)


def sweep(turn: Turn, rules: Mapping[str, Rule], removed: dict[str, int]) -> None:
    """Goes through the nouns in order, and counts removed rows in `removed`."""
    for noun in KEPT:
        if noun in rules:
            removed[noun] = 0
            _sweep_noun(turn, noun, rules[noun], removed)


def _sweep_noun(turn: Turn, noun: str, rule: Rule, removed: dict[str, int]) -> None:
    kept, context = NOUNS[noun], turn.context
    now = context.now()
    before = None if rule.older_than_s is None else now - timedelta(seconds=rule.older_than_s)
    with turn.reading() as connection:
        up_to = None if rule.most is None else storage.last_to_go(connection, kept, rule.most, now)
    bounds = OldRows(now=now, before=before, up_to=up_to)
    if before is None and up_to is None:
        return
    named: _Named | None = None
    following: int | None = 0
    while following is not None:
        turn.require_time()
        with turn.reading() as connection:
            places, following = storage.look(connection, kept, bounds, following)
            if places and kept.named is not None and named is None:
                named = _Named(kept, connection, context)
        while places:
            turn.require_time()
            some, places = places[: turn.rows], places[turn.rows :]
            removed[noun] += _remove(turn, kept, bounds, some, named)


class _Named:
    """The ids that only texts name, not references in the database: all of them once, then the new ones."""

    def __init__(self, kept: Retained, connection: Connection, context: Context) -> None:
        assert kept.named is not None
        self._find = kept.named
        self._changed = context.now() - CLOCKS_DIFFER
        self._after = storage.newest_plan(connection)
        self._known = self._find(connection, 0, None)

    def present(self, connection: Connection) -> set[str]:
        return self._known | self._find(connection, self._after, self._changed)


def _remove(turn: Turn, kept: Retained, bounds: OldRows, places: tuple[int, ...], named: _Named | None) -> int:
    """Removes those rows in one write."""
    for _ in range(ATTEMPTS):
        try:
            with turn.writing() as connection:
                start_s = time.monotonic()
                turn.require_claim(connection)
                spared = set() if named is None else named.present(connection)
                count = storage.remove(connection, kept, bounds, places, spared)
        except ConflictError:  # used again between the look and the removal: look again
            continue
        turn.rest(time.monotonic() - start_s)
        return count
    raise UnavailableError("rows to be removed are used again and again; try again when the service is less busy")
