"""Jobs: enqueued by any caller, leased by agents, ended by the holder of the lease.

    queued ──lease──▶ leased ──complete──▶ succeeded
      ▲                 │ ├────fail──────▶ failed
      ├──lease expires──┤ └─(last attempt)▶ dead         cancel: queued or leased ──▶ cancelled
      ├──goes on────────┤
      └──handed back────┘                                retry:  failed, dead or cancelled ──▶ queued

After a lease has expired, its owner may still renew it or report until another agent has taken the job: finished work
is not thrown away. Every lease has its own token, and only the job's latest one is valid. Every lease also has a
number, the job's fence (`leases` lists its comparisons). A job for several nodes has a lease and a token for each; they
end together (`gangs`). A job may continue as another task once one is done: an estimate as its plan.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from sqlalchemy import Connection

from pipeplan.errors import ConflictError, LeaseLostError, ServiceError, require
from pipeplan.protocol.jobs import (
    Completion,
    Failure,
    Heartbeat,
    HeartbeatAnswer,
    Job,
    JobQuery,
    JobState,
    Lease,
    LeaseRequest,
    PartResult,
    Release,
    Task,
    UnreadableTask,
)
from pipeplan.protocol.listing import Page
from pipeplan.protocol.tokens import LOCAL, Identity
from planner_service.agents import needs
from planner_service.agents import service as agents
from planner_service.agents import store as known_agents
from planner_service.agents.needs import Needs
from planner_service.events import service as events
from planner_service.jobs import choice, gangs, kinds, leases, results
from planner_service.jobs import store as storage
from planner_service.jobs.gangs import Hold
from planner_service.jobs.kinds import kind_of
from planner_service.jobs.results import PackedReport
from planner_service.platform import trail
from planner_service.platform.context import Context, found
from planner_service.platform.listing import Cut

CHOICES = 5
"""How often the choice is repeated when others have taken the chosen jobs."""

FIRST_PAUSE = 1 / 3
LONGEST_PAUSE_S = 600.0
"""The pause between an attempt's last sign of life and the next attempt: the first one as a share of a lease's length,
and the longest one. It doubles each time.
"""


def enqueue(context: Context, task: Task, *, asked_by: str | None = None) -> Job:
    """Appends a job. Raises InvalidInputError if its kind refuses it, for example because its plan is not stored."""
    kind = kind_of(task.kind)
    if kind.check is not None:
        kind.check(context, task)
    now = context.now()
    with context.database.write() as connection:
        job_id = secrets.token_hex(16)
        asked = Needs() if kind.needs is None else kind.needs(connection, task)
        enough = not asked.agents or len(asked.agents) >= asked.nodes
        require(enough, "agents", f"must name at least {asked.nodes} agents, as many as nodes, or none", asked.agents)
        storage.add(connection, job_id=job_id, task=task, now=now, needs=needs.stored(asked), asked_by=asked_by)
        if kind.begin is not None:
            storage.name_beside(connection, job_id, kind.begin(connection, job_id, task, now))
        trail.record(connection, "job.enqueue", job_id, now)
        return _told(connection, job_id, now)


def get(context: Context, job_id: str) -> Job:
    """The job; for a waiting one with the reason, if known. Raises NotFoundError."""
    with context.database.read() as connection:
        job = found("job", job_id, storage.get(connection, job_id))
        if job.state != "queued" or kind_of(job.task.kind).by_service:
            return job
        asked = needs.read(storage.needs_of(connection, job_id) or "{}")
        if asked is None or isinstance(job.task, UnreadableTask):
            return job.model_copy(update={"waiting_for": "another release stored it, and only that can give it away"})
        reason = needs.why_waiting(asked, agents.alive(context, connection, context.now()))
    return job.model_copy(update={"waiting_for": reason})


def newest(context: Context, cut: Cut, states: tuple[JobState, ...] = ()) -> Page[Job]:
    """A page of jobs, newest first."""
    with context.database.read() as connection:
        return storage.page(connection, cut, states)


def page(context: Context, query: JobQuery) -> Page[Job]:
    """The jobs that the query asks for."""
    with context.database.read() as connection:
        return storage.asked_for(connection, query)


def lease(context: Context, request: LeaseRequest, *, by: Identity = LOCAL) -> Lease | None:
    """Gives the agent the oldest job that it can do, or None.

    Raises ForbiddenError if the agent's name belongs to another token.

    The choice is made before the writer's turn. If others have taken all chosen jobs in the meantime, it is repeated.
    """
    now = context.now()
    with _noticing(context):
        for round_ in range(CHOICES):
            with context.database.read() as connection:
                agents.require_own(connection, request.agent, by, now)
                late = round_ == 0 and _any_late(context, connection, now)
                chosen = None if late else choice.look(context, connection, request, now)
            if chosen is None:
                with context.database.write() as connection:
                    _settle(context, connection, now)
                continue
            if chosen.empty:  # usually a request for work finds none: it only reads
                return None
            with context.database.write() as connection:
                given = leases.give(context, connection, request, chosen, now)
                if given is not None:
                    trail.record(connection, "job.lease", given.job.id, now, agent=request.agent)
            if given is not None or not chosen.places:
                return given
    return None


def heartbeat(context: Context, job_id: str, beat: Heartbeat) -> HeartbeatAnswer:
    """Renews the lease. Raises LeaseLostError if it is no longer this owner's."""
    now = context.now()
    with _noticing(context), context.database.write() as connection:
        hold = _held(context, connection, job_id, beat.token, now)
        if hold.agent is not None:
            known_agents.seen(connection, hold.agent, now)
        if hold.job.state == "cancelled":
            return HeartbeatAnswer(expires_in_s=0.0, cancelled=True)
        _require_running(hold)
        now = context.now()  # the lease is whole, however long this waited for the database
        stop = gangs.renew(context, connection, hold, now) if hold.member else None
        expires_at = now + timedelta(seconds=context.lease_s)
        if hold.member:
            expires_at = gangs.expires_at(connection, hold.job) or expires_at
        job = storage.extend(connection, job_id, beat.progress, expires_at, now)
        if hold.job.state == "queued":
            events.record_job(connection, job, now)
        elif beat.progress not in (None, hold.job.progress):
            events.record_job(connection, job, now, "progress")
    return HeartbeatAnswer(expires_in_s=context.lease_s, cancelled=False, stop=stop)


