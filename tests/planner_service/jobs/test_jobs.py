"""Jobs: their states, their leases, and what is never overwritten. The clock is set by hand."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from pipeplan.documents.identity import content_id
from pipeplan.errors import ConflictError, InvalidInputError, LeaseLostError, NotFoundError
from pipeplan.protocol.jobs import (
    Completion,
    Failure,
    Heartbeat,
    JobQuery,
    Lease,
    LeaseRequest,
    ProfileResult,
    Progress,
)
from pipeplan.protocol.runs import RunQuery
from planner_service.documents.service import profiles
from planner_service.jobs import service as jobs
from planner_service.jobs import store as storage
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from planner_service.platform.listing import Cut
from planner_service.runs import service as runs
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import ANY_WORK, PROFILE_RESULT, PROFILE_TASK, run_result, run_task, store_plan
from tests.waiting import wait_until

LEASE_S = 30.0
READ_S = 20.0
"""More than any read takes; a writer's turn would not come within it."""


def _leased(context: Context) -> Lease:
    jobs.enqueue(context, PROFILE_TASK)
    return _lease(context)


def _lease(context: Context) -> Lease:
    lease = jobs.lease(context, ANY_WORK)
    if lease is None:
        raise LookupError("there is nothing to lease")
    return lease


def _complete(context: Context, lease: Lease) -> None:
    jobs.complete(context, lease.job.id, Completion(token=lease.token, result=PROFILE_RESULT))


def test_the_oldest_job_is_leased_first_and_nobody_else_gets_it(context: Context) -> None:
    first = jobs.enqueue(context, PROFILE_TASK)
    second = jobs.enqueue(context, PROFILE_TASK)
    leases = [jobs.lease(context, ANY_WORK) for _ in range(3)]
    assert [lease and lease.job.id for lease in leases] == [first.id, second.id, None]
    tokens = {lease.token for lease in leases if lease is not None}
    assert len(tokens) == 2


def test_an_agent_gets_only_the_kinds_that_it_can_do(context: Context) -> None:
    jobs.enqueue(context, PROFILE_TASK)
    assert jobs.lease(context, LeaseRequest(agent="a", kinds=("run",))) is None
    assert jobs.lease(context, LeaseRequest(agent="a", kinds=())) is None
    assert jobs.lease(context, LeaseRequest(agent="a", kinds=("profile",))) is not None


def test_a_heartbeat_extends_the_lease_and_keeps_the_progress(context: Context, clock: Clock) -> None:
    lease = _leased(context)
    clock.advance(LEASE_S - 1)
    progress = Progress(done=1, total=4, message="block 1")
    answer = jobs.heartbeat(context, lease.job.id, Heartbeat(token=lease.token, progress=progress))
    assert (answer.expires_in_s, answer.cancelled) == (LEASE_S, False)
    clock.advance(LEASE_S - 1)
    jobs.heartbeat(context, lease.job.id, Heartbeat(token=lease.token))
    assert jobs.lease(context, ANY_WORK) is None
    assert jobs.get(context, lease.job.id).progress == progress


def test_a_heartbeat_that_waited_for_the_database_gives_a_whole_lease(context: Context, clock: Clock) -> None:
    """It gave what was left of one that began when the heartbeat came: none, after a long wait."""
    came = threading.Event()

    def now() -> datetime:
        moment = clock()
        came.set()
        return moment

    lease = _leased(context)
    asked = replace(context, now=now)
    with ThreadPoolExecutor(1) as pool:
        with context.database.write() as connection:
            storage.claim(connection, lease.job.id)  # on PostgreSQL only its own job keeps a heartbeat waiting
            waiting = pool.submit(jobs.heartbeat, asked, lease.job.id, Heartbeat(token=lease.token))
            came.wait()
            clock.advance(2 * LEASE_S)
        assert not waiting.result().cancelled
    clock.advance(LEASE_S - 1)
    jobs.settle(context)
    assert jobs.get(context, lease.job.id).state == "leased"


def test_a_clock_that_is_set_back_keeps_no_job_with_an_owner_that_is_dead(context: Context, clock: Clock) -> None:
    dead, alive = _leased(context), _leased(context)
    clock.advance(-3600)
    context.absence.until = clock() + timedelta(seconds=LEASE_S)  # as the watchdog does when it sees the change
    context.absence.set_back = True
    jobs.settle(context)
    assert jobs.lease(context, ANY_WORK) is None

    clock.advance(LEASE_S - 1)
    jobs.heartbeat(context, alive.job.id, Heartbeat(token=alive.token))
    clock.advance(2)
    jobs.settle(context)
    assert jobs.get(context, alive.job.id).state == "leased"
    assert jobs.get(context, dead.job.id).state == "queued"
    assert not context.absence.set_back

    clock.advance(jobs.FIRST_PAUSE * LEASE_S)
    assert _lease(context).job.id == dead.job.id


