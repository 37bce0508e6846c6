"""Clients that others generate of the API's description, in Python and in TypeScript, with a running service."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.fuzz.run import UNLIMITED, new_token, store_examples
from tests.planner_service.servers import served

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
GENERATOR = "openapi-python-client==0.29.0"
PACKAGES = ("openapi-typescript@7.13.0", "openapi-fetch@0.17.0", "typescript@5.9.3", "@types/node@20.19.0")
UNREACHABLE = ("connection broken by", "Temporary failure in name resolution", "ENOTFOUND", "EAI_AGAIN", "ETIMEDOUT")
"""What pip and npm say where they cannot reach their indices."""


pytestmark = pytest.mark.campaign  # environments of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A service with the examples of its description, which lies in a file."""

    url: str
    token: str
    ids: dict[str, list[str]]
    file: Path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Described]:
    """It."""
    folder = tmp_path_factory.mktemp("service")
    database = f"sqlite:///{folder / 'service.sqlite3'}"
    token = new_token(database)
    with served(database, **UNLIMITED) as url:
        ids = store_examples(url, token)
        file = folder / "openapi.json"
        file.write_text(httpx.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {token}"}).text)
        yield Described(url=url, token=token, ids=ids, file=file)


def _run(*command: object, cwd: Path, **changes: str) -> str:
    """A program to its end, which must be a good one: what it said."""
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | changes,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def _install(*command: object, cwd: Path) -> None:
    """Installs something, or skips the test where the index cannot be reached."""
    try:
        _run(*command, cwd=cwd)
    except AssertionError as error:
        if any(each in str(error) for each in UNREACHABLE):
            pytest.skip(f"{command[0]} cannot reach its index")
        raise


def test_a_python_client_reads_every_answer(service: Described, tmp_path: Path) -> None:
    _run(sys.executable, "-m", "venv", "venv", cwd=tmp_path)
    own = tmp_path / "venv" / "bin"
    _install(own / "pip", "install", "--quiet", GENERATOR, cwd=tmp_path)
    options = ("--meta", "none", "--output-path", "pipeplan_api", "--fail-on-warning")
    path = os.pathsep.join((str(BIN), os.environ["PATH"]))  # it formats what it writes with ruff
    _run(own / "openapi-python-client", "generate", "--path", service.file, *options, cwd=tmp_path, PATH=path)
    script = HERE / "generated_client.py"
    ids = json.dumps(service.ids)
    _run(own / "python", script, service.url, service.token, ids, cwd=tmp_path, PYTHONPATH=str(tmp_path))


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_a_typescript_client_reads_what_its_types_say(service: Described, tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"private": true, "type": "module"}', encoding="utf-8")
    _install("npm", "install", "--no-audit", "--no-fund", *PACKAGES, cwd=tmp_path)
    binaries = tmp_path / "node_modules" / ".bin"
    options = ("--default-non-nullable=false", "-o", "schema.d.ts")
    _run(binaries / "openapi-typescript", service.file, *options, cwd=tmp_path)
    shutil.copy(HERE / "generated_client.ts", tmp_path)
    kind = ("--strict", "--skipLibCheck", "--target", "es2022", "--module", "nodenext")
    _run(binaries / "tsc", *kind, "generated_client.ts", cwd=tmp_path)
    _run("node", "generated_client.js", service.url, service.token, cwd=tmp_path)