def complete(context: Context, job_id: str, completion: Completion) -> Job:
    """Ends the job and stores its result, both or neither. A repetition of an accepted report is accepted again."""
    return take(context, job_id, results.report_of(kinds.packers(), completion))


def take(context: Context, job_id: str, report: PackedReport) -> Job:
    """`complete` for a completion that is packed already."""
    now = context.now()
    with _noticing(context), context.database.write() as connection:
        known = storage.report_taken(connection, report.report_id)
        if known == job_id:  # a job that continues as another task no longer has the token
            return found("job", job_id, storage.get(connection, job_id))
        hold = _held(context, connection, job_id, report.token, now)
        if _is_repetition(connection, hold, report.report_id):
            return hold.job
        if hold.job.state == "succeeded" and report.result_id == hold.result_id:
            return hold.job

        is_part = isinstance(report.kept, PartResult)
        if is_part:
            has_part = hold.member is not None and hold.member.node_rank > 0
            require(has_part, "result.kind", "must be the job's result", "part")
            if hold.job.state != "succeeded":  # node rank 0 may have ended the job before this part ends
                _require_running(hold)
        else:
            _require_running(hold)
            if isinstance(hold.job.task, UnreadableTask):
                raise ConflictError(f"job {job_id} takes no result here: {hold.job.task.reason}")
            results.require_whole(hold, report.kind)
            beside = kinds.store(context, connection, hold.job, report.kept)
            then = kind_of(hold.job.task.kind).then
            if then is None:
                storage.succeed(connection, job_id, result_id=report.result_id, beside=beside, now=now)
            else:
                storage.go_on(connection, job_id, task=then(hold.job, beside), beside=beside, now=now)
        gangs.done(connection, hold, now)
        storage.take_report(connection, report.report_id, job_id, now)
        trail.record(connection, "job.complete", job_id, now, agent=hold.agent)
        return hold.job if is_part else _told(connection, job_id, now)