def test_a_clock_that_is_set_back_makes_no_job_pause_for_as_long(context: Context, clock: Clock) -> None:
    lease = _leased(context)
    jobs.fail(context, lease.job.id, Failure(token=lease.token, error="no memory now", retry=True))
    assert jobs.lease(context, ANY_WORK) is None  # it pauses before its second attempt
    clock.advance(-86_400)
    context.absence.until = clock() + timedelta(seconds=LEASE_S)
    context.absence.set_back = True
    jobs.settle(context)
    clock.advance(jobs.LONGEST_PAUSE_S)
    assert _lease(context).job.id == lease.job.id


def test_a_profile_job_ends_with_its_profile_and_cluster_stored(context: Context) -> None:
    lease = _leased(context)
    _complete(context, lease)
    job = jobs.get(context, lease.job.id)
    assert (job.state, job.profile_id, job.cluster_id) == ("succeeded", content_id(PROFILE), content_id(CLUSTER))
    assert profiles.newest(context, Cut()).items[0].id == job.profile_id


def test_a_run_job_ends_with_its_report_and_timeline_stored(context: Context) -> None:
    plan_id = store_plan(context)
    job = jobs.enqueue(context, run_task(plan_id))
    assert job.run_id is not None
    assert runs.get(context, job.run_id).state == "queued"
    lease = _lease(context)
    result = run_result(plans.get(context, plan_id))
    jobs.complete(context, job.id, Completion(token=lease.token, result=result))
    run = runs.get(context, job.run_id)
    assert (run.state, run.report) == ("succeeded", result.report)
    measured = runs.timelines(context, job.run_id)["measured"]
    for lane, told in zip(measured.lanes, result.timeline.timeline().lanes, strict=True):
        assert lane.instructions == told.instructions
        assert lane.end_s == pytest.approx(told.end_s, abs=1e-9)


def test_an_expired_lease_passes_on_and_the_late_completion_overwrites_nothing(context: Context, clock: Clock) -> None:
    late = _leased(context)
    clock.advance(LEASE_S)
    present = _lease(context)
    assert (present.job.id, present.job.attempts) == (late.job.id, 2)
    assert present.token != late.token
    with pytest.raises(LeaseLostError, match="passed on"):
        _complete(context, late)
    with pytest.raises(LeaseLostError):
        jobs.heartbeat(context, late.job.id, Heartbeat(token=late.token))
    with pytest.raises(LeaseLostError):
        jobs.fail(context, late.job.id, Failure(token=late.token, error="late"))
    assert profiles.newest(context, Cut()).items == ()
    _complete(context, present)
    with pytest.raises(LeaseLostError):
        _complete(context, late)
    assert jobs.get(context, late.job.id).state == "succeeded"


def test_work_that_is_done_after_the_lease_ran_out_is_taken_while_nobody_else_has_the_job(
    context: Context, clock: Clock
) -> None:
    lease = _leased(context)
    clock.advance(10 * LEASE_S)
    jobs.settle(context)
    assert jobs.get(context, lease.job.id).state == "queued"
    _complete(context, lease)
    assert jobs.get(context, lease.job.id).state == "succeeded"


def test_to_read_jobs_never_waits_for_a_writer_even_when_a_lease_has_run_out(context: Context, clock: Clock) -> None:
    store_plan(context)
    lease = _leased(context)
    clock.advance(LEASE_S)
    with ThreadPoolExecutor(1) as readers, context.database.write():
        seen = readers.submit(_all_reads, context, lease.job.id).result(READ_S)
    assert seen == {lease.job.id}


def _all_reads(context: Context, job_id: str) -> set[str]:
    runs.page(context, RunQuery())
    listed = jobs.page(context, JobQuery()).items + jobs.newest(context, Cut()).items
    return {jobs.get(context, job_id).id, *(job.id for job in listed)}


def test_a_service_puts_back_a_job_whose_lease_has_run_out_though_nobody_asks_for_work(
    context: Context, clock: Clock
) -> None:
    lease = _leased(context)
    clock.advance(LEASE_S)
    wait_until(lambda: jobs.get(context, lease.job.id).state == "queued")


