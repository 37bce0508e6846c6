"""`pipeplan-agent start` beside `pipeplan serve`, both real processes: jobs, faults, and nothing left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipeplan.client.client import Client
from pipeplan.documents.files import dump, parse, plan_document
from pipeplan.planners.problem import Options
from pipeplan.protocol.jobs import Job, ProfileTask, Progress, RunResult
from pipeplan.protocol.plans import PlanRequest
from tests.planner_service.servers import served
from tests.processes import free_port, processes_naming
from tests.waiting import PATIENCE_S, wait_until
from tests.worker_agent.agent.nodes import (
    DATA,
    ENDLESS,
    MLP,
    SLEEP,
    run_task,
    store_plan,
    task_process,
    working,
)
from tests.worker_agent.runtime.plans import make_plan
from worker_agent.agent.task import perform, write_task
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.manifest import seal, stage_files
from worker_agent.runtime.resume import resumed

PLAN = make_plan("1f1b", (0, 2, 4))


@dataclass(frozen=True)
class Site:
    """A service with one agent."""

    service: Client
    work_dir: Path
    agent_log: Path

    def folder(self, job: Job) -> Path:
        """Where the agent keeps a job's files."""
        return self.work_dir / job.id

    def training(self, job: Job) -> bool:
        """Whether a run has told of its first steps."""
        progress = self.service.job(job.id).progress
        return progress is not None and progress.done > 0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One service and one agent for the tests that leave both as they were."""
    folder = tmp_path_factory.mktemp("site")
    with (
        served(folder / "service.sqlite3") as url,
        Client(url) as service,
        working(url, folder / "work") as (_, log),
    ):
        yield Site(service, folder / "work", log)


@pytest.mark.campaign  # the demo does it as well
def test_an_agent_profiles_a_model_and_runs_the_plan_that_is_made_from_it(site: Site) -> None:
    service, told = site.service, list[Progress | None]()
    task = ProfileTask(model=MLP, data=DATA, microbatch_sizes=(2,), devices=2, warm_up_rounds=1, rounds=1, seconds=0)
    job = service.enqueue_job(task)
    profiled = service.wait_for_job(job.id, on_progress=lambda job: told.append(job.progress), timeout_s=PATIENCE_S)
    assert profiled.state == "succeeded", profiled.error
    assert told[-1] is not None and told[-1].done == told[-1].total == 4
    profile_id, cluster_id = str(profiled.profile_id), str(profiled.cluster_id)
    assert len(service.profile(profile_id).blocks) == 4
    assert service.cluster(cluster_id).devices == 2

    options = Options(stages=2, schedule="1f1b")
    request = PlanRequest(
        profile_id=profile_id, cluster_id=cluster_id, planner="pipedream-2bw", batch_size=8, options=options
    )
    job = service.enqueue_job(run_task(str(service.create_plan(request).plan_id), steps=3))
    ran = service.wait_for_job(job.id, timeout_s=PATIENCE_S)
    assert ran.state == "succeeded", ran.error
    run = service.run(str(ran.run_id))
    assert run.report is not None
    assert (run.report.first_step, run.report.steps, len(run.report.losses)) == (0, 3, 3)
    assert [lane.stage for lane in service.run_timeline(run.id).lanes] == [0, 1]
    assert ran.progress is not None
    assert (ran.progress.done, ran.progress.total) == (3, 3)
    assert ran.progress.message.startswith("training, loss ")


@pytest.mark.campaign
def test_a_cancelled_runs_processes_end(site: Site) -> None:
    job = site.service.enqueue_job(run_task(store_plan(site.service), model=SLEEP, steps=ENDLESS))
    wait_until(lambda: site.training(job))
    assert len(processes_naming(site.folder(job))) == 3  # the task and two ranks
    site.service.cancel_job(job.id)
    wait_until(lambda: not processes_naming(site.folder(job)))
    assert site.service.job(job.id).state == "cancelled"
    wait_until(lambda: f"job {job.id}: cancelled" in site.agent_log.read_text())


@pytest.mark.campaign
def test_a_job_whose_process_is_killed_fails_in_a_sentence_and_its_ranks_end(site: Site) -> None:
    job = site.service.enqueue_job(run_task(store_plan(site.service), model=SLEEP, steps=ENDLESS))
    wait_until(lambda: site.training(job))
    os.kill(task_process(site.folder(job)), signal.SIGKILL)
    ended = site.service.wait_for_job(job.id, timeout_s=PATIENCE_S)
    assert (ended.state, ended.error) == ("failed", "the job's process was killed by SIGKILL")
    wait_until(lambda: not processes_naming(site.folder(job)))


@pytest.mark.campaign
def test_a_job_that_fails_leaves_the_agent_to_the_next_one(site: Site) -> None:
    for model, sentence in (
        ("worker_agent.models.presets:mlp?colour=red", "model: must fit the parameters of worker_agent.models"),
        ("os:system", "model: must be a factory that this agent's operator allows"),
    ):
        job = site.service.enqueue_job(ProfileTask(model=model, microbatch_sizes=(1,)))
        ended = site.service.wait_for_job(job.id, timeout_s=PATIENCE_S)
        assert ended.state == "failed"
        assert str(ended.error).startswith(sentence)


def test_a_stopped_agent_leaves_its_job_to_the_next_which_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    work_dir = tmp_path / "work"
    with served(tmp_path / "service.sqlite3", PIPEPLAN_LEASE_S="2") as url, Client(url) as service:
        task = run_task(store_plan(service, stages=1), model=SLEEP, steps=24, checkpoint_every=4)
        job = service.enqueue_job(task)
        with working(url, work_dir) as (agent, log):
            checkpoint = work_dir / job.id / "out" / "checkpoints" / "step-4" / "manifest.json"
            wait_until(checkpoint.exists)
            agent.send_signal(signal.SIGTERM)
            assert agent.wait() == 0, log.read_text()
        assert not processes_naming(work_dir)
        wait_until(lambda: service.job(job.id).state == "queued")
        with working(url, work_dir, name="node-2"):
            ended = service.wait_for_job(job.id, timeout_s=PATIENCE_S)
        assert (ended.state, ended.agent, ended.attempts, ended.fence) == ("succeeded", "node-2", 1, 2), ended.error
        report = service.run(str(ended.run_id)).report
        assert report is not None
        assert report.first_step > 4, "the checkpoint of the batch at which the agent was stopped"
        assert report.first_step + report.steps == 24
        losses = (*report.earlier_losses, *report.losses)
        assert (report.first_loss_step, len(losses)) == (0, 24), "those before the agent's end as well"


def test_an_agent_that_starts_before_the_service_waits_for_it(tmp_path: Path) -> None:
    port = free_port()
    with working(f"http://127.0.0.1:{port}", tmp_path / "work") as (agent, log):
        wait_until(lambda: "waiting for the service" in log.read_text())
        # after its start a service gives up no job before a lease's length has passed
        with (
            served(tmp_path / "service.sqlite3", "--port", str(port), PIPEPLAN_LEASE_S="1") as url,
            Client(url) as service,
        ):
            job = service.enqueue_job(ProfileTask(model="os:system", microbatch_sizes=(1,)))
            assert service.wait_for_job(job.id, timeout_s=PATIENCE_S).state == "failed"
            assert log.read_text().count("waiting for the service") == 1
            assert agent.poll() is None


def test_an_agent_that_cannot_write_its_folder_says_so_to_the_job_and_goes_on(tmp_path: Path) -> None:
    """What an operating system refuses once ended the agent with a traceback, and its job ran out of leases."""
    (tmp_path / "work").write_text("a file, not a folder")
    with (
        served(tmp_path / "service.sqlite3") as url,
        Client(url) as service,
        working(url, tmp_path / "work") as (agent, _),
    ):
        for _ in range(2):
            job = service.enqueue_job(ProfileTask(model=MLP, microbatch_sizes=(1,), seconds=0))
            ended = service.wait_for_job(job.id, timeout_s=PATIENCE_S)
            assert ended.state == "failed"
            assert str(ended.error).startswith("the agent failed: NotADirectoryError: ")
        assert agent.poll() is None


def do_task(folder: Path) -> RunResult:
    """Does a folder's task as an agent has it done."""
    command = [sys.executable, "-m", "worker_agent.agent.task", str(folder), str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return parse(RunResult, (folder / "result.json").read_text())


@pytest.mark.campaign
def test_a_job_whose_last_checkpoint_was_written_goes_on_from_the_one_before(tmp_path: Path) -> None:
    """It once failed: steps: must be above the 4 steps that the checkpoint has done."""
    write_task(tmp_path, run_task("p", steps=4, checkpoint_every=2), dump(plan_document(PLAN)))
    first = do_task(tmp_path).report
    (tmp_path / "result.json").unlink()
    again = do_task(tmp_path).report
    assert (first.first_step, first.steps) == (0, 4)
    assert (again.first_step, again.steps) == (2, 2)
    assert again.losses == first.losses[2:]


def test_a_job_whose_only_checkpoint_is_of_the_last_step_starts_over(tmp_path: Path) -> None:
    job = RunJob(plan=PLAN, model=MLP, data=DATA, steps=4, out=str(tmp_path))
    checkpoint = tmp_path / "checkpoints" / "step-4"
    checkpoint.mkdir(parents=True)
    for stage in (0, 1):
        for name in stage_files(stage):
            (checkpoint / name).write_bytes(b"whole")
        seal(checkpoint, job.manifest(4), stage)
    assert resumed(job, before=4) == job
    assert resumed(replace(job, steps=5), before=5).first_step == 4


def test_a_result_that_an_earlier_attempt_could_not_report_is_reported(tmp_path: Path) -> None:
    write_task(tmp_path, run_task("p"), "no plan: nothing may be executed")
    (tmp_path / "result.json").write_text("what came of it")
    write_task(tmp_path, run_task("p"), "no plan: nothing may be executed")
    perform(tmp_path)
    assert (tmp_path / "result.json").read_text() == "what came of it"


def test_a_process_whose_parent_died_before_it_looked_ends_all_the_same() -> None:
    """A parent that died during a rank's slow imports was once not missed: the rank stayed."""
    with subprocess.Popen(["true"]) as parent:
        parent.wait()
    orphan = f"from worker_agent.engine.processes import exit_with_parent; exit_with_parent({parent.pid}); input()"
    command = [sys.executable, "-c", orphan]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait() == 1
