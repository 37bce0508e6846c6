"""Limits: the resources that a job's processes may take, and the part of the agent's environment that they see."""

import ctypes
import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipeplan.documents.names import STRICT

_OURS = "PIPEPLAN_"
_WORDS = (
    "TOKENS?|SECRETS?|PASSWORD|PASSWD|PASS|PGPASSFILE|CREDENTIALS?|COOKIE|AUTH|"
    "APIKEY|API_KEY|ACCESS_KEY|ACCESS_KEY_ID|PRIVATE_KEY|DATABASE_URL"
)
_SECRET_NAME = re.compile(rf"(^|_)({_WORDS}|PGPASSWORD)($|_)", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
"""A user name with a password in an address."""

_PR_SET_DUMPABLE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """The resources of one job's processes; None: as much as the agent itself."""

    memory_bytes: int | None = None
    open_files: int | None = None
    processes: int | None = None
    nice: int = 0

    __pydantic_config__: ClassVar = STRICT

    def apply(self) -> None:
        """Limits this process and all that it starts. They write no core files.

        Only writable memory counts: CUDA reserves more addresses than any machine has memory.
        """
        memory = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
        wanted = (
            (memory, self.memory_bytes),
            (resource.RLIMIT_NOFILE, self.open_files),
            (resource.RLIMIT_NPROC, self.processes),
            (resource.RLIMIT_CORE, 0),
        )
        for kind, most in wanted:
            if most is not None:
                _, hard = resource.getrlimit(kind)
                least = most if hard == resource.RLIM_INFINITY else min(most, hard)
                resource.setrlimit(kind, (least, least))
        if self.nice:
            os.nice(self.nice)


def without_secrets(environment: Mapping[str, str], *, token: str | None, keep: Sequence[str] = ()) -> dict[str, str]:
    """The variables that a job sees: none of pipeplan's own, and no likely secrets but those to keep."""
    seen = {}
    for name, value in environment.items():
        looks_secret = name.startswith(_OURS) or _SECRET_NAME.search(name) or _SECRET_VALUE.search(value)
        holds_token = token and token in value
        if (name in keep or not looks_secret) and not holds_token:
            seen[name] = value
    return seen


def hide_from_jobs() -> None:
    """Keeps this process's own memory and environment, with its token, from other processes of the same user.

    It acts only on Linux: other systems do not expose this. Root can read everything.
    """
    control = getattr(ctypes.CDLL(None), "prctl", None)
    if control is not None:
        control(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def folder_bytes(folder: Path) -> int:
    """The disk space of the files in a folder; files that vanish in the meantime do not count.

    A file with several names in it counts once.
    """
    total, linked = 0, set[tuple[int, int]]()
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                found = (Path(root) / name).lstat()
            except OSError:
                continue
            if found.st_nlink == 1 or (found.st_dev, found.st_ino) not in linked:
                total += found.st_blocks * 512
            linked.add((found.st_dev, found.st_ino))
    return total
