"""docker-compose.yml: of Compose's schema, hardened throughout, and without a secret or an unpinned image."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docker.composition import FILE, ROOT, composition, ours, services

BIN = Path(sys.executable).parent
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
ALL = pytest.mark.parametrize("name", list(services()))


def test_the_file_is_valid_by_the_schema_of_compose() -> None:
    command = [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(FILE)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_dockerfiles_pass_their_linter(path: Path) -> None:
    checked = subprocess.run([BIN / "hadolint", str(path)], capture_output=True, text=True)
    assert checked.stdout == ""
    assert checked.returncode == 0


@ALL
def test_nothing_runs_as_root_or_gains_rights_or_writes_to_its_image(name: str) -> None:
    service = services()[name]
    assert int(service["user"].partition(":")[0]) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service


@ALL
def test_every_service_has_limits_and_a_health_check(name: str) -> None:
    service = services()[name]
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert service["healthcheck"].get("test") or (name == "migrate" and service["healthcheck"] == {"disable": True})


@ALL
def test_every_image_has_a_version(name: str) -> None:
    _, _, tag = services()[name]["image"].rpartition(":")
    assert re.match(r"\d+\.\d+", tag)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_base_images_are_pinned_and_users_are_not_root(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    (base,) = [line for line in lines if line.startswith("ARG BASE=")]
    assert re.search(r":\d+\.\d+\.\d+-", base)
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]


def test_no_secret_stands_in_the_file() -> None:
    for service in services().values():
        for name, value in service["environment"].items():
            if re.search("PASSWORD|TOKEN|URL_FILE", name):
                assert str(value).startswith("/run/secrets/"), name
    for secret in composition()["secrets"].values():
        assert secret["file"].startswith("./secrets/")
    ignored = subprocess.run(["git", "check-ignore", "-q", "secrets/agent_token"], cwd=ROOT)
    assert ignored.returncode == 0


def test_only_this_machine_can_reach_the_service_unless_set_otherwise() -> None:
    published = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert published == {"service": ["${PIPEPLAN_PUBLISH:-127.0.0.1:8437}:8437"]}
    assert composition()["networks"]["inside"] == {"internal": True}


def test_migrations_run_once_before_any_service() -> None:
    depends_on: dict[str, Any] = services()["service"]["depends_on"]
    assert depends_on["migrate"] == {"condition": "service_completed_successfully"}
    assert depends_on["postgres"] == {"condition": "service_healthy"}
    assert services()["migrate"]["restart"] == "no"


def test_what_is_written_for_the_database_outlives_its_container() -> None:
    """`docker compose run --rm` removes the container with all that is not in a volume."""
    migrate = services()["migrate"]
    (mount,) = migrate["volumes"]
    assert mount == "${PIPEPLAN_BACKUPS:-backups}:" + migrate["working_dir"], "a volume, unless set otherwise"
    assert migrate["environment"]["TMPDIR"] == migrate["working_dir"], "/tmp is small, and is memory"
    for service in services().values():
        named = {each.partition(":")[0] for each in service.get("volumes", ()) if not each.startswith("$")}
        assert named | {"backups"} <= set(composition()["volumes"])
    made = f"install --directory --owner=10001 --group=10001 --mode=700 {migrate['working_dir']}"
    assert made in (ROOT / migrate["build"]["dockerfile"]).read_text(encoding="utf-8"), "a new volume is its user's"


def test_gpus_are_asked_for_by_their_profile_alone() -> None:
    devices = {
        name: service["deploy"]["resources"].get("reservations", {}).get("devices") for name, service in ours().items()
    }
    wanted = [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    assert devices == {"migrate": None, "service": None, "agent": None, "agent-gpu": wanted}
    assert [name for name, service in services().items() if "profiles" in service] == ["agent-gpu"]


def test_what_is_copied_into_an_image_is_let_through() -> None:
    """The ignore file starts with everything: what a Dockerfile copies must be let through by name."""
    allowed = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    for path in DOCKERFILES:
        copies = [line.split()[1:-1] for line in path.read_text().splitlines() if re.match(r"COPY (?!--from)", line)]
        copied = {name for names in copies for name in names}
        assert copied == allowed
        assert all((ROOT / name).exists() for name in copied)


def test_secrets_are_made_once_and_are_the_installations_own(tmp_path: Path) -> None:
    script = tmp_path / "docker" / "make-secrets.sh"
    script.parent.mkdir()
    script.write_bytes((ROOT / "docker" / "make-secrets.sh").read_bytes())
    subprocess.run(["sh", str(script)], check=True, capture_output=True)
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert re.fullmatch("[0-9a-f]{64}", made["postgres_password"])
    assert made["database_url"] == f"postgresql://pipeplan:{made['postgres_password']}@postgres:5432/pipeplan"
    assert (tmp_path / "secrets").stat().st_mode & 0o077 == 0
    subprocess.run(["sh", str(script)], check=True, capture_output=True)
    assert {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()} == made
    assert {secret["file"] for secret in composition()["secrets"].values()} == {f"./secrets/{name}" for name in made}, (
        json.dumps(sorted(made))
    )
