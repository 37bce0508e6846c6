"""Cores: how much of the time in which a rank waited for a core was due to other programs, and not to other ranks.

A computing rank that is off the processor waits while its core runs something else. On a node with a core for every
rank, that is another program. If ranks share cores, it may be another rank of the run. For a single moment this cannot
be known, but it can be estimated for a whole run, because a core serves waiting processes in turn. Other programs' part
is therefore their share of the processor time on the cores, without the rank's own:

    other programs' processor time / (other programs' processor time + other ranks' processor time)
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipeplan.documents.names import STRICT
from worker_agent.engine.clocks import here

_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)
"""The busy time in a core's line of /proc/stat: user, nice, system, irq, softirq, steal. User includes the guests'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoresUsed:
    """A rank's node, and how much the cores that the rank may use were used while it worked.

    `busy_s`: the processor time of all programs on these cores; None if the system does not report it.
    `processor_s`: the rank's own.
    """

    node: str
    cores: tuple[int, ...]
    busy_s: float | None
    processor_s: float

    __pydantic_config__: ClassVar = STRICT


def watched_cores() -> Callable[[], CoresUsed]:
    """Gives the use of the cores since this call."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    before_s, own_before_s = busy_s(cores), time.process_time()

    def used() -> CoresUsed:
        now_s = busy_s(cores)
        busy = None if now_s is None or before_s is None else now_s - before_s
        return CoresUsed(node=here(), cores=cores, busy_s=busy, processor_s=time.process_time() - own_before_s)

    return used


def busy_s(cores: Sequence[int]) -> float | None:
    """The processor time of all programs on these cores since the system's start; None if it reports none."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    names = {f"cpu{core}" for core in cores}
    rows = [line.split() for line in lines if line.split(maxsplit=1)[0] in names]
    ticks = sum(int(row[1 + column]) for row in rows for column in _BUSY_COLUMNS)
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


def shares_of_others(used: Sequence[CoresUsed | None]) -> list[float | None]:
    """By rank: other programs' share of the time in which the rank waited for a processor.

    It is 1 where every rank has a core of its own. None where ranks share cores and the system does not report their
    use.
    """
    return [None if each is None else _share_of_others(each, [one for one in used if one is not None]) for each in used]


def _share_of_others(own: CoresUsed, every: Sequence[CoresUsed]) -> float | None:
    beside = [one for one in every if one.node == own.node and set(one.cores) & set(own.cores)]
    if len(beside) <= len(own.cores):
        return 1.0
    if own.busy_s is None:
        return None
    ranks_s = sum(one.processor_s for one in beside)
    others_s = max(own.busy_s - ranks_s, 0.0)
    waited_for_s = others_s + ranks_s - own.processor_s
    return others_s / waited_for_s if waited_for_s > 0 else 1.0
