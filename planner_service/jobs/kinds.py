"""Kinds: the interface of each kind of job to the queue. The queue itself knows neither plans nor runs.

enqueue:   check ──▶ needs ──▶ begin
complete:  pack ──▶ store ──▶ then    `pack` in a parser's process where the result is large (`platform.parsing`)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from pipeplan.errors import InvalidInputError
from pipeplan.protocol.jobs import Job, Task
from planner_service.agents.needs import Needs
from planner_service.platform.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind:
    """One kind of job, by the `kind` of its tasks and results. A step that is None is skipped.

    - `check`: raises InvalidInputError for a task that no agent could do, before anything is written.
    - `needs`: a task's requirements of agents. Raises InvalidInputError if they contradict the task.
    - `begin`: stores a new job's rows under the job's id, in the transaction that enqueues it. Returns columns of the
      job's row, as `{"run_id": ...}`.
    - `pack`: converts a result to its stored form; a module's function, which another process can import.
    - `store`: stores a packed result in the transaction that ends the job. Returns columns of the job's row. A kind
      without it accepts no results from agents.
    - `then`: the job's next task, from the job and the columns of its result; the job is queued again.
    - `by_service`: the service does the job itself, without an agent. It repeats a lost attempt without a pause.
    """

    name: str
    check: Callable[[Context, Any], None] | None = None
    needs: Callable[[Connection, Any], Needs] | None = None
    begin: Callable[[Connection, str, Any, datetime], Mapping[str, str]] | None = None
    pack: Callable[[Any], Any] | None = None
    store: Callable[[Context, Connection, Job, Any], Mapping[str, str]] | None = None
    then: Callable[[Job, Mapping[str, str]], Task] | None = None
    by_service: bool = False


_KINDS: dict[str, JobKind] = {"unreadable": JobKind(name="unreadable")}
"""The kinds by name. A job of another release, which this one cannot read, has a kind that does nothing."""


def register(*kinds: JobKind) -> None:
    """Registers kinds with this process's queue.

    `app` does it. Raises ValueError for a second kind of the same name.
    """
    for kind in kinds:
        if _KINDS.setdefault(kind.name, kind) is not kind:
            raise ValueError(f"a kind of job is registered as {kind.name!r} already")


def kind_of(name: str) -> JobKind:
    """The kind of this name. Raises LookupError for one that is not registered."""
    if name not in _KINDS:
        raise LookupError(f"no kind of job is registered as {name!r}")
    return _KINDS[name]


def packers() -> dict[str, Callable[[Any], Any]]:
    return {name: kind.pack for name, kind in _KINDS.items() if kind.pack is not None}


def store(context: Context, connection: Connection, job: Job, packed: object) -> Mapping[str, str]:
    """Stores a packed result, which must be of the job's own kind. Returns columns of the job's row."""
    kind = kind_of(job.task.kind)
    if kind.store is None:
        raise InvalidInputError("result.kind", "must be the result of a job that agents do", kind.name)
    return kind.store(context, connection, job, packed)
