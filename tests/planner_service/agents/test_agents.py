"""Agents: who they are, what they get, and runs over several of them. The clock is set by hand."""

from datetime import timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipeplan.errors import ConflictError, InvalidInputError, LeaseLostError
from pipeplan.protocol.agents import AgentQuery, Presence, Registration
from pipeplan.protocol.jobs import (
    Completion,
    Failure,
    Heartbeat,
    Lease,
    LeaseRequest,
    LinksResult,
    LinksTask,
    PartResult,
    ProfileTask,
    Release,
)
from planner_service.agents import service as agents
from planner_service.jobs import service as jobs
from planner_service.overview.openapi import CLUSTER, REGISTRATION
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import PROFILE_RESULT, run_result, run_task, store_plan

LEASE_S = 30.0
LINKS = LinksResult(cluster=CLUSTER)


def _register(context: Context, name: str, **changes: Any) -> Registration:
    values = REGISTRATION | {"name": name, "instance": f"instance-of-{name}", "shared_folder": "one"} | changes
    told = Registration.model_validate(values)
    agents.register(context, told)
    return told


def _asks(context: Context, name: str, instance: str | None = None) -> Lease | None:
    return jobs.lease(context, LeaseRequest(agent=name, instance=instance or f"instance-of-{name}"))


def _gets(context: Context, name: str) -> Lease:
    lease = _asks(context, name)
    if lease is None:
        raise LookupError(f"there is nothing for {name}")
    return lease


def _gang(context: Context, *names: str) -> list[Lease]:
    """The leases on a job for so many nodes, once all have asked."""
    for name in names[:-1]:
        assert _asks(context, name) is None
    last = _gets(context, names[-1])
    return [*(_gets(context, name) for name in names[:-1]), last]


def _beat(context: Context, lease: Lease) -> str | None:
    return jobs.heartbeat(context, lease.job.id, Heartbeat(token=lease.token)).stop


def _complete(context: Context, lease: Lease, result: Any) -> None:
    jobs.complete(context, lease.job.id, Completion(token=lease.token, result=result))


def _fails(context: Context, lease: Lease, error: str, *, retry: bool) -> str:
    failure = Failure(token=lease.token, error=error, retry=retry)
    return jobs.fail(context, lease.job.id, failure).state


def test_an_agent_is_alive_draining_or_lost(context: Context, clock: Clock) -> None:
    told = _register(context, "node-1")
    assert agents.get(context, "node-1").state == "alive"
    presence = Presence(instance=told.instance, draining=True)
    assert agents.present(context, "node-1", presence).state == "draining"
    clock.advance(LEASE_S + 1)
    assert agents.get(context, agents.get(context, "node-1").id).state == "lost"


def test_a_new_process_takes_the_name_over_and_the_older_one_is_refused(context: Context) -> None:
    first = _register(context, "node-1")
    before = agents.get(context, "node-1").id
    _register(context, "node-1", instance="another-process")
    assert agents.get(context, "node-1").id == before
    with pytest.raises(ConflictError, match="another process has registered"):
        _asks(context, "node-1", first.instance)
    assert _asks(context, "node-1", "another-process") is None


def test_agents_are_registered_shown_and_listed_over_http(http: TestClient) -> None:
    made = http.post("/v1/agents", json=REGISTRATION)
    again = http.post("/v1/agents", json=REGISTRATION)
    assert (made.status_code, again.status_code) == (201, 200)
    shown = http.get(made.headers["location"]).json()
    assert (shown["state"], shown["devices"], shown["max_processes"]) == ("alive", 8, 8)
    assert "instance" not in shown
    assert [agent["name"] for agent in http.get("/v1/agents").json()["items"]] == ["node-1"]
    beat = {"instance": REGISTRATION["instance"], "draining": True}
    assert http.post("/v1/agents/node-1/heartbeat", json=beat).json()["state"] == "draining"
    assert http.get("/v1/agents/nobody").status_code == 404


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("field", "value"),
    [("device_name", "H100\u001b[2J"), ("host", "a\nb"), ("allow", ["mine:*\u2028"])],
)
def test_texts_of_an_agent_that_do_not_print_as_one_line_are_refused(
    http: TestClient, field: str, value: object
) -> None:
    answer = http.post("/v1/agents", json=REGISTRATION | {field: value})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


