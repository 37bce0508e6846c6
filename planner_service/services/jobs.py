"""Jobs: enqueued by anybody, leased by agents, ended by whoever holds the lease.

    queued ──lease──▶ leased ──complete──▶ succeeded
      ▲                 │ └────fail──────▶ failed
      └──lease expires──┘ (after the last attempt: failed)        cancel: queued or leased ──▶ cancelled

A lease that has run out may still be renewed or reported on by its owner, as long as nobody has taken the job since:
work that is done is not thrown away. Every lease has its own token, and only the job's latest one counts.
"""

import secrets
from datetime import datetime, timedelta
from typing import assert_never

from sqlalchemy import Connection

from planner_service.contract.jobs import (
    Completion,
    Failure,
    Heartbeat,
    HeartbeatAnswer,
    Job,
    JobState,
    Lease,
    LeaseRequest,
    ProfileResult,
    RunResult,
    RunTask,
    Task,
)
from planner_service.contract.listing import Page
from planner_service.core.errors import ConflictError, InvalidInputError, LeaseLostError, require
from planner_service.core.identity import content_id
from planner_service.services.context import Context, found
from planner_service.storage import clusters, plans, profiles, runs
from planner_service.storage import jobs as storage
from planner_service.storage.jobs import Claim
from planner_service.storage.listing import Cut

MAX_KEY_CHARACTERS = 200


def enqueue(context: Context, task: Task, idempotency_key: str | None = None) -> tuple[Job, bool]:
    """Appends a job, and says whether it is new: the same key with the same task gives the job that it gave before."""
    if idempotency_key is not None:
        rule = f"must have 1 to {MAX_KEY_CHARACTERS} characters"
        require(0 < len(idempotency_key) <= MAX_KEY_CHARACTERS, "Idempotency-Key", rule, idempotency_key)
    with context.database.write() as connection:
        known = storage.by_idempotency_key(connection, idempotency_key) if idempotency_key else None
        if known is not None:
            return _same_task(known, task), False
        job_id = _enqueue(connection, task, idempotency_key, context.now())
        return found("job", job_id, storage.get(connection, job_id)), True


def get(context: Context, job_id: str) -> Job:
    """The job. Raises NotFoundError."""
    settle(context)
    with context.database.read() as connection:
        return found("job", job_id, storage.get(connection, job_id))


def newest(context: Context, cut: Cut, states: tuple[JobState, ...] = ()) -> Page[Job]:
    """A page of jobs, newest first."""
    settle(context)
    with context.database.read() as connection:
        return storage.page(connection, cut, states)


def lease(context: Context, request: LeaseRequest) -> Lease | None:
    """Gives the oldest job of these kinds to the agent; None where nothing is to be done."""
    now = context.now()
    token = secrets.token_urlsafe(24)
    with context.database.write() as connection:
        _settle(context, connection, now)
        job = storage.take_oldest(
            connection,
            kinds=request.kinds,
            agent=request.agent,
            token=token,
            now=now,
            expires_at=now + timedelta(seconds=context.lease_s),
        )
    return None if job is None else Lease(job=job, token=token, expires_in_s=context.lease_s)


def heartbeat(context: Context, job_id: str, beat: Heartbeat) -> HeartbeatAnswer:
    """Renews the lease. Raises LeaseLostError where it is no longer this owner's."""
    now = context.now()
    with context.database.write() as connection:
        claim = _owned(context, connection, job_id, beat.token, now)
        if claim.job.state == "cancelled":
            return HeartbeatAnswer(expires_in_s=0.0, cancelled=True)
        _require_running(claim)
        expires_at = now + timedelta(seconds=context.lease_s)
        storage.extend(connection, job_id, beat.progress, expires_at, now)
    return HeartbeatAnswer(expires_in_s=context.lease_s, cancelled=False)


def complete(context: Context, job_id: str, completion: Completion) -> Job:
    """Ends the job and stores its result, both or neither. A repetition of what was taken before is taken again."""
    now = context.now()
    result = completion.result
    result_id = content_id(result.model_dump(mode="json"))
    with context.database.write() as connection:
        claim = _owned(context, connection, job_id, completion.token, now)
        if claim.job.state == "succeeded" and claim.result_id == result_id:
            return claim.job
        _require_running(claim)
        require(result.kind == claim.job.task.kind, "result.kind", f"must be {claim.job.task.kind}", result.kind)
        _store(connection, claim.job, result, result_id, now)
        return found("job", job_id, storage.get(connection, job_id))


