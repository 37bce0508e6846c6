"""The commands of docker-compose.yml as processes: tables, first token, service, health check, agent, end."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.docker.composition import command, environment, services


@pytest.fixture
def secrets(tmp_path: Path, empty_database_url: str) -> Path:
    """The folder of secrets as an operator makes it, with the test's database."""
    return _secrets(tmp_path, empty_database_url)


def _secrets(folder: Path, database_url: str) -> Path:
    secrets = folder / "secrets"
    secrets.mkdir()
    (secrets / "database_url").write_text(database_url, encoding="utf-8")
    return secrets


def _migrate(secrets: Path, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What `docker compose run migrate` executes; without arguments the service's own command.

    A folder stands for the volume in which it works.
    """
    service = services()["migrate"]
    own = command(service)
    chosen = [*own[: -len(service["command"])], *arguments] if arguments else own
    variables = environment(service, secrets, **({} if folder is None else {"TMPDIR": str(folder)}))
    return subprocess.run(chosen, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def _token(secrets: Path, name: str, *scopes: str) -> str:
    """A new token, made as the documentation says."""
    options = [option for scope in scopes for option in ("--scope", scope)]
    return _migrate(secrets, "token", "create", "--name", name, *options).stdout.strip()


@contextmanager
def _started(name: str, secrets: Path, **changes: str) -> Iterator[subprocess.Popen[str]]:
    service = services()[name]
    with subprocess.Popen(
        command(service), env=environment(service, secrets, **changes), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def _is_healthy(name: str, url: str) -> bool:
    """What the health check of the compose file says, asked at this URL."""
    kind, python, *arguments = services()[name]["healthcheck"]["test"]
    assert (kind, python) == ("CMD", "python3")
    asked = [argument.replace("http://127.0.0.1:8437", url) for argument in arguments]
    variables = {"PIPEPLAN_AGENT_URL": url}
    return subprocess.run([sys.executable, *asked], env=variables, stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.each_case
def test_without_a_token_the_service_does_not_start(secrets: Path) -> None:
    with _started("service", secrets, PIPEPLAN_PORT="0") as process:
        _, stderr = process.communicate()
    assert process.returncode == 1
    assert "token create" in stderr


@pytest.mark.each_case
def test_the_stack_comes_up_step_by_step_and_ends_in_good_order(secrets: Path) -> None:
    migrated = _migrate(secrets)
    assert migrated.returncode == 0, migrated.stderr
    token = _migrate(
        secrets, "token", "create", "--name", "admin", "--scope", "admin", "--scope", "read"
    ).stdout.strip()
    with _started("service", secrets, PIPEPLAN_PORT="0") as process:
        found = re.search(r"http://0\.0\.0\.0(:\d+) ", _line(process))
        assert found is not None
        url = f"http://127.0.0.1{found[1]}"
        assert _is_healthy("service", url)
        assert httpx.get(f"{url}/v1/plans").status_code == 401
        answer = httpx.get(f"{url}/readyz", headers={"Authorization": f"Bearer {token}"})
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate()
    assert process.returncode == 0
    assert token not in stderr
    assert not _is_healthy("service", url)


@pytest.mark.parametrize("named", [(), ("before.sqlite3",)])
def test_a_backup_is_written_to_the_volume_and_restored_from_it(
    secrets: Path, tmp_path: Path, named: tuple[str, ...]
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    assert _migrate(secrets).returncode == 0
    _token(secrets, "admin", "admin")
    written = _migrate(secrets, "db", "backup", *named, folder=volume)
    assert written.returncode == 0, written.stderr
    (file,) = volume.iterdir()
    assert (file.name in named) if named else re.fullmatch(r"pipeplan-\d{8}T\d{6}Z\.sqlite3", file.name)
    assert file.name in written.stderr

    restored = f"sqlite:///{tmp_path / 'restored.sqlite3'}"
    ended = _migrate(secrets, "db", "restore", file.name, "--database", restored, folder=volume)
    assert ended.returncode == 0, ended.stderr
    assert "admin" in _migrate(secrets, "token", "list", "--database", restored).stdout


def test_the_agent_finds_the_service_with_its_token(sqlite_url: str, tmp_path: Path) -> None:
    secrets = _secrets(tmp_path, sqlite_url)
    (secrets / "agent_token").write_text(_token(secrets, "agent", "agent"), encoding="utf-8")
    with _started("service", secrets, PIPEPLAN_PORT="0", PIPEPLAN_LOG_LEVEL="info") as service:
        found = re.search(r"http://0\.0\.0\.0(:\d+) ", _line(service))
        assert found is not None
        url = f"http://127.0.0.1{found[1]}"
        changes = {"PIPEPLAN_AGENT_URL": url, "PIPEPLAN_AGENT_WORK_DIR": str(tmp_path / "work")}
        with _started("agent", secrets, **changes) as agent:
            assert url in _line(agent)
            assert _is_healthy("agent", url)
            leased = '"route": "/v1/jobs/lease", "status": 204'
            line = _line(service)
            while leased not in line:
                assert line, "the service ended"
                line = _line(service)
            assert '"caller": "agent"' in line
            agent.send_signal(signal.SIGTERM)
            agent.communicate()
        assert agent.returncode == 0