@pytest.mark.parametrize(
    ("changes", "task", "reason"),
    [
        ({"devices": 1}, {"devices": 2}, "takes 1 processes at once, 2 are needed"),
        ({}, {"agents": ("node-2",)}, "is not named"),
        ({"allow": ["mine:*"]}, {"model": "hf:gpt2?n_layer=4"}, "does not allow hf:gpt2"),
    ],
)
def test_an_agent_gets_only_what_it_can_do(
    context: Context, changes: dict[str, Any], task: dict[str, Any], reason: str
) -> None:
    _register(context, "able", devices=8, allow=["hf:*"])  # for the last case: somebody allows it
    _register(context, "node-1", **changes)
    job = jobs.enqueue(context, ProfileTask.model_validate({"model": "hf:a", "microbatch_sizes": (1,)} | task))
    assert _asks(context, "node-1") is None
    waiting = jobs.get(context, job.id)
    assert waiting.state == "queued"
    if task.get("agents"):
        assert reason in str(waiting.waiting_for)
    else:
        assert _gets(context, "able").job.id == job.id


def test_what_no_agent_allows_fails_with_the_rule_and_is_given_to_nobody(context: Context, clock: Clock) -> None:
    clock.advance(LEASE_S)  # other agents had the time to return
    _register(context, "node-1", allow=["hf:*"])
    job = jobs.enqueue(context, ProfileTask(model="os:system?command=true", microbatch_sizes=(1,)))
    assert _asks(context, "node-1") is None
    ended = jobs.get(context, job.id)
    assert (ended.state, ended.attempts) == ("failed", 0)
    assert str(ended.error).startswith("model: must be a factory that this agent's operator allows")


def test_no_job_fails_for_lack_of_an_agent_while_agents_return_after_days_away(context: Context, clock: Clock) -> None:
    """The first agent that asked after a weekend without the service ended the jobs of those that asked a second later.

    A clock that was set forward by a day did the same.
    """
    _register(context, "first", allow=["hf:*"])
    _register(context, "second", allow=["mine:*"])
    job = jobs.enqueue(context, ProfileTask(model="mine:gpt", microbatch_sizes=(1,)))
    clock.advance(3 * 86400)
    context.absence.back(clock(), LEASE_S)
    assert _asks(context, "first") is None
    assert jobs.get(context, job.id).state == "queued"
    assert _gets(context, "second").job.id == job.id


def test_an_answer_that_was_lost_is_given_again_and_the_first_token_counts_no_more(context: Context) -> None:
    _register(context, "node-1")
    jobs.enqueue(context, LinksTask(devices=1))
    lost = _gets(context, "node-1")
    again = _gets(context, "node-1")
    assert (again.job.id, again.job.attempts, again.job.fence) == (lost.job.id, 1, 2)
    with pytest.raises(LeaseLostError):
        _beat(context, lost)
    _complete(context, again, LINKS)
    assert jobs.get(context, again.job.id).cluster_id is not None


def test_a_gang_gets_its_job_all_at_once_and_the_first_reports_the_result(context: Context) -> None:
    plan_id = store_plan(context)
    for name in ("a", "b"):
        _register(context, name, address=f"10.0.0.{name}", port=29500)
    job = jobs.enqueue(context, run_task(plan_id, nodes=2))
    first, second = _gang(context, "a", "b")
    assert first.gang is not None
    assert second.gang is not None
    assert (first.gang.node_rank, second.gang.node_rank) == (0, 1)
    assert (second.gang.address, second.gang.port, second.gang.agents) == ("10.0.0.a", 29500, ("a", "b"))
    assert jobs.get(context, job.id).attempts == 1
    result = run_result(plans.get(context, plan_id))
    with pytest.raises(InvalidInputError, match="node rank 0 has the result"):
        _complete(context, second, result)
    _complete(context, first, result)
    _complete(context, second, PartResult())
    _complete(context, second, PartResult())
    assert jobs.get(context, job.id).state == "succeeded"


def test_a_gang_waits_for_all_and_holds_nobody_meanwhile(context: Context, clock: Clock) -> None:
    for name in ("a", "b"):
        _register(context, name)
    jobs.enqueue(context, LinksTask(devices=1, nodes=3))
    small = jobs.enqueue(context, LinksTask(devices=1))
    assert _gets(context, "a").job.id == small.id  # three are not there: what came later goes on
    _register(context, "c")
    assert _asks(context, "b") is None
    assert _asks(context, "c") is None
    waiting = jobs.newest(context, _cut(), ("queued",)).items[0]
    assert waiting.agents == ()


