"""`pipeplan serve` as a process: ready, taken ports, hosts, its parent's end, and a kill that loses nothing."""

import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from pipeplan.client.client import Client
from pipeplan.errors import LeaseLostError, ServiceError
from pipeplan.protocol.jobs import LeaseRequest
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.platform.migrations import head
from tests.planner_service.examples import PROFILE_RESULT, PROFILE_TASK
from tests.planner_service.reporting import complete, fail
from tests.planner_service.servers import (
    PIPEPLAN,
    announced_url,
    environment,
    pipeplan,
    pipeplan_process,
    served,
    serving,
)
from tests.processes import free_port
from tests.waiting import wait_until
from worker_agent.agent.client import AgentClient

PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stderr=subprocess.PIPE, text=True)
print(child.stderr.readline(), end="", flush=True)
"""


def test_a_service_that_is_killed_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    database = tmp_path / "new" / "service.sqlite3"
    with serving(database) as (url, process):
        service = Client(url)
        service.ready()
        profile_id = service.create_profile(PROFILE).id
        job = service.enqueue_job(PROFILE_TASK)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(ServiceError, match=url):
            service.ready()
        service.close()
    with served(database) as url:
        service, agent = Client(url), AgentClient(url)
        assert service.profile(profile_id) == PROFILE
        lease = agent.lease(LeaseRequest(agent="node-1"))
        assert lease is not None
        assert lease.job.id == job.id
        complete(agent, lease, PROFILE_RESULT)
        assert complete(agent, lease, PROFILE_RESULT).state == "succeeded"
        with pytest.raises(LeaseLostError):
            fail(agent, lease, "too late")
        assert service.cluster(str(service.job(job.id).cluster_id)) == CLUSTER
        service.close()
        agent.close()


def test_an_interrupt_ends_a_service_in_good_order(tmp_path: Path) -> None:
    with serving(tmp_path / "service.sqlite3") as (_, process):
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert "Traceback" not in stderr
    assert stdout == ""


def test_a_taken_port_is_one_clear_sentence(tmp_path: Path) -> None:
    with served(tmp_path / "service.sqlite3") as url:
        port = url.rpartition(":")[2]
        second = pipeplan_process("serve", "--port", port, "--database", f"sqlite:///{tmp_path / 'other.sqlite3'}")
    assert second.returncode == 1
    assert second.stderr.startswith(f"error: port {port} of 127.0.0.1 is taken:")
    assert second.stderr.count("\n") == 1


def test_connections_are_refused_until_the_service_can_answer(tmp_path: Path) -> None:
    """One that is taken and not answered looks like a network that is cut, by which gangs stop their work."""
    database, port = tmp_path / "service.sqlite3", free_port()
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        command = [*PIPEPLAN, "serve", "--port", str(port), "--database", f"sqlite:///{database}"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
            try:
                opened = Path(f"/proc/{process.pid}/fd")
                wait_until(lambda: any(file.resolve() == database for file in opened.iterdir()))
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port))
                other.execute("ROLLBACK")
                assert announced_url(process) == f"http://127.0.0.1:{port}"
                socket.create_connection(("127.0.0.1", port)).close()
            finally:
                process.kill()


@pytest.mark.parametrize("host", ["nowhere.invalid", "203.0.113.9", "ä..b"])
def test_an_address_that_is_not_this_machines_is_wrong_input(tmp_path: Path, host: str) -> None:
    answer = pipeplan_process(
        "serve", "--host", host, "--port", "0", "--database", f"sqlite:///{tmp_path / 'x.sqlite3'}"
    )
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: --host: must be an address of this machine (")
    assert answer.stderr.endswith(f"got {host!r}\n") and answer.stderr.count("\n") == 1


def test_a_service_refuses_to_listen_beyond_this_machine_without_a_token(tmp_path: Path) -> None:
    answer = pipeplan_process(
        "serve", "--host", "0.0.0.0", "--port", "0", PIPEPLAN_DATABASE_URL=f"sqlite:///{tmp_path / 'x.sqlite3'}"
    )
    assert answer.returncode == 1
    assert "`pipeplan token create --name admin --scope admin` makes the first" in answer.stderr
    assert answer.stderr.count("\n") == 1


@pytest.mark.campaign
def test_a_service_ends_when_its_parent_has_ended(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'service.sqlite3'}"
    serve = [sys.executable, "-c", "from pipeplan.cli.app import main; main()", "serve", "--port", "0"]
    command = [sys.executable, "-c", PARENT, *serve, "--database", database, "--exit-with-parent"]
    parent = subprocess.run(command, capture_output=True, text=True, env=environment())
    # `run` returns once the grandchild, too, has let go of the pipes that it inherited: it is gone.
    service = Client(parent.stdout.strip().rpartition(" ")[2])
    with pytest.raises(ServiceError):
        service.ready()
    service.close()


@pytest.mark.campaign
def test_db_upgrade_makes_the_tables_and_may_be_repeated(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'service.sqlite3'}"
    first = pipeplan("db", "upgrade", "--database", database)
    second = pipeplan("db", "upgrade", PIPEPLAN_DATABASE_URL=database)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert f"revision none -> {head()}" in first.stderr
    assert f"revision {head()} -> {head()}" in second.stderr


def test_a_missing_extra_is_a_sentence_that_says_how_to_install_it() -> None:
    blocked = "import sys; sys.modules['fastapi'] = None; from pipeplan.cli.app import main; main()"
    answer = subprocess.run([sys.executable, "-c", blocked, "serve"], capture_output=True, text=True)
    assert answer.returncode == 1
    assert "pip install 'pipeplan[service]'" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_the_command_line_loads_nothing_heavy() -> None:
    program = "import sys, pipeplan.cli.app; print({'fastapi', 'sqlalchemy', 'torch'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.stdout.strip() == "set()"


def test_the_service_imports_nothing_that_it_does_not_use() -> None:
    """Each of these takes longer to import than a hundred requests take to answer."""
    unused = ("httpx", "sqlalchemy.orm", "rich", "torch", "ortools", "scipy", "alembic")
    asked = f"import sys, planner_service.app; print([name for name in {unused} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