def fail(context: Context, job_id: str, failure: Failure) -> Job:
    """Ends the job, or this attempt, with its owner's error. A repetition of an accepted report is accepted again."""
    now = context.now()
    with _noticing(context), context.database.write() as connection:
        hold = _held(context, connection, job_id, failure.token, now)
        if _is_repetition(connection, hold, failure.report_id):
            return hold.job
        if hold.job.state == "failed" and hold.job.error == failure.error:
            return hold.job
        _require_running(hold)
        storage.take_report(connection, failure.report_id, job_id, now)
        trail.record(connection, "job.fail", job_id, now, agent=hold.agent)
        if not failure.retry:
            storage.end(connection, job_id, state="failed", error=failure.error, now=now)
        elif not gangs.lost(connection, hold, failure.error, now):
            return hold.job  # others still work on it, and may know the cause
        else:
            _again(context, connection, hold.job, failure.error, now, since=now)
        return _told(connection, job_id, now)


def conclude(context: Context, job_id: str, token: str, end: Callable[[Connection, Job], None]) -> Job:
    """Ends a job that the service does itself: `end` stores its outcome in the same transaction."""
    now = context.now()
    with _noticing(context), context.database.write() as connection:
        hold = _held(context, connection, job_id, token, now)
        _require_running(hold)
        end(connection, hold.job)
        return _told(connection, job_id, now)


def release(context: Context, job_id: str, handed_back: Release) -> Job:
    """Puts back a job that its owner cannot finish. A repetition of an accepted report is accepted again."""
    now = context.now()
    with _noticing(context), context.database.write() as connection:
        known = storage.report_taken(connection, handed_back.report_id)
        if known == job_id:  # its token went with the job
            return found("job", job_id, storage.get(connection, job_id))
        hold = _held(context, connection, job_id, handed_back.token, now)
        _require_running(hold)
        storage.take_report(connection, handed_back.report_id, job_id, now)
        storage.hand_back(connection, job_id, now)
        trail.record(connection, "job.release", job_id, now, agent=hold.agent)
        return _told(connection, job_id, now)


def cancel(context: Context, job_id: str) -> Job:
    """Cancels a job that has not ended. Its owner learns of it with the next heartbeat; its reports are no longer
    accepted.
    """
    now = context.now()
    with context.database.write() as connection:
        _settle(context, connection, now)
        job = found("job", job_id, storage.claim(connection, job_id)).job
        if job.state == "cancelled":
            return job
        if job.state not in ("queued", "leased"):
            ended = "been given up" if job.state == "dead" else job.state
            raise ConflictError(f"job {job_id} has {ended}: it cannot be cancelled any more")
        storage.end(connection, job_id, state="cancelled", error="cancelled on request", now=now)
        trail.record(connection, "job.cancel", job_id, now)
        return _told(connection, job_id, now)


def retry(context: Context, job_id: str) -> Job:
    """Puts back a job that has failed, died or been cancelled, with all its attempts; a running one stays as it is."""
    now = context.now()
    with context.database.write() as connection:
        _settle(context, connection, now)
        job = found("job", job_id, storage.claim(connection, job_id)).job
        if job.state in ("queued", "leased"):
            return job
        if job.state == "succeeded":
            raise ConflictError(f"job {job_id} has succeeded: there is nothing to retry")
        storage.retry(connection, job_id, now)
        trail.record(connection, "job.retry", job_id, now)
        return _told(connection, job_id, now)


def settle(context: Context) -> None:
    """Handles expired leases; writes only if there are any.

    Requests for work do it, and every process of the service once a second. Requests that only read never do.
    """
    now = context.now()
    with _noticing(context):
        with context.database.read() as connection:
            late = _any_late(context, connection, now)
        if context.absence.set_back:
            _bring_back(context, now)
        if late:
            with context.database.write() as connection:
                _settle(context, connection, now)


