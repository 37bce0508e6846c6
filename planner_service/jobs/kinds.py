"""Kinds: what the queue asks of each kind of job. The queue itself knows neither plans nor runs.

enqueue ──▶ check ──▶ needs ──▶ begin          in the process that is asked
complete ──▶ pack ──▶ store                    pack where large documents are read, store with the job's end
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from pipeplan.errors import InvalidInputError
from pipeplan.protocol.jobs import Job
from planner_service.agents.needs import Needs
from planner_service.platform.context import Context


def _no_check(_context: Context, _task: Any) -> None:
    """Every task that can be read can be done."""


def _nothing_beside(_connection: Connection, _job_id: str, _task: Any, _now: datetime) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind:
    """One kind of job, by the `kind` of its tasks and results.

    - `needs`: what a task asks of agents. Raises InvalidInputError where it cannot be done as asked.
    - `check`: raises InvalidInputError for a task that nobody could do; before anything is written.
    - `begin`: what is stored beside the job when it is enqueued, in the same transaction. Returns ids for its row.
    - `pack`: a result -> the form in which it is stored; a module's function, which another process can import.
    - `store`: stores a packed result in the transaction that ends the job. Returns ids for its row.
    - `by_service`: no agent does it, the service itself does; an attempt that was lost is made again without a pause.
    """

    name: str
    needs: Callable[[Connection, Any], Needs]
    check: Callable[[Context, Any], None] = _no_check
    begin: Callable[[Connection, str, Any, datetime], Mapping[str, str]] = _nothing_beside
    pack: Callable[[Any], Any] | None = None
    store: Callable[[Context, Connection, Job, Any], Mapping[str, str]] | None = None
    by_service: bool = False


_KINDS: dict[str, JobKind] = {}


def register(*kinds: JobKind) -> None:
    """Makes kinds known to this process's queue. Whoever wires the application does it, once."""
    _KINDS.update({kind.name: kind for kind in kinds})


def kind_of(name: str) -> JobKind:
    """The kind of this name. Raises LookupError for one that nobody has registered."""
    if name not in _KINDS:
        raise LookupError(f"no kind of job is registered as {name!r}")
    return _KINDS[name]


def packers() -> dict[str, Callable[[Any], Any]]:
    """By kind, what packs its results."""
    return {name: kind.pack for name, kind in _KINDS.items() if kind.pack is not None}


def store(context: Context, connection: Connection, job: Job, packed: object) -> Mapping[str, str]:
    """Stores a packed result of the job's own kind. Returns ids for the job's row."""
    kind = kind_of(job.task.kind)
    if kind.store is None:
        raise InvalidInputError("result.kind", "must be the result of a job that agents do", kind.name)
    return kind.store(context, connection, job, packed)
