"""Retention: what is old goes, what is pinned stays, on both databases."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Table, delete, func, select

from pipeplan.documents.identity import content_id
from pipeplan.documents.named_clusters import named_cluster
from pipeplan.documents.plan import Answer
from pipeplan.errors import ConflictError, InvalidInputError, NotFoundError, PipeplanError
from pipeplan.planners.problem import PlanningProblem
from pipeplan.protocol.estimates import ModelPlanRequest
from pipeplan.protocol.jobs import Completion, Failure
from pipeplan.protocol.plans import PlanRequest
from pipeplan.protocol.tokens import Identity, NewToken
from planner_service.access import service as tokens
from planner_service.documents.service import clusters, profiles
from planner_service.events import service as followed
from planner_service.events.store import Subject
from planner_service.jobs import service as jobs
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.plans import estimates
from planner_service.plans import service as plans
from planner_service.plans.solver import solve_here
from planner_service.platform.context import Context
from planner_service.platform.listing import Cut
from planner_service.platform.rules import KEPT, UNASKED, Rule, parse_rules
from planner_service.platform.settings import load_settings
from planner_service.platform.tables import clusters as cluster_rows
from planner_service.platform.tables import events, metadata, run_chunks
from planner_service.platform.tables import profiles as profile_rows
from planner_service.runs import service as runs
from planner_service.upkeep import chores
from planner_service.upkeep import service as retention
from tests.pipeplan.builders import Cell
from tests.pipeplan.planners.exact.mixed import Gpu, mixed_problem
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import ANY_WORK, PROFILE_TASK, request_document, run_result, run_task, store_plan
from tests.planner_service.servers import pipeplan

DAY_S = 86_400
NOTHING = dict.fromkeys((noun for noun in KEPT if noun not in UNASKED), 0)


def _prune(context: Context, days: int, *, dry_run: bool = False) -> dict[str, int]:
    return retention.prune(context, dict.fromkeys(NOTHING, Rule(older_than_s=days * DAY_S)), dry_run=dry_run)


def _run(context: Context, plan_id: str) -> str:
    """A run that has ended, measured."""
    job = jobs.enqueue(context, run_task(plan_id))
    lease = jobs.lease(context, ANY_WORK)
    assert lease is not None
    jobs.complete(context, job.id, Completion(token=lease.token, result=run_result(plans.get(context, plan_id))))
    assert job.run_id is not None
    return job.run_id


def _is_there(get: Callable[[Context, str], object], context: Context, identity: str) -> bool:
    try:
        get(context, identity)
    except NotFoundError:
        return False
    return True


def _rows(context: Context) -> dict[str, int]:
    with context.database.read() as connection:
        return {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in metadata.sorted_tables
        }


def test_what_is_old_goes_with_all_that_belongs_to_it(context: Context, clock: Clock) -> None:
    _run(context, store_plan(context))
    jobs.cancel(context, jobs.enqueue(context, PROFILE_TASK).id)
    clock.advance(91 * DAY_S)
    assert _prune(context, 90) == NOTHING | {"runs": 1, "jobs": 1, "plans": 1, "profiles": 1, "clusters": 1}
    rows = _rows(context)
    kept = ("runs", "jobs", "plans", "profiles", "clusters", run_chunks.name, events.name)
    assert {name: rows[name] for name in kept} == dict.fromkeys(kept, 0)
    assert _prune(context, 90) == NOTHING


def test_what_is_not_old_enough_stays(context: Context, clock: Clock) -> None:
    _run(context, store_plan(context))
    clock.advance(89 * DAY_S)
    before = _rows(context)
    assert _prune(context, 90) == NOTHING
    assert _rows(context) == before


@pytest.mark.each_case
def test_a_dry_run_says_the_same_and_removes_nothing(context: Context, clock: Clock) -> None:
    _run(context, store_plan(context))
    clock.advance(91 * DAY_S)
    before = _rows(context)
    said = _prune(context, 90, dry_run=True)
    assert _rows(context) == before
    assert said == _prune(context, 90)
    assert said["runs"] == 1


def test_a_plan_with_a_run_that_is_kept_stays_with_what_it_was_made_from(context: Context, clock: Clock) -> None:
    plan_id = store_plan(context)
    old = _run(context, plan_id)
    clock.advance(91 * DAY_S)
    young = _run(context, plan_id)
    assert _prune(context, 90) == NOTHING | {"runs": 1}
    assert not _is_there(runs.get, context, old)
    assert runs.get(context, young).plan_id == plan_id
    assert plans.get(context, plan_id).profile_id == content_id(PROFILE)
    assert _is_there(profiles.document, context, content_id(PROFILE))
    assert _is_there(clusters.document, context, content_id(CLUSTER))


def test_jobs_that_have_not_ended_stay_however_old(context: Context, clock: Clock) -> None:
    queued = jobs.enqueue(context, run_task(store_plan(context)))
    clock.advance(1000 * DAY_S)
    assert _prune(context, 90) == NOTHING
    assert jobs.get(context, queued.id).state == "queued"


def test_a_cluster_that_an_estimate_will_plan_with_stays(context: Context, clock: Clock) -> None:
    stored = clusters.create(context, named_cluster("l4"))[0].id
    clusters.create(context, CLUSTER)
    asked = ModelPlanRequest(model="hf:gpt2", cluster_id=stored, planner="auto", batch_size=8)
    estimates.enqueue(context, asked)
    clock.advance(91 * DAY_S)
    assert _prune(context, 90) == NOTHING | {"clusters": 1}
    assert _is_there(clusters.document, context, stored)


def test_a_plan_at_which_an_alias_points_stays_and_the_one_before_as_long(
    context: Context, http: TestClient, clock: Clock
) -> None:
    first, second = store_plan(context), store_plan(context, batch_size=32)
    http.put("/v1/aliases/gpt-prod", json={"plan_id": first}).raise_for_status()
    clock.advance(100 * DAY_S)
    http.put("/v1/aliases/gpt-prod", json={"plan_id": second}).raise_for_status()
    history = http.get("/v1/aliases/gpt-prod/history").json()
    assert _prune(context, 90) == NOTHING  # until a moment ago, the first plan was the alias's
    clock.advance(91 * DAY_S)
    assert _prune(context, 90) == NOTHING | {"plans": 1}
    assert not _is_there(plans.get, context, first)
    assert http.get("/v1/aliases/gpt-prod").json()["plan_id"] == second
    assert http.get("/v1/aliases/gpt-prod/history").json() == history


def test_a_profile_that_a_kept_plan_names_beside_its_own_stays(context: Context, clock: Clock) -> None:
    problem = mixed_problem([Cell()] * 6, [Gpu(name="fast"), Gpu(name="slow", slowness=2.0)])
    (other,) = problem.other_profiles
    for profile in (problem.profile, other, PROFILE):
        profiles.create(context, profile)
    clusters.create(context, problem.cluster)
    clock.advance(91 * DAY_S)
    identities = {"profile_id": content_id(problem.profile), "cluster_id": content_id(problem.cluster)}
    asked = request_document(**identities, other_profile_ids=[content_id(other)])
    assert plans.create(context, PlanRequest.model_validate(asked)).plan_id is not None
    assert _prune(context, 90) == NOTHING | {"profiles": 1}
    assert _is_there(profiles.document, context, content_id(other))
    assert not _is_there(profiles.document, context, content_id(PROFILE))


@pytest.mark.each_case
def test_more_than_one_transactions_worth_goes(context: Context, clock: Clock) -> None:
    for number in range(retention.MOST_ROWS + 1):
        clusters.create(context, replace(CLUSTER, device=replace(CLUSTER.device, name=f"device {number}")))
    clock.advance(DAY_S + 1)
    assert _prune(context, 1, dry_run=True) == _prune(context, 1) == NOTHING | {"clusters": retention.MOST_ROWS + 1}


@pytest.mark.each_case
@pytest.mark.parametrize("table", [profile_rows, cluster_rows])
def test_a_plan_whose_profile_or_cluster_is_removed_while_it_is_made_is_refused(context: Context, table: Table) -> None:
    """The plan is solved outside of any transaction; nothing is acknowledged that is not stored."""
    profiles.create(context, PROFILE)
    clusters.create(context, CLUSTER)

    def solve_while_pruned(planner: str, problem: PlanningProblem) -> Answer:
        with context.database.write() as connection:
            connection.execute(delete(table))
        return solve_here(planner, problem)

    asked = PlanRequest.model_validate(request_document())
    with pytest.raises(ConflictError, match="removed"):
        plans.create(replace(context, solve=solve_while_pruned), asked)
    assert _rows(context)["plans"] == 0


@pytest.mark.each_case
@pytest.mark.parametrize("older_than_s", [0, -1, float("nan"), float("inf"), 1e15])
def test_an_age_that_is_none_is_refused(older_than_s: float) -> None:
    with pytest.raises(InvalidInputError, match="older_than"):
        Rule(older_than_s=older_than_s)


@pytest.mark.each_case
def test_the_command_says_what_it_removes(database_url: str) -> None:
    arguments = ("db", "prune", "--older-than", "90d", "--database", database_url)
    assert "would remove 0 runs, 0 jobs, 0 plans" in pipeplan(*arguments, "--dry-run").stderr
    assert pipeplan(*arguments, "--json").stdout.startswith('{"dry_run": false, "removed": {"runs": 0')


@pytest.mark.each_case
@pytest.mark.parametrize("age", ["90", "d", "-1d", "1.5d", "90 days", "0d"])
def test_an_age_that_cannot_be_read_is_a_sentence(sqlite_url: str, age: str) -> None:
    answer = pipeplan("db", "prune", "--older-than", age, "--database", sqlite_url)
    assert answer.returncode == 2
    assert "must be a number and one of s, m, h, d, w, y" in answer.stderr or "No such option" in answer.stderr


def _keep(context: Context, *rules: str) -> dict[str, int]:
    return retention.prune(context, parse_rules(rules))


def test_beyond_a_number_the_oldest_go(context: Context, clock: Clock) -> None:
    plan_id = store_plan(context)
    made = [_run(context, plan_id) for _ in range(3)]
    assert _keep(context, "runs=2") == {"runs": 1}
    assert [_is_there(runs.get, context, run_id) for run_id in made] == [False, True, True]
    assert _keep(context, "runs=2", "runs=1d") == {"runs": 0}
    clock.advance(2 * DAY_S)
    assert _keep(context, "runs=2", "runs=1d") == {"runs": 2}


@pytest.mark.parametrize("number", [0, 5])
def test_a_number_removes_nothing_that_is_needed(context: Context, http: TestClient, number: int) -> None:
    first, second = store_plan(context), store_plan(context, batch_size=32)
    for plan_id in (first, second):
        http.put("/v1/aliases/gpt-prod", json={"plan_id": plan_id}).raise_for_status()
    rules = [f"{noun}={number}" for noun in NOTHING if noun != "events"]
    assert sum(_keep(context, *rules).values()) == 0  # the alias's plan, the one before, and what they were made from
    assert _is_there(plans.get, context, first)
    assert _is_there(plans.get, context, second)


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_run_that_can_be_resumed_stays_unless_a_rule_names_it(context: Context, clock: Clock, end: str) -> None:
    job = jobs.enqueue(context, run_task(store_plan(context)))
    lease = jobs.lease(context, ANY_WORK)
    assert lease is not None
    if end == "failed":
        jobs.fail(context, job.id, Failure(token=lease.token, error="no"))
    else:
        jobs.cancel(context, job.id)
    clock.advance(91 * DAY_S)
    assert _prune(context, 90) == NOTHING | {"events": 4}
    assert jobs.retry(context, job.id).state == "queued"
    jobs.cancel(context, job.id)
    clock.advance(91 * DAY_S)
    assert _keep(context, "abandoned-runs=90d") == {"abandoned-runs": 1}
    assert _prune(context, 90) == NOTHING | {"plans": 1, "profiles": 1, "clusters": 1}


def test_what_was_asked_for_again_is_as_young_as_that(context: Context, clock: Clock) -> None:
    """Somebody was just answered with its id: it must not go a moment later."""
    store_plan(context)
    clock.advance(100 * DAY_S)
    store_plan(context)
    assert _prune(context, 90) == NOTHING
    clock.advance(91 * DAY_S)
    assert _prune(context, 90) == NOTHING | {"plans": 1, "profiles": 1, "clusters": 1}


def test_events_go_by_age_and_number_and_a_followers_numbers_go_on(context: Context, clock: Clock) -> None:
    job = jobs.enqueue(context, run_task(store_plan(context)))
    lease = jobs.lease(context, ANY_WORK)
    assert lease is not None
    jobs.fail(context, job.id, Failure(token=lease.token, error="no"))
    clock.advance(2 * DAY_S)
    assert _keep(context, "events=1d") == {"events": 4}  # queued and leased, of the job and of its run
    assert _keep(context, "events=0") == {"events": 0}  # the newest of each stays
    subject: Subject = ("job", job.id)
    assert [(event.number, event.kind) for event in followed.after(context, subject, 0)] == [(3, "failed")]
    jobs.retry(context, job.id)
    assert [event.number for event in followed.after(context, subject, 3)] == [4]


def test_tokens_that_are_over_go_with_their_sessions_and_valid_ones_stay(context: Context, clock: Clock) -> None:
    made = {
        name: tokens.create(context, NewToken(name=name, scopes=("admin",), expires_in_s=life_s), by="test")
        for name, life_s in (("valid", None), ("expired", DAY_S), ("revoked", None))
    }
    key = tokens.token_key(context)
    tokens.open_session(context, key, Identity(name="expired", scopes=frozenset(), token_id=made["expired"].id))
    tokens.revoke(context, made["revoked"].id)
    clock.advance(30 * DAY_S)
    assert _keep(context, "tokens=30d") == {"tokens": 0}
    clock.advance(2 * DAY_S)
    assert _keep(context, "tokens=30d") == {"tokens": 2}
    assert [token.name for token in tokens.newest(context, Cut()).items] == ["valid"]


def test_one_service_at_a_time_takes_its_turn_when_it_is_due(context: Context, clock: Clock) -> None:
    _run(context, store_plan(context))
    clock.advance(91 * DAY_S)
    rules, stop = parse_rules(["runs=90d", "jobs=90d"]), threading.Event()
    held = chores.claim(context, retention.CHORE, 3600.0)
    assert held is not None
    assert retention.take_turn(context, rules, 3600.0, stop) is None
    clock.advance(chores.HELD_S + 1)  # that service has died: another takes over
    swept = retention.take_turn(context, rules, 3600.0, stop)
    assert swept is not None
    assert swept.done
    assert swept.removed == {"runs": 1, "jobs": 0}
    with context.database.write() as connection:
        assert not chores.is_held(connection, held, clock())
    chores.end(context, held, clock())  # it lives after all, and ends what is not its own any more
    assert retention.take_turn(context, rules, 3600.0, stop) is None
    clock.advance(3601)
    assert retention.take_turn(context, rules, 3600.0, stop) is not None
    assert 'pipeplan_retention_removed_total{noun="runs"} 1.0' in context.metrics.text().decode()
    assert 'pipeplan_chores_total{chore="retention",outcome="done"} 2.0' in context.metrics.text().decode()


def test_a_service_whose_turn_was_taken_over_removes_nothing_more(context: Context, clock: Clock) -> None:
    run_id = _run(context, store_plan(context))
    clock.advance(91 * DAY_S)
    held = chores.claim(context, retention.CHORE, 3600.0)
    assert held is not None
    clock.advance(chores.HELD_S + 1)
    assert chores.claim(context, retention.CHORE, 3600.0) is not None
    removed: dict[str, int] = {}
    with pytest.raises(PipeplanError, match="taken over"):
        retention.sweep(retention.Turn(context=context, claim=held), parse_rules(["runs=90d"]), removed)
    assert removed == {"runs": 0}
    assert _is_there(runs.get, context, run_id)


def test_a_clock_that_is_set_forward_and_back_makes_nothing_old(context: Context, clock: Clock) -> None:
    """The first turn after the clock had jumped removed what was stored an hour before."""
    run_id = _run(context, store_plan(context))
    rules, stop = parse_rules(["runs=90d"]), threading.Event()
    assert retention.take_turn(context, rules, 3600.0, stop) is not None
    clock.advance(400 * DAY_S)
    swept = retention.take_turn(context, rules, 3600.0, stop)
    assert swept is not None
    assert (swept.removed, swept.done) == ({}, False)
    assert retention.take_turn(context, rules, 3600.0, stop) is None
    clock.advance(-400 * DAY_S)
    assert retention.take_turn(context, rules, 3600.0, stop) is not None
    assert _is_there(runs.get, context, run_id)


def test_a_turn_that_is_long_overdue_removes_one_interval_later(context: Context, clock: Clock) -> None:
    run_id = _run(context, store_plan(context))
    rules, stop = parse_rules(["runs=90d"]), threading.Event()
    assert retention.take_turn(context, rules, 3600.0, stop) is not None
    clock.advance(91 * DAY_S)
    assert retention.take_turn(context, rules, 3600.0, stop) is not None
    assert _is_there(runs.get, context, run_id)
    clock.advance(3601)
    swept = retention.take_turn(context, rules, 3600.0, stop)
    assert swept is not None
    assert swept.removed == {"runs": 1}


def test_a_turn_that_is_stopped_goes_on_with_the_next_one(context: Context, clock: Clock) -> None:
    _run(context, store_plan(context))
    clock.advance(91 * DAY_S)
    stop = threading.Event()
    stop.set()
    swept = retention.take_turn(context, parse_rules(["runs=90d"]), 3600.0, stop)
    assert swept is not None
    assert not swept.done
    clock.advance(retention.NEXT_TURN_S + 1)
    swept = retention.take_turn(context, parse_rules(["runs=90d"]), 3600.0, threading.Event())
    assert swept is not None
    assert swept.removed == {"runs": 1}


def test_no_write_is_much_longer_than_it_should_be(context: Context) -> None:
    turn = retention.Turn(context=context, trial=None)
    turn.stop.set()  # without the pauses
    for _ in range(10):
        turn.rest(retention.WRITE_S / 2)
    assert turn.rows == retention.MOST_ROWS
    turn.rest(2 * retention.WRITE_S)
    assert turn.rows == retention.MOST_ROWS // 2


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("runs", "age such as 90d"),
        ("runs=", "age such as 90d"),
        ("runs=-1", "age such as 90d"),
        ("runs=1.5d", "age such as 90d"),
        ("run=90d", "runs, abandoned-runs, jobs"),
        ("=90d", "runs, abandoned-runs, jobs"),
        ("runs=1d,runs=2d", "one age for runs"),
        ("runs=1,runs=2", "one number for runs"),
    ],
)
def test_a_rule_that_cannot_be_read_is_named(rule: str, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason) as caught:
        load_settings(retention=rule)
    assert caught.value.field == "retention"


@pytest.mark.each_case
def test_the_command_goes_by_its_options_or_by_the_setting(sqlite_url: str) -> None:
    prune = ("db", "prune", "--database", sqlite_url)
    nothing = pipeplan(*prune)
    assert nothing.returncode == 2
    assert "PIPEPLAN_RETENTION" in nothing.stderr
    said = pipeplan(*prune, "--json", PIPEPLAN_RETENTION="runs=90d,events=1000")
    assert json.loads(said.stdout)["removed"] == {"runs": 0, "events": 0}
    said = pipeplan(*prune, "--json", "--keep", "5", "--only", "jobs", "--abandoned")
    assert json.loads(said.stdout)["removed"] == {"abandoned-runs": 0, "jobs": 0}
    assert pipeplan(*prune, "--only", "jobs").returncode == 2
    assert "must be one of runs" in pipeplan(*prune, "--keep", "1", "--only", "job").stderr