def _bring_back(context: Context, now: datetime) -> None:
    """Makes no lease, pause or sign of life lie further ahead than it can: the clock was set back since.

    Otherwise the lease of an agent that is dead would last until the clock reaches that time again. Those that live
    renew theirs in the grace after the change.
    """
    lease_ends, pause_ends = now + timedelta(seconds=context.lease_s), now + timedelta(seconds=LONGEST_PAUSE_S)
    with context.database.write() as connection:
        storage.bring_back(connection, lease_ends, pause_ends)
        gangs.bring_back(connection, lease_ends)
    with context.database.write() as connection:
        known_agents.bring_back(connection, now)
    context.absence.set_back = False


def _any_late(context: Context, connection: Connection, now: datetime) -> bool:
    return not _in_grace(context, now) and storage.any_expired(connection, now)


def _in_grace(context: Context, now: datetime) -> bool:
    """Whether no lease may expire now, because the service was away."""
    context.absence.notice(now, time.monotonic(), context.lease_s)
    return context.absence.lasts(now)


def _settle(context: Context, connection: Connection, now: datetime) -> None:
    if _in_grace(context, now):
        return
    for job in storage.expired(connection, now):
        context.metrics.lease_expiries.labels(job.task.kind).inc()
        late = gangs.late(connection, job, now) or f"agent {job.agent}"
        heard = (job.lease_expires_at or now) - timedelta(seconds=context.lease_s)
        _again(context, connection, job, f"{late} was the last whose lease expired", now, since=heard)
        _told(connection, job.id, now)


def _again(context: Context, connection: Connection, job: Job, reason: str, now: datetime, *, since: datetime) -> None:
    """Ends an attempt.

    The job returns to its place and is tried again after a pause; after the last attempt it is dead.
    """
    if job.attempts >= context.max_attempts:
        error = f"given up after {job.attempts} attempts: {reason}"
        storage.end(connection, job.id, state="dead", error=error, now=now)
        return
    doubled_s = min(FIRST_PAUSE * context.lease_s * 2 ** max(job.attempts - 1, 0), LONGEST_PAUSE_S)
    pause_s = 0.0 if kind_of(job.task.kind).by_service else doubled_s
    storage.requeue(connection, job.id, now, not_before=since + timedelta(seconds=pause_s))


@contextmanager
def _noticing(context: Context) -> Iterator[None]:
    """Remembers that the database did not answer, or for how long it did not: leases could not be renewed."""
    started_s = time.monotonic()
    try:
        yield
    except ServiceError:
        context.absence.back(context.now(), context.lease_s)
        raise
    finally:
        context.absence.waited(context.now(), time.monotonic() - started_s, context.lease_s)


def _told(connection: Connection, job_id: str, now: datetime) -> Job:
    """The job as it is now; its followers are woken."""
    job = found("job", job_id, storage.get(connection, job_id))
    events.record_job(connection, job, now)
    return job


def _held(context: Context, connection: Connection, job_id: str, token: str, now: datetime) -> Hold:
    """The job, if the token is that of its latest lease. Raises LeaseLostError otherwise."""
    _settle(context, connection, now)
    claim = found("job", job_id, storage.claim(connection, job_id))
    if claim.token is not None and secrets.compare_digest(claim.token.encode(), token.encode()):
        return Hold(job=claim.job, result_id=claim.result_id)
    member = gangs.member_of(connection, claim.job, token)
    if member is None:
        raise LeaseLostError(f"job {job_id} is not held under this token: its lease has passed on")
    return Hold(job=claim.job, result_id=claim.result_id, member=member)


def _is_repetition(connection: Connection, hold: Hold, report_id: str | None) -> bool:
    known = storage.report_taken(connection, report_id)
    if known is not None and known != hold.job.id:
        raise ConflictError(f"the report_id was used before, for job {known}")
    return known is not None


def _require_running(hold: Hold) -> None:
    """Raises LeaseLostError where the job has ended. The last owner of a job that was put back may still report on it.

    A gang's member may not: not all of its members come back, and one alone can do nothing.
    """
    if hold.job.state == "leased" or (hold.job.state == "queued" and hold.member is None):
        return
    state = "another attempt waits" if hold.job.state == "queued" else hold.job.state
    raise LeaseLostError(f"job {hold.job.id} has ended ({state}): no further report on it is accepted")