def fail(context: Context, job_id: str, failure: Failure) -> Job:
    """Ends the job with its owner's error. A repetition of what was taken before is taken again."""
    now = context.now()
    with context.database.write() as connection:
        claim = _owned(context, connection, job_id, failure.token, now)
        if claim.job.state == "failed" and claim.job.error == failure.error:
            return claim.job
        _require_running(claim)
        storage.end(connection, job_id, state="failed", error=failure.error, now=now)
        return found("job", job_id, storage.get(connection, job_id))


def cancel(context: Context, job_id: str) -> Job:
    """Ends a job that has not ended. Its owner hears of it with the next heartbeat; what it reports is not taken."""
    now = context.now()
    with context.database.write() as connection:
        _settle(context, connection, now)
        claim = found("job", job_id, storage.claim(connection, job_id))
        if claim.job.state in ("succeeded", "failed"):
            raise ConflictError(f"job {job_id} has {claim.job.state}: it cannot be cancelled any more")
        if claim.job.state != "cancelled":
            storage.end(connection, job_id, state="cancelled", error="cancelled on request", now=now)
        return found("job", job_id, storage.get(connection, job_id))


def settle(context: Context) -> None:
    """Deals with leases that have run out, so that what is read next is true. Writes only where there are any."""
    now = context.now()
    with context.database.read() as connection:
        if not storage.any_expired(connection, now):
            return
    with context.database.write() as connection:
        _settle(context, connection, now)


def _settle(context: Context, connection: Connection, now: datetime) -> None:
    for job in storage.expired(connection, now):
        if job.attempts < context.max_attempts:
            storage.requeue(connection, job.id, now)
            continue
        error = f"given up after {job.attempts} attempts: agent {job.agent} was the last to let its lease run out"
        storage.end(connection, job.id, state="failed", error=error, now=now)


def _enqueue(connection: Connection, task: Task, idempotency_key: str | None, now: datetime) -> str:
    job_id = secrets.token_hex(16)
    run_id = secrets.token_hex(16) if isinstance(task, RunTask) else None
    if isinstance(task, RunTask) and plans.summary(connection, task.plan_id) is None:
        raise InvalidInputError("plan_id", "must be the id of a stored plan", task.plan_id)
    storage.add(connection, job_id=job_id, task=task, run_id=run_id, idempotency_key=idempotency_key, now=now)
    if isinstance(task, RunTask) and run_id is not None:
        runs.add(connection, run_id=run_id, job_id=job_id, plan_id=task.plan_id, now=now)
    return job_id


def _same_task(job: Job, task: Task) -> Job:
    if job.task != task:
        raise ConflictError(f"the Idempotency-Key was used before, for job {job.id}, which has another task")
    return job


def _owned(context: Context, connection: Connection, job_id: str, token: str, now: datetime) -> Claim:
    """The job, if the token is that of its latest lease."""
    _settle(context, connection, now)
    claim = found("job", job_id, storage.claim(connection, job_id))
    if claim.token is None or not secrets.compare_digest(claim.token.encode(), token.encode()):
        raise LeaseLostError(f"job {job_id} is not held under this token: its lease has passed on")
    return claim


def _require_running(claim: Claim) -> None:
    """Raises LeaseLostError where the job has ended; one that was put back is still its last owner's to report on."""
    if claim.job.state not in ("leased", "queued"):
        raise LeaseLostError(f"job {claim.job.id} has ended ({claim.job.state}): nothing more is taken for it")


def _store(connection: Connection, job: Job, result: ProfileResult | RunResult, result_id: str, now: datetime) -> None:
    match result:
        case ProfileResult():
            profile_id, _ = profiles.add(connection, result.profile, now)
            cluster_id, _ = clusters.add(connection, result.cluster, now)
            storage.succeed(
                connection, job.id, result_id=result_id, profile_id=profile_id, cluster_id=cluster_id, now=now
            )
        case RunResult():
            _require_readable(result)
            runs.finish(connection, found("run of job", job.id, job.run_id), result)
            storage.succeed(connection, job.id, result_id=result_id, now=now)
        case _:
            assert_never(result)


def _require_readable(result: RunResult) -> None:
    """Raises InvalidInputError where the timeline holds a text that is no instruction: it could not be drawn."""
    for lane in result.timeline.lanes:
        for _ in lane.events():
            pass