def test_an_agent_for_a_gang_that_waits_takes_nothing_that_came_after_it(context: Context) -> None:
    for name in ("a", "b"):
        _register(context, name)
    jobs.enqueue(context, LinksTask(devices=1))
    busy = _gets(context, "a")
    big = jobs.enqueue(context, LinksTask(devices=1, nodes=2))
    jobs.enqueue(context, LinksTask(devices=1))
    assert _asks(context, "b") is None
    _complete(context, busy, LINKS)
    assert _gets(context, "a").job.id == big.id
    assert _gets(context, "b").job.id == big.id


@pytest.mark.each_case
def test_two_gangs_never_hold_half_each(context: Context) -> None:
    for name in ("a", "b", "c"):
        _register(context, name)
    ids = [jobs.enqueue(context, LinksTask(devices=1, nodes=2)).id for _ in range(2)]
    given = {name: _asks(context, name) for name in ("a", "b", "c", "a", "b", "c")}
    assert [jobs.get(context, job_id).state for job_id in ids] == ["leased", "queued"]
    held = [name for name, lease in given.items() if lease is not None and lease.job.id == ids[0]]
    assert len(held) <= 2
    assert len(jobs.get(context, ids[0]).agents) == 2


def test_a_member_whose_lease_runs_out_ends_the_attempt_for_all(context: Context, clock: Clock) -> None:
    for name in ("a", "b"):
        _register(context, name)
    job = jobs.enqueue(context, LinksTask(devices=1, nodes=2))
    first, second = _gang(context, "a", "b")
    clock.advance(LEASE_S / 2)
    assert _beat(context, first) is None
    clock.advance(LEASE_S / 2)
    with pytest.raises(LeaseLostError, match="another attempt waits"):
        _beat(context, first)
    with pytest.raises(LeaseLostError):
        _complete(context, first, LINKS)
    jobs.settle(context)
    waiting = jobs.get(context, job.id)
    assert (waiting.state, waiting.attempts) == ("queued", 1)
    assert _beat_is_refused(context, second)


def test_a_gang_is_tried_again_as_a_whole_and_given_up_after_the_last_attempt(context: Context, clock: Clock) -> None:
    for name in ("a", "b"):
        _register(context, name)
    job = jobs.enqueue(context, LinksTask(devices=1, nodes=2))
    for attempt in (1, 2, 3):
        leases = _gang(context, "a", "b")
        assert [lease.job.fence for lease in leases] == [attempt, attempt]
        assert _fails(context, leases[0], "another rank was lost", retry=True) == "leased"
        assert _fails(context, leases[1], "another rank was lost", retry=True) == ("queued" if attempt < 3 else "dead")
        clock.advance(LEASE_S * 2)
    ended = jobs.get(context, job.id)
    assert ended.error == "given up after 3 attempts: another rank was lost"
    assert jobs.retry(context, job.id).state == "queued"
    assert _gang(context, "a", "b")[0].job.attempts == 1


def test_the_cause_counts_even_if_others_were_first_to_say_that_they_lost_it(context: Context, clock: Clock) -> None:
    for name in ("a", "b"):
        _register(context, name)
    job = jobs.enqueue(context, LinksTask(devices=1, nodes=2))
    first, second = _gang(context, "a", "b")
    assert _fails(context, first, "another rank was lost", retry=True) == "leased"
    assert _beat(context, second) is None  # it may still say what happened
    assert _fails(context, second, "the loss is nan in step 3", retry=False) == "failed"
    assert jobs.get(context, job.id).error == "the loss is nan in step 3"


def test_a_member_that_hangs_is_told_to_stop_once_another_has_lost_it(context: Context, clock: Clock) -> None:
    for name in ("a", "b"):
        _register(context, name)
    jobs.enqueue(context, LinksTask(devices=1, nodes=2))
    first, second = _gang(context, "a", "b")
    _fails(context, first, "another rank was lost", retry=True)
    clock.advance(LEASE_S / 6)
    assert _beat(context, second) == "agent a ended early: another rank was lost"


def test_a_job_that_is_handed_back_is_no_attempt_and_goes_to_the_next(context: Context) -> None:
    for name in ("a", "b"):
        _register(context, name)
    job = jobs.enqueue(context, LinksTask(devices=1))
    lease = _gets(context, "a")
    release = Release(token=lease.token, report_id="report-1")
    for _ in range(2):
        assert jobs.release(context, job.id, release).state == "queued"
    assert _gets(context, "b").job.attempts == 1
    with pytest.raises(LeaseLostError):
        _complete(context, lease, LINKS)


