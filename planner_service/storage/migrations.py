"""Migrations: brings a database to the tables that this version declares."""

import threading
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import func, select

import planner_service
from pipeplan.errors import PipeplanError, ServiceError
from planner_service.storage.database import Database

UPGRADING = 0x70697065706C616E
"""The number of the lock under which PostgreSQL lets one process at a time change the tables: "pipeplan"."""

_alembic = threading.Lock()
"""Alembic keeps what it is at in its modules: a process migrates one database at a time."""


def migrations_folder() -> Path:
    """Where the revisions are: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(planner_service.__file__).parent
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise PipeplanError(f"the installation is broken: there are no migrations in or beside {package}")


def upgrade(database: Database) -> None:
    """Applies what is missing, in one transaction. Several processes may do it at once: one does the work."""
    _to(database, head(), up=True)


def downgrade(database: Database, revision: str) -> None:
    """Takes revisions back, in one transaction; "base" is the empty database."""
    _to(database, revision, up=False)


def revision_of(database: Database) -> str | None:
    """The revision that the database is at; None for an empty one."""
    with database.read() as connection:
        return MigrationContext.configure(connection).get_current_revision()


@cache
def head() -> str:
    """The newest revision, which this version's code expects."""
    newest = ScriptDirectory.from_config(_config()).get_current_head()
    if newest is None:
        raise PipeplanError("the installation is broken: it holds no migrations")
    return newest


def _to(database: Database, revision: str, *, up: bool) -> None:
    config = _config()
    try:
        with _alembic, database.write() as connection:
            if not database.is_sqlite:
                connection.execute(select(func.pg_advisory_xact_lock(UPGRADING)))
            config.attributes["connection"] = connection
            (command.upgrade if up else command.downgrade)(config, revision)
    except CommandError as error:
        raise ServiceError(f"the database {database.shown} cannot be brought to {revision}: {error}") from error


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
