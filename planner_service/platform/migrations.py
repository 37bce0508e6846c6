"""Migrations: bring a database to the tables that this version declares; and backups of a database.

A backup is one state of the database, taken while others write. It can be restored into an empty database. A backup of
either kind of database is a SQLite file: the service itself can open it, it needs no tool of the server's version, and
it can move a database from one kind to the other.
"""

import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import Connection, Table, false, func, insert, inspect, select, text
from sqlalchemy.engine import URL

import planner_service
from pipeplan.errors import ConflictError, InvalidInputError, PipeplanError, ServiceError, require
from pipeplan.protocol.audit import Action
from planner_service.platform.database import Database
from planner_service.platform.tables import audit, chores, metadata
from planner_service.platform.trail import record
from planner_service.platform.turns import OWNER_ONLY

UPGRADING = 0x70697065706C616E
"""The number of PostgreSQL's lock under which one process at a time changes the tables: "pipeplan" in ASCII."""

PARTIAL = ".partial"
"""The ending of a backup's name while it is being written."""

BACKUP_RULE = "must be a whole file that `pipeplan db backup` wrote"

ROWS = 500
"""How many rows are copied at once."""

_alembic = threading.Lock()
"""Alembic keeps its state in its modules: a process migrates one database at a time. It is loaded only when it is
needed.
"""

_version = sa.table("alembic_version", sa.column("version_num"))


def migrations_folder() -> Path:
    """The folder of the revisions: inside the package in an installed wheel, next to it in a checkout."""
    package = Path(planner_service.__file__).parent
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise PipeplanError(f"the installation is broken: there are no migrations in or beside {package}")


def upgrade(database: Database) -> None:
    """Applies the missing revisions in one transaction. Several processes may call it at once: one does the work."""
    _to(database, head(), up=True)


def downgrade(database: Database, revision: str) -> None:
    """Takes back the revisions after this one, in one transaction; "base" is the empty database."""
    _to(database, revision, up=False)


def revision_of(database: Database) -> str | None:
    """The revision that the database is at; None for an empty one."""
    with database.read() as connection:
        return _current(connection)


@cache
def head() -> str:
    """The newest revision, which this version's code expects."""
    return max(_revisions())


@cache
def _revisions() -> frozenset[str]:
    """All revisions. Files have their revisions' numbers as names."""
    numbers = frozenset(path.name.partition("_")[0] for path in (migrations_folder() / "versions").glob("[0-9]*_*.py"))
    if not numbers:
        raise PipeplanError("the installation is broken: it holds no migrations")
    return numbers


def backup(database: Database, file: Path) -> None:
    """Writes one state of the database to a new file, which appears complete or not at all.

    It is verified before it has its name: SQLite's own check of integrity, its references, its revision. Raises
    InvalidInputError if the file exists, ServiceError if the database's tables are not this version's or the file
    cannot be written or is not whole.
    """
    require(not file.exists(), "file", "must not be there yet", str(file))
    revision = revision_of(database)
    _require_known(database, revision)
    if revision != head():
        advice = "run `pipeplan db upgrade`"
        raise ServiceError(f"the database {database.shown} is at revision {revision}, not at {head()}: {advice}")
    partial = file.with_name(f".{file.name}{PARTIAL}")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, OWNER_ONLY))
        if database.is_sqlite:
            _copy_pages(database, partial)
        else:
            with _opened(partial) as target:
                upgrade(target)
                with database.read() as reading, target.write() as writing:
                    _copy_rows(reading, writing)
            with closing(sqlite3.connect(partial)) as copied:
                copied.execute("PRAGMA journal_mode=DELETE")

        found, kept = _examine(partial)
        if found != ["ok"] or kept != revision:
            raise ServiceError(f"the backup of revision {revision} is not whole ({kept}): {'; '.join(found)}")
        # The content must be on the disk before the file has its name.
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.rename(file)
    except (OSError, sqlite3.Error) as error:
        raise ServiceError(f"the backup {file} cannot be written: {error}") from error
    finally:
        for end in ("", "-wal", "-shm", "-journal", "-turns"):
            partial.with_name(partial.name + end).unlink(missing_ok=True)


def _examine(file: Path) -> tuple[list[str], str]:
    """What is wrong with a SQLite file, or "ok", and its revision. Raises sqlite3.Error if it has none."""
    with closing(sqlite3.connect(file)) as copied:
        found = [str(row[0]) for row in copied.execute("PRAGMA integrity_check(5)")]
        found += [
            f"a row of {row[0]} refers to a row that is missing" for row in copied.execute("PRAGMA foreign_key_check")
        ][:5]
        row = copied.execute("SELECT version_num FROM alembic_version").fetchone()
    return found, "" if row is None else str(row[0])