def test_after_the_clock_was_set_back_a_dead_member_is_missed_and_a_dead_agent_is_lost(
    context: Context, clock: Clock
) -> None:
    for name in ("node-1", "node-2"):
        _register(context, name)
    job = jobs.enqueue(context, LinksTask(devices=1, nodes=2))
    first, _ = _gang(context, "node-1", "node-2")
    clock.advance(-3600)
    context.absence.until = clock() + timedelta(seconds=LEASE_S)  # as the watchdog does when it sees the change
    context.absence.set_back = True
    jobs.settle(context)
    clock.advance(LEASE_S - 1)
    _beat(context, first)
    clock.advance(2)
    jobs.settle(context)
    assert jobs.get(context, job.id).state == "queued"
    clock.advance(2 * LEASE_S)
    states = {known.name: known.state for known in agents.page(context, AgentQuery()).items}
    assert states == {"node-1": "lost", "node-2": "lost"}


def test_runs_over_several_nodes_need_a_folder_that_they_share_and_workers_that_spread(context: Context) -> None:
    plan_id = store_plan(context)
    for name in ("a", "b"):
        _register(context, name, shared_folder=f"of {name} alone")
    job = jobs.enqueue(context, run_task(plan_id, nodes=2))
    assert _asks(context, "a") is None
    assert _asks(context, "b") is None
    assert "2 agents are needed at once" in str(jobs.get(context, job.id).waiting_for)
    _register(context, "a", shared_folder=None)
    _register(context, "b", shared_folder=None)
    assert "shares no folder with others" in str(jobs.get(context, job.id).waiting_for)
    with pytest.raises(InvalidInputError, match="must divide the plan's 2 workers") as caught:
        jobs.enqueue(context, run_task(plan_id, nodes=3))
    assert (caught.value.field, caught.value.value) == ("nodes", 3)


def test_a_failed_attempt_waits_before_the_next(context: Context, clock: Clock) -> None:
    _register(context, "a")
    job = jobs.enqueue(context, LinksTask(devices=1))
    assert _fails(context, _gets(context, "a"), "lost", retry=True) == "queued"
    assert _asks(context, "a") is None
    assert jobs.get(context, job.id).not_before is not None
    clock.advance(10)
    assert _gets(context, "a").job.attempts == 2


def test_a_report_is_taken_once(context: Context) -> None:
    for _ in range(2):
        jobs.enqueue(context, ProfileTask(model="hf:a", microbatch_sizes=(1,)))
    first, second = (_plain_lease(context) for _ in range(2))
    completion = Completion(token=first.token, report_id="report-1", result=PROFILE_RESULT)
    assert jobs.complete(context, first.job.id, completion).state == "succeeded"
    assert jobs.complete(context, first.job.id, completion).state == "succeeded"
    other = Completion(token=second.token, report_id="report-1", result=PROFILE_RESULT)
    with pytest.raises(ConflictError, match="report_id was used before"):
        jobs.complete(context, second.job.id, other)
    assert jobs.get(context, second.job.id).state == "leased"


def test_leases_do_not_run_out_while_the_service_was_away(context: Context, clock: Clock) -> None:
    """A service that comes back gives the owners a lease's length to come back, too."""
    jobs.enqueue(context, ProfileTask(model="hf:a", microbatch_sizes=(1,)))
    lease = _plain_lease(context)
    clock.advance(3600)
    context.absence.back(clock(), LEASE_S)
    assert jobs.lease(context, LeaseRequest(agent="other")) is None
    assert jobs.get(context, lease.job.id).state == "leased"
    _beat(context, lease)
    clock.advance(LEASE_S - 1)
    assert jobs.lease(context, LeaseRequest(agent="other")) is None
    clock.advance(2)
    assert jobs.lease(context, LeaseRequest(agent="other")) is not None


def _plain_lease(context: Context) -> Lease:
    lease = jobs.lease(context, LeaseRequest(agent="plain"))
    if lease is None:
        raise LookupError("there is nothing")
    return lease


def _beat_is_refused(context: Context, lease: Lease) -> bool:
    try:
        _beat(context, lease)
    except LeaseLostError:
        return True
    return False


def _cut() -> Any:
    from planner_service.platform.listing import Cut

    return Cut()
