"""Runs over several nodes: two agents with a device each on one machine, real torchrun, gloo over loopback, faults."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeplan.client.client import Client
from pipeplan.errors import ServiceError
from pipeplan.protocol.jobs import Job, LinksTask
from tests.planner_service.servers import served, serving
from tests.processes import free_port, processes_naming
from tests.waiting import PATIENCE_S, wait_until
from tests.worker_agent.agent.nodes import ENDLESS, SLEEP, run_task, store_plan, working

LEASE_S = "3"
NODES = ("node-a", "node-b")


@dataclass
class Site:
    """A service that can be restarted, and two agents that share a folder."""

    url: str
    folder: Path
    service: Client
    agents: dict[str, subprocess.Popen[bytes]]

    @property
    def shared(self) -> Path:
        """Where runs over both keep their files."""
        return self.folder / "shared"

    def processes(self, name: str) -> list[int]:
        """The processes of a node's jobs."""
        return [pid for pid in processes_naming(self.folder / name) if pid != self.agents[name].pid]

    def run(self, steps: int, *, checkpoint_every: int = 0) -> Job:
        """Enqueues a run of two stages over both nodes."""
        task = run_task(store_plan(self.service), model=SLEEP, steps=steps, checkpoint_every=checkpoint_every)
        return self.service.enqueue_job(task.model_copy(update={"nodes": 2}))

    def done(self, job: Job) -> int:
        """The steps of a run that it has told of."""
        try:
            progress = self.service.job(job.id).progress
        except ServiceError:
            return 0
        return progress.done if progress else 0


def _options(folder: Path) -> tuple[str, ...]:
    return ("--devices", "1", "--shared-dir", str(folder / "shared"))


@contextmanager
def two_nodes(folder: Path, url: str) -> Iterator[Site]:
    """Both agents at work."""
    with ExitStack() as stack:
        service = stack.enter_context(Client(url))
        agents = {
            name: stack.enter_context(working(url, folder / name, *_options(folder), name=name))[0] for name in NODES
        }
        yield Site(url, folder, service, agents)


@pytest.mark.campaign
def test_a_plan_of_two_stages_runs_on_two_nodes_and_a_links_job_measures_between_them(tmp_path: Path) -> None:
    with (
        served(tmp_path / "service.sqlite3", PIPEPLAN_LEASE_S=LEASE_S) as url,
        two_nodes(tmp_path, url) as site,
    ):
        links = site.service.enqueue_job(LinksTask(devices=1, nodes=2, repeats=2))
        job = site.run(3)
        ended = site.service.wait_for_job(job.id, timeout_s=PATIENCE_S)
        assert (ended.state, ended.agents, ended.attempts) == ("succeeded", NODES, 1), ended.error
        report = site.service.run(str(ended.run_id)).report
        assert report is not None
        assert (report.steps, len(report.losses), [rank.rank for rank in report.ranks]) == (3, 3, [0, 1])
        measured = site.service.wait_for_job(links.id, timeout_s=PATIENCE_S)
        assert measured.state == "succeeded", measured.error
        (level,) = site.service.cluster(str(measured.cluster_id)).levels
        assert level.size == 2
        assert level.bandwidth_bytes_per_s > 0
        assert level.latency_s > 0


def test_a_node_that_dies_ends_the_attempt_and_the_gang_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    with (
        served(tmp_path / "service.sqlite3", PIPEPLAN_LEASE_S=LEASE_S) as url,
        two_nodes(tmp_path, url) as site,
    ):
        job = site.run(12, checkpoint_every=4)
        wait_until((site.shared / job.id / "out" / "checkpoints" / "step-4" / "manifest.json").exists)
        site.agents["node-b"].kill()
        wait_until(lambda: not processes_naming(tmp_path / "node-b"))
        wait_until(lambda: not site.processes("node-a"))
        wait_until(lambda: site.service.job(job.id).state == "queued")
        with working(url, tmp_path / "node-c", *_options(tmp_path), name="node-c"):
            ended = site.service.wait_for_job(job.id, timeout_s=PATIENCE_S)
        assert (ended.state, ended.attempts, ended.agents) == ("succeeded", 2, ("node-a", "node-c")), ended.error
        report = site.service.run(str(ended.run_id)).report
        assert report is not None
        assert report.first_step >= 4
        assert report.first_step + report.steps == 12


@pytest.mark.campaign
def test_a_gang_trains_on_while_the_service_restarts(tmp_path: Path) -> None:
    port = free_port()
    database, options = tmp_path / "service.sqlite3", ("--port", str(port))
    with ExitStack() as stack:
        url, process = stack.enter_context(serving(database, *options, PIPEPLAN_LEASE_S=LEASE_S))
        site = stack.enter_context(two_nodes(tmp_path, url))
        job = site.run(20)
        wait_until(lambda: site.done(job) > 0)
        process.send_signal(signal.SIGKILL)
        process.wait()
        ranks = {name: site.processes(name) for name in NODES}
        with subprocess.Popen(["sleep", str(1.5 * float(LEASE_S))]) as outage:  # longer than a lease
            outage.wait()
        assert {name: site.processes(name) for name in NODES} == ranks
        stack.enter_context(serving(database, *options, PIPEPLAN_LEASE_S=LEASE_S))
        ended = site.service.wait_for_job(job.id, timeout_s=PATIENCE_S)
        assert (ended.state, ended.attempts, ended.fence) == ("succeeded", 1, 1), ended.error


@pytest.mark.campaign
def test_nodes_that_are_cut_off_stop_before_their_job_is_given_to_others_and_begin_again_together(
    tmp_path: Path,
) -> None:
    """The service's process is stopped, not ended: connections are taken and nobody answers, as across a partition."""
    with (
        serving(tmp_path / "service.sqlite3", PIPEPLAN_LEASE_S=LEASE_S) as (url, process),
        two_nodes(tmp_path, url) as site,
    ):
        job = site.run(ENDLESS)
        wait_until(lambda: site.done(job) > 0)
        process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: not any(site.processes(name) for name in NODES))
        finally:
            process.send_signal(signal.SIGCONT)
        logs = [tmp_path / f"{name}.{name}.log" for name in NODES]
        # Where one node stops a moment before the other, the other's ranks may end first, for want of their peers.
        wait_until(lambda: any("the service was out of reach" in log.read_text() for log in logs))
        # A part that stopped is never done again under the same lease: the other one may have ended under it.
        wait_until(lambda: site.service.job(job.id).fence > 1 and site.done(job) > 0)
        assert site.service.job(job.id).state == "leased"
        site.service.cancel_job(job.id)


@pytest.mark.campaign
def test_cancelling_a_gang_ends_the_processes_on_all_of_its_nodes(tmp_path: Path) -> None:
    with (
        served(tmp_path / "service.sqlite3", PIPEPLAN_LEASE_S=LEASE_S) as url,
        two_nodes(tmp_path, url) as site,
    ):
        job = site.run(ENDLESS)
        wait_until(lambda: site.done(job) > 0)
        assert all(site.processes(name) for name in NODES)
        site.service.cancel_job(job.id)
        wait_until(lambda: not any(site.processes(name) for name in NODES))
        assert site.service.job(job.id).state == "cancelled"
        assert all(agent.poll() is None for agent in site.agents.values())
