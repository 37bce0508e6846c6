"""Retention: folders of ended jobs go by age, number and bytes; nothing that a job may resume from ever does."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.cli.console import run_app
from pipeplan.client.client import Client
from pipeplan.errors import NotFoundError, ServiceError
from pipeplan.protocol.jobs import JobState, LeaseRequest, LinksResult, LinksTask
from planner_service.overview.openapi import CLUSTER
from tests.planner_service.servers import environment, served
from tests.waiting import wait_until
from tests.worker_agent.agent.nodes import run_task, store_plan, working
from worker_agent.agent.child import Mark
from worker_agent.agent.client import AgentClient
from worker_agent.agent.limits import folder_bytes
from worker_agent.agent.retention import Bounds, JobFolder, Retention, finish, remove, surplus
from worker_agent.agent.settings import AgentSettings
from worker_agent.agent.spool import completion, new_report_id
from worker_agent.cli import app

NOW_S = 1_000_000.0
STATES: tuple[JobState | None, ...] = ("queued", "leased", "succeeded", "failed", "cancelled", "dead", None)
"""What a service may say of a job; None: it does not know the job."""


def _id(number: int) -> str:
    return f"{number:032x}"


def _made(work_dir: Path, name: str, *, age_s: float = 0.0, size: int = 1) -> Path:
    folder = work_dir / name
    (folder / "out").mkdir(parents=True)
    (folder / "out" / "weights").write_bytes(b"x" * size)
    for path in (folder / "out" / "weights", folder / "out", folder):
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return folder


def _asking(states: Mapping[str, JobState | None], job_id: str) -> JobState:
    state = states[job_id]
    if state is None:
        raise NotFoundError(f"there is no job {job_id}")
    return state


def _names(folders: list[JobFolder]) -> list[str]:
    return [folder.path.name for folder in folders]


@given(
    found=st.lists(st.tuples(st.sampled_from(STATES), st.integers(0, 9)), max_size=8),
    age_s=st.none() | st.integers(0, 9),
    most=st.none() | st.integers(0, 8),
    abandons=st.booleans(),
)
def test_what_goes_has_ended_for_good_and_what_stays_fits_the_bounds(
    tmp_path_factory: pytest.TempPathFactory,
    found: list[tuple[JobState | None, int]],
    age_s: int | None,
    most: int | None,
    abandons: bool,
) -> None:
    work_dir = tmp_path_factory.mktemp("work")
    states = {_id(number): state for number, (state, _) in enumerate(found)}
    ages = {_id(number): age for number, (_, age) in enumerate(found)}
    for name, age in ages.items():
        _made(work_dir, name, age_s=age)
    kept = Bounds(age_s=age_s, folders=most, abandons=abandons)
    remove(surplus(work_dir, lambda job_id: _asking(states, job_id), kept, NOW_S))
    left = {path.name for path in work_dir.iterdir()}
    gone = ("succeeded", "failed", "cancelled", "dead", None) if abandons else ("succeeded",)
    over = {name for name, state in states.items() if state in gone}
    assert states.keys() - over <= left
    newest = sorted(over, key=lambda name: (ages[name], name))[: len(over) if most is None else most]
    assert left & over == {name for name in newest if age_s is None or ages[name] <= age_s}
    shutil.rmtree(work_dir)


def test_the_newest_folders_stay_that_together_fit_the_bytes(tmp_path: Path) -> None:
    for number in range(4):
        _made(tmp_path, _id(number), age_s=number, size=100_000)
    most = 2 * folder_bytes(tmp_path / _id(0))
    going = surplus(tmp_path, lambda _: "succeeded", Bounds(bytes=most), NOW_S)
    assert _names(going) == [_id(2), _id(3)]
    assert sum(folder.bytes for folder in going) == most


def test_a_gangs_attempts_go_with_their_job_and_what_is_no_jobs_folder_stays(tmp_path: Path) -> None:
    _made(tmp_path, f"{_id(1)}-1")
    _made(tmp_path, f"{_id(2)}-7")
    _made(tmp_path, "spool")
    elsewhere = _made(tmp_path, "elsewhere")
    (tmp_path / _id(3)).symlink_to(elsewhere)
    (tmp_path / _id(4)).write_text("a file")
    states: dict[str, JobState | None] = {_id(1): "succeeded", _id(2): "leased"}
    assert _names(surplus(tmp_path, lambda job_id: _asking(states, job_id), Bounds(folders=0), NOW_S)) == [
        f"{_id(1)}-1"
    ]


def test_a_folder_stays_while_a_process_of_its_job_lives(tmp_path: Path) -> None:
    folder = _made(tmp_path, _id(1))
    mark = Mark(work_dir=tmp_path, agent=os.getpid(), job=_id(1), fence=1)
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **mark.environment()}
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert surplus(tmp_path, lambda _: "succeeded", Bounds(folders=0), NOW_S) == []
        process.communicate(b"\n")
    assert [found.path for found in surplus(tmp_path, lambda _: "succeeded", Bounds(folders=0), NOW_S)] == [folder]


def test_nothing_goes_while_the_service_does_not_answer(tmp_path: Path) -> None:
    def away(_job_id: str) -> JobState:
        raise ServiceError("away")

    _made(tmp_path, _id(1), age_s=9)
    with pytest.raises(ServiceError):
        surplus(tmp_path, away, Bounds(folders=0), NOW_S)


def test_a_removal_that_was_killed_in_the_middle_leaves_no_half_folder_and_is_ended_later(tmp_path: Path) -> None:
    folder, other = _made(tmp_path, _id(1)), _made(tmp_path, ".removed-notes")
    killed = (
        "import os, shutil, sys; from pathlib import Path\n"
        "from worker_agent.agent import retention as r\n"
        "def die(out): out.exists() and ((out / 'weights').unlink(), os._exit(9))\n"
        "shutil.rmtree = lambda path, **_: die(Path(path) / 'out')\n"
        "r.remove([r.JobFolder(path=Path(sys.argv[1]), bytes=1, written_s=0.0)])"
    )
    assert subprocess.run([sys.executable, "-c", killed, str(folder)], check=False).returncode == 9
    assert not folder.exists()
    assert (tmp_path / f".removed-{_id(1)}" / "out").exists()
    assert finish(tmp_path) == 1
    assert list(tmp_path.iterdir()) == [other]


def _agent(*arguments: str) -> tuple[object, str]:
    """The exit status of `pipeplan-agent`, without the start of a process, and what it wrote on standard error."""
    with (
        redirect_stderr(StringIO()) as said,
        redirect_stdout(StringIO()),
        patch.dict(os.environ, environment(), clear=True),
        pytest.raises(SystemExit) as ended,
    ):
        run_app(app, arguments)
    return ended.value.code, said.getvalue()


def test_the_command_asks_the_service_and_keeps_what_waits(tmp_path: Path) -> None:
    work_dir = tmp_path / "work"
    command = ("prune", "--work-dir", str(work_dir))
    with served(tmp_path / "service.sqlite3") as url, Client(url) as service:
        plan_id = store_plan(service)
        waits, over = (service.enqueue_job(run_task(plan_id)) for _ in range(2))
        service.cancel_job(over.id)
        for job in (waits, over):
            _made(work_dir, job.id)
        for options, left in ((["--dry-run"], {waits.id, over.id}), ([], {waits.id})):
            status, said = _agent(*command, "--url", url, "--keep", "0", "--abandoned", *options)
            assert status == 0, said
            assert {path.name for path in work_dir.iterdir()} == left
    status, said = _agent(*command)
    assert status == 2
    assert "--older-than-days" in said


def _settings(work_dir: Path, **chosen: Any) -> AgentSettings:
    return AgentSettings(work_dir=work_dir, **chosen)


def test_an_agent_removes_by_its_settings_what_no_job_may_resume_from(tmp_path: Path) -> None:
    work_dir = tmp_path / "work"
    with served(tmp_path / "service.sqlite3") as url, Client(url) as service:
        over, cancelled = (service.enqueue_job(LinksTask(devices=1)) for _ in range(2))
        service.cancel_job(cancelled.id)
        with AgentClient(url) as agent:
            lease = agent.lease(LeaseRequest(agent="node-1"))
            assert lease is not None and lease.job.id == over.id
            report = completion(lease, LinksResult(cluster=CLUSTER), new_report_id())
            assert agent.report(report.path, report.body).state == "succeeded"
        for name in (over.id, cancelled.id, _id(1)):
            _made(work_dir, name)
        limits = {"PIPEPLAN_AGENT_PRUNE_KEEP": "0", "PIPEPLAN_AGENT_PRUNE_MAX_BYTES": "0"}
        with working(url, work_dir, variables=limits) as (_, log):
            wait_until(lambda: "removed 1 folders of ended jobs" in log.read_text())
        left = {path.name for path in work_dir.iterdir()}
        assert {cancelled.id, _id(1)} <= left, "one may be retried, the other be another service's"
        assert over.id not in left


def test_an_agent_goes_on_where_folders_cannot_be_removed_now(tmp_path: Path) -> None:
    """A turn asks the service once an hour, and not at all without a bound."""
    asked: list[str] = []
    said: list[str] = []

    def away(job_id: str) -> JobState:
        asked.append(job_id)
        raise ServiceError("away")

    _made(tmp_path, _id(1), age_s=9)
    Retention(_settings(tmp_path), away, said.append).turn()
    assert asked == []
    kept = Retention(_settings(tmp_path, prune_older_than_days=0), away, said.append)
    kept.turn()
    kept.turn()
    assert (asked, said) == ([_id(1)], ["folders of ended jobs stay for now: away"])
    assert (tmp_path / _id(1)).exists()


def test_a_stopped_agent_leaves_the_rest_of_the_folders_to_the_next_turn(tmp_path: Path) -> None:
    for number in range(3):
        _made(tmp_path, _id(number), age_s=number)
    said: list[str] = []
    stops = iter((False, True))
    Retention(_settings(tmp_path, prune_keep=0), lambda _: "succeeded", said.append).turn(lambda: next(stops))
    assert len(list(tmp_path.iterdir())) == 2
    assert said[0].startswith("removed 1 folders")