def restore(database: Database, file: Path) -> None:
    """Restores a backup into an empty database, in one transaction.

    Raises InvalidInputError for a file that is no whole backup, ConflictError if the database is not empty.
    """
    require(file.is_file(), "file", BACKUP_RULE, str(file))
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "backup.sqlite3"
        shutil.copyfile(file, copied)
        try:
            faults, revision = _examine(copied)
        except sqlite3.Error as error:
            raise InvalidInputError("file", f"{BACKUP_RULE} ({error})", str(file)) from error
        require(faults == ["ok"], "file", f"{BACKUP_RULE} ({'; '.join(faults)})", str(file))
        known = f"must be at a revision that this version knows, up to {head()}, and is at {revision or 'none'}"
        require(revision in _revisions(), "file", known, str(file))
        upgrade(database)
        with _opened(copied) as source:
            upgrade(source)  # the backup may be an older version's
            with source.read() as reading, database.write() as writing:
                for table in _moved():
                    if writing.execute(select(func.count()).select_from(table)).scalar_one():
                        rule = f"must be empty, but there is something in {table.name}"
                        raise ConflictError(f"the database {database.shown} {rule}")
                _copy_rows(reading, writing)
                if not database.is_sqlite:
                    _set_sequences(writing)
                record(writing, "database.restore", None, datetime.now(UTC), detail=file.name)


def _to(database: Database, revision: str, *, up: bool) -> None:
    with _alembic, database.write() as connection:
        if not database.is_sqlite:
            connection.execute(text("SET LOCAL lock_timeout = 0"))  # another process may need minutes
            connection.execute(select(func.pg_advisory_xact_lock(UPGRADING)))
        before = _current(connection)
        _require_known(database, before)
        if before == revision:
            return
        from alembic import command
        from alembic.config import Config
        from alembic.util import CommandError

        config = Config()
        config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        try:
            (command.upgrade if up else command.downgrade)(config, revision)
        except CommandError as error:
            raise ServiceError(f"the database {database.shown} cannot be brought to {revision}: {error}") from error
        after = _current(connection)
        if before not in (None, after) and inspect(connection).has_table(audit.name):
            action: Action = "database.upgrade" if up else "database.downgrade"
            record(connection, action, None, datetime.now(UTC), detail=f"{before} to {after}")


def _require_known(database: Database, revision: str | None) -> None:
    """Raises ServiceError for a database of a newer release, whose revision this version does not know."""
    if revision is not None and revision not in _revisions():
        known = f"this one, {version('pipeplan')}, knows revisions up to {head()}"
        advice = f"run the newer release, or go back with its `pipeplan db downgrade {head()}`"
        raise ServiceError(
            f"the database {database.shown} is of a newer release (revision {revision}); {known}: {advice}"
        )


def _current(connection: Connection) -> str | None:
    known = inspect(connection).has_table(_version.name)
    return connection.execute(select(_version.c.version_num)).scalar() if known else None


def _copy_pages(database: Database, file: Path) -> None:
    """Copies all pages of a SQLite file in one step: it sees one state, and in WAL mode no writer waits for it."""
    with database.read() as connection, closing(sqlite3.connect(file)) as target:
        source = connection.connection.driver_connection
        if not isinstance(source, sqlite3.Connection):
            raise ServiceError("the driver of SQLite is not the standard library's")
        source.backup(target)
        target.execute("PRAGMA journal_mode=DELETE")


def _copy_rows(reading: Connection, writing: Connection) -> None:
    """Copies all rows, first those of tables to which others refer."""
    for table in _moved():
        rows = reading.execution_options(yield_per=ROWS).execute(select(table)).mappings()
        for some in rows.partitions(ROWS):
            writing.execute(insert(table), [dict(row) for row in some])


def _moved() -> list[Table]:
    """The tables that are copied. The turns of chores belong to each database, and stay."""
    return [table for table in metadata.sorted_tables if table is not chores]


def _set_sequences(connection: Connection) -> None:
    """Makes PostgreSQL number new rows after the copied ones."""
    for table in metadata.sorted_tables:
        if "sequence" in table.columns:
            last = select(func.max(table.c.sequence)).scalar_subquery()
            sequence = func.pg_get_serial_sequence(table.name, "sequence")
            connection.execute(select(func.setval(sequence, func.coalesce(last, 0) + 1, false())))


@contextmanager
def _opened(file: Path) -> Iterator[Database]:
    database = Database(URL.create("sqlite", database=str(file)).render_as_string())
    try:
        yield database
    finally:
        database.close()
