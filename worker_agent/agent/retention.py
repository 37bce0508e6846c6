"""Retention: the folders of ended jobs that may be removed from an agent's disk, and their removal.

    work_dir/<job id>             a job's folder; work_dir/<job id>-<fence> one attempt of a job over several nodes
    work_dir/.removed-<name>      a folder during its removal: renamed first, then deleted

A folder is removed only if the service reports that its job has succeeded. A job that has failed, was given up or
cancelled may be retried from its checkpoints; a job that the service does not know may be another service's. Their
folders are removed if the operator abandons them. A job that waits, or has a process on this node, keeps its folder.
"""

import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeplan.errors import NotFoundError, PipeplanError
from pipeplan.protocol.jobs import JobState
from worker_agent.agent.child import lives
from worker_agent.agent.limits import folder_bytes
from worker_agent.agent.settings import AgentSettings

ASIDE = ".removed-"
_FOLDER = re.compile(r"([0-9a-f]{32})(-\d+)?")
DAY_S = 86_400
INTERVAL_S = 3600.0
"""How often an agent looks whether its settings let folders go."""

_LIVE: frozenset[JobState] = frozenset({"queued", "leased"})

StateOf = Callable[[str], JobState]
"""The state of a job by its id, from the service. Raises NotFoundError if the service does not know the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds on folders of ended jobs: their age, number and bytes. None: no bound.

    `abandons`: the bounds hold for jobs, too, that ended without a result or that the service does not know.
    """

    age_s: float | None = None
    folders: int | None = None
    bytes: int | None = None
    abandons: bool = False

    @property
    def any(self) -> bool:
        return any(bound is not None for bound in (self.age_s, self.folders, self.bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFolder:
    """A folder of an ended job, its bytes on the disk, and when something was last written to it."""

    path: Path
    bytes: int
    written_s: float


def bounds_of(settings: AgentSettings) -> Bounds:
    """The bounds that an agent's settings give."""
    days = settings.prune_older_than_days
    return Bounds(
        age_s=None if days is None else days * DAY_S,
        folders=settings.prune_keep,
        bytes=settings.prune_max_bytes,
        abandons=settings.prune_abandoned,
    )


class Retention:
    """Removes folders that an agent's settings do not keep, once in INTERVAL_S: `turn` is called between jobs.

    A service that does not answer, or a folder that cannot be removed, is logged, and tried again at the next turn.
    """

    def __init__(self, settings: AgentSettings, state_of: StateOf, log: Callable[[str], None]) -> None:
        self._work_dir = settings.work_dir
        self._kept = bounds_of(settings)
        self._state_of = state_of
        self._log = log
        self._due_s = time.monotonic()

    def turn(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Removes folders if it is time; leaves the rest to the next turn if the agent is stopped."""
        if not self._kept.any or time.monotonic() < self._due_s:
            return
        try:
            finish(self._work_dir)
            going = surplus(self._work_dir, self._state_of, self._kept, time.time())
            for count, folder in enumerate(going):
                if stopped():
                    going = going[:count]
                    break
                remove([folder])
            if going:
                total_bytes = sum(folder.bytes for folder in going)
                self._log(f"removed {len(going)} folders of ended jobs ({total_bytes} bytes)")
        except (PipeplanError, OSError) as error:
            self._log(f"folders of ended jobs stay for now: {error}")
        self._due_s = time.monotonic() + INTERVAL_S


def surplus(work_dir: Path, state_of: StateOf, kept: Bounds, now_s: float) -> list[JobFolder]:
    """The folders of ended jobs to remove: all but the newest ones within the bounds.

    Raises ServiceError if the service does not answer: then no job is known to have ended.
    """
    ended = []
    for path in work_dir.glob("*"):
        named = _FOLDER.fullmatch(path.name)
        if named is None or path.is_symlink() or not path.is_dir() or lives(work_dir, named[1]):
            continue
        if _is_over(state_of, named[1], abandons=kept.abandons):
            written_s = max(file.lstat().st_mtime for file in (path, *path.rglob("*")))
            ended.append(JobFolder(path=path, bytes=folder_bytes(path), written_s=written_s))
    ended.sort(key=lambda folder: (-folder.written_s, folder.path))
    left_bytes, surplus = 0, list[JobFolder]()
    for place, folder in enumerate(ended):
        left_bytes += folder.bytes
        too_old = kept.age_s is not None and now_s - folder.written_s > kept.age_s
        too_many = kept.folders is not None and place >= kept.folders
        too_large = kept.bytes is not None and left_bytes > kept.bytes
        if too_old or too_many or too_large:
            surplus.append(folder)
    return surplus


def remove(folders: Sequence[JobFolder]) -> None:
    """Removes folders. An interrupted removal leaves a renamed folder, which no job uses; `finish` completes it."""
    for folder in folders:
        aside = folder.path.with_name(ASIDE + folder.path.name)
        shutil.rmtree(aside, ignore_errors=True)
        folder.path.rename(aside)
        shutil.rmtree(aside)


def finish(work_dir: Path) -> int:
    """Ends removals that were interrupted; returns how many there were."""
    left = [path for path in work_dir.glob(f"{ASIDE}*") if _FOLDER.fullmatch(path.name.removeprefix(ASIDE))]
    for path in left:
        shutil.rmtree(path)
    return len(left)


def _is_over(state_of: StateOf, job_id: str, *, abandons: bool) -> bool:
    try:
        state = state_of(job_id)
    except NotFoundError:
        return abandons
    return state == "succeeded" or (abandons and state not in _LIVE)