def test_a_heartbeat_takes_back_a_job_that_nobody_else_has_taken(context: Context, clock: Clock) -> None:
    lease = _leased(context)
    clock.advance(LEASE_S)
    jobs.heartbeat(context, lease.job.id, Heartbeat(token=lease.token))
    assert jobs.lease(context, ANY_WORK) is None


def test_a_job_whose_agents_vanish_fails_after_the_last_attempt_and_says_why(context: Context, clock: Clock) -> None:
    lease = _leased(context)
    for _ in range(2):
        clock.advance(LEASE_S)
        lease = _lease(context)
    clock.advance(LEASE_S)
    assert jobs.lease(context, ANY_WORK) is None
    job = jobs.get(context, lease.job.id)
    assert (job.state, job.attempts) == ("dead", 3)
    assert job.error == "given up after 3 attempts: agent node-1 was the last whose lease expired"
    with pytest.raises(LeaseLostError, match="ended"):
        _complete(context, lease)
    assert profiles.newest(context, Cut()).items == ()


def test_a_repeated_completion_is_taken_as_the_first_and_another_result_is_not(context: Context) -> None:
    lease = _leased(context)
    _complete(context, lease)
    _complete(context, lease)
    other = ProfileResult(profile=PROFILE, cluster=CLUSTER.__class__(device=CLUSTER.device, levels=CLUSTER.levels * 2))
    with pytest.raises(LeaseLostError):
        jobs.complete(context, lease.job.id, Completion(token=lease.token, result=other))


def test_a_failure_ends_the_job_with_its_error_and_may_be_repeated(context: Context) -> None:
    lease = _leased(context)
    failure = Failure(token=lease.token, error="out of memory on rank 1")
    for _ in range(2):
        job = jobs.fail(context, lease.job.id, failure)
        assert (job.state, job.error) == ("failed", "out of memory on rank 1")
    assert jobs.lease(context, ANY_WORK) is None


def test_the_owner_of_a_cancelled_job_hears_of_it_and_what_it_reports_is_not_taken(context: Context) -> None:
    lease = _leased(context)
    assert jobs.cancel(context, lease.job.id).state == "cancelled"
    assert jobs.cancel(context, lease.job.id).state == "cancelled"
    assert jobs.heartbeat(context, lease.job.id, Heartbeat(token=lease.token)).cancelled
    with pytest.raises(LeaseLostError, match="cancelled"):
        _complete(context, lease)
    assert profiles.newest(context, Cut()).items == ()


def test_a_queued_job_that_is_cancelled_is_never_leased(context: Context) -> None:
    job = jobs.enqueue(context, PROFILE_TASK)
    jobs.cancel(context, job.id)
    assert jobs.lease(context, ANY_WORK) is None


def test_a_job_that_has_ended_cannot_be_cancelled(context: Context) -> None:
    lease = _leased(context)
    _complete(context, lease)
    with pytest.raises(ConflictError, match="succeeded"):
        jobs.cancel(context, lease.job.id)


def test_a_run_needs_a_stored_plan(context: Context) -> None:
    with pytest.raises(InvalidInputError) as caught:
        jobs.enqueue(context, run_task("0" * 32))
    assert (caught.value.field, caught.value.value) == ("plan_id", "0" * 32)
    assert jobs.newest(context, Cut()).items == ()


def test_a_result_of_another_kind_than_the_job_is_refused(context: Context) -> None:
    plan_id = store_plan(context)
    jobs.enqueue(context, run_task(plan_id))
    lease = _lease(context)
    with pytest.raises(InvalidInputError) as caught:
        _complete(context, lease)
    assert caught.value.field == "result.kind"
    assert jobs.get(context, lease.job.id).state == "leased"


def test_a_timeline_that_holds_no_instructions_is_refused_and_nothing_of_it_stored(context: Context) -> None:
    plan_id = store_plan(context)
    job = jobs.enqueue(context, run_task(plan_id))
    lease = _lease(context)
    text = run_result(plans.get(context, plan_id)).model_dump_json().replace('"F1"', '"rm -rf"', 1)
    completion = Completion.model_validate_json(f'{{"token": "{lease.token}", "result": {text}}}')
    with pytest.raises(InvalidInputError, match="instruction"):
        jobs.complete(context, lease.job.id, completion)
    assert runs.get(context, str(job.run_id)).report is None
    assert jobs.get(context, lease.job.id).state == "leased"


def test_a_job_that_does_not_exist_is_not_found(context: Context) -> None:
    with pytest.raises(NotFoundError, match="there is no job nothing"):
        jobs.get(context, "nothing")
    with pytest.raises(NotFoundError):
        jobs.heartbeat(context, "nothing", Heartbeat(token="x"))
