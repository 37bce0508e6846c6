"""Backups on a schedule: a SQLite database is copied into a folder, which keeps a number of the newest copies.

PostgreSQL has its own tools for this, which do not copy rows through Python. The setting is refused there.
"""

import logging
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pipeplan.errors import PipeplanError, ServiceError
from planner_service.platform.context import Context
from planner_service.platform.migrations import PARTIAL, backup
from planner_service.upkeep import chores

CHORE = "backup"

HELD_S, RENEWED_S = 30.0, 10.0
"""How long after its last sign of life a service that backs up is taken for dead, and how often it gives one."""

AGAIN_S = 600.0
"""After which time a failed backup is tried again."""

NAME = re.compile(r"pipeplan-[0-9]{8}T[0-9]{6}Z\.sqlite3")
LOG = logging.getLogger("pipeplan.upkeep")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupPlan:
    """The folder of backups, how often one is made, and how many are kept."""

    folder: Path
    every_s: float
    kept: int


def prepare(folder: Path) -> None:
    """Makes the folder, for its owner only. Raises ServiceError if that fails."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ServiceError(f"the folder of backups {folder} cannot be made: {error.strerror}") from error


def take_turn(context: Context, plan: BackupPlan) -> Path | None:
    """Makes a backup if it is due and no other service makes it. Returns its file."""
    claim = chores.claim(context, CHORE, plan.every_s, HELD_S)
    if claim is None:
        return None
    next_s = min(AGAIN_S, plan.every_s)
    try:
        with chores.renewed(context, claim, RENEWED_S):
            file = make(context, plan)
        next_s = plan.every_s
    except (OSError, PipeplanError) as error:
        context.metrics.count_chore(CHORE, "failed")
        LOG.error("a backup into %s failed: %s", plan.folder, error)
        return None
    finally:
        chores.end(context, claim, context.now() + timedelta(seconds=next_s))
    context.metrics.count_chore(CHORE, "done")
    LOG.info("backed up to %s (%d bytes)", file, file.stat().st_size)
    return file


def name_at(moment: datetime) -> str:
    return f"pipeplan-{moment.astimezone(UTC):%Y%m%dT%H%M%SZ}.sqlite3"


def make(context: Context, plan: BackupPlan) -> Path:
    """Writes a backup, which is verified before it gets its name, and removes those beyond the newest ones.

    A backup is removed only after a newer one is whole. One that is named after a later time was made while the clock
    was ahead, and counts as the oldest.
    """
    prepare(plan.folder)
    for left in plan.folder.glob(f".pipeplan-*.sqlite3{PARTIAL}*"):  # left by a process that died
        left.unlink(missing_ok=True)
    file = plan.folder / name_at(context.now())
    backup(context.database, file)
    names = [path.name for path in plan.folder.iterdir() if NAME.fullmatch(path.name)]
    for name in sorted(names, key=lambda name: (name <= file.name, name))[: -plan.kept]:
        (plan.folder / name).unlink(missing_ok=True)
    return file
