"""Plan jobs on real services: nothing is lost with a process, cancelling ends the search, several share the work."""

import asyncio
import signal
import subprocess

import pytest

from pipeplan.client.client import Client
from pipeplan.documents.plan import Plan
from pipeplan.errors import DeadlineError, ServiceError
from pipeplan.protocol.jobs import Job, PlanTask
from pipeplan.protocol.plans import PlanRequest
from planner_service.plans.jobs import PlanRunner
from planner_service.plans.solver import FunctionSolver, solver_pool
from planner_service.platform.context import Context
from tests.planner_service.answers import halve
from tests.planner_service.long_problem import stored_request
from tests.planner_service.servers import forked, served, serving
from tests.waiting import PATIENCE_S, wait_until

SHORT_LEASE = {"PIPEPLAN_LEASE_S": "1"}
SHORT_S = 0.3
"""Of search, in the solver's own seconds; it takes about two until it starts."""


def _solvers(pid: int) -> list[int]:
    """The solvers that a service has started. It may have a parser of large documents, too."""
    said = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in said.stdout.splitlines() if "solver_process" in line]


def _enqueue(service: Client, request: PlanRequest) -> Job:
    return service.enqueue_job(PlanTask(request=request))


@pytest.mark.each_case
def test_a_service_that_is_killed_while_it_plans_ends_with_the_plan_after_its_start(database_url: str) -> None:
    with forked(database_url, **SHORT_LEASE) as (url, fork), Client(url) as service:
        job = _enqueue(service, stored_request(service, SHORT_S))
        assert next(event.kind for event in service.follow_job(job.id, after=1)) == "leased"
        solvers = _solvers(fork.pid)
        fork.process.kill()
        fork.process.join()
        wait_until(lambda: not any(_is_alive(pid) for pid in solvers))
    with served(database_url, **SHORT_LEASE) as url, Client(url) as service:
        kinds = [event.kind for event in service.follow_job(job.id) if event.kind != "progress"]
        ended = service.job(job.id)
        assert kinds == ["queued", "leased", "queued", "leased", "succeeded"]
        assert (ended.state, ended.attempts) == ("succeeded", 2)
        assert isinstance(service.plan(str(ended.plan_id)), Plan)


def _is_alive(pid: int) -> bool:
    return subprocess.run(["ps", "-o", "pid=", "-p", str(pid)], capture_output=True).returncode == 0


@pytest.mark.each_case
def test_a_cancelled_plan_ends_its_process_through_whichever_service(database_url: str) -> None:
    one = {"PIPEPLAN_SOLVER_PROCESSES": "1"}
    with (
        forked(database_url, **one) as (url, first),
        forked(database_url, **one) as (other_url, second),
        Client(url) as service,
        Client(other_url) as other,
    ):
        request = stored_request(service, 60.0)
        made = [_enqueue(service, request) for _ in range(2)]
        wait_until(lambda: {service.job(job.id).state for job in made} == {"leased"})
        assert len({service.job(job.id).agent for job in made}) == 2
        wait_until(lambda: len(_solvers(first.pid)) == len(_solvers(second.pid)) == 1)
        for job in made:
            other.cancel_job(job.id)
        wait_until(lambda: _solvers(first.pid) == _solvers(second.pid) == [])
        assert [event.kind for event in service.follow_job(made[0].id)][-1] == "cancelled"


@pytest.mark.campaign
def test_the_client_waits_for_a_long_plan_and_hears_how_far_it_is(sqlite_url: str) -> None:
    heard: list[Job] = []
    with serving(sqlite_url, PIPEPLAN_SOLVE_DEADLINE_S="0.2") as (url, process), Client(url) as service:
        request = stored_request(service, 2.0)  # long enough for plans to be found on the way
        with pytest.raises(DeadlineError, match="respond-async"):
            service.create_plan(request)
        wait_until(lambda: _solvers(process.pid) == [])
        made = service.create_plan(request, wait_s=0, on_progress=heard.append)
    assert isinstance(made.answer, Plan)
    assert [job.state for job in heard][-1] == "succeeded"
    assert any(job.progress is not None and "samples/s" in job.progress.message for job in heard)


def test_an_interrupt_of_the_client_cancels_its_plan(sqlite_url: str) -> None:
    def interrupt(_job: Job) -> None:
        raise KeyboardInterrupt

    with forked(sqlite_url) as (url, fork), Client(url) as service:
        with pytest.raises(KeyboardInterrupt):
            service.create_plan(stored_request(service, 60.0), wait_s=1, on_progress=interrupt)
        (job,) = service.jobs()
        assert job.state == "cancelled"
        wait_until(lambda: _solvers(fork.pid) == [])


@pytest.mark.campaign
def test_a_service_that_is_stopped_hands_its_plan_back_and_a_client_hears_of_it(sqlite_url: str) -> None:
    settings = {"PIPEPLAN_SHUTDOWN_S": "1"}
    with serving(sqlite_url, **settings) as (url, process), Client(url) as service:
        job = _enqueue(service, stored_request(service, SHORT_S))
        assert next(event.kind for event in service.follow_job(job.id, after=1)) == "leased"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        with pytest.raises(ServiceError):
            service.job(job.id)
    with served(sqlite_url, **settings) as url, Client(url) as service:
        assert [event.kind for event in service.follow_job(job.id)][-1] == "succeeded"


def test_a_runner_that_hears_of_news_while_it_is_stopped_stops(context: Context) -> None:
    """The stop was once lost where both came in one turn of the loop, and the service's end waited for it for good."""
    runner = PlanRunner(context, solver_pool(lambda: FunctionSolver(halve), solvers=1, queue=1))

    async def stop() -> bool:
        running = asyncio.create_task(runner.run())
        await asyncio.sleep(0.2)  # it has seen that there is no job, and waits for one
        runner.poke()
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=PATIENCE_S)
        return running in done

    assert asyncio.run(stop())
