"""Failures: what the database cannot do, told apart by whether asking again may help."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import (
    DatabaseError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    TimeoutError,
)

from pipeplan.errors import ConflictError, PipeplanError, ServiceError, UnavailableError

BUSY_RETRY_S = 1.0
CONNECTION_RETRY_S = 2.0
FULL_RETRY_S = 30.0

NO_SUCH_TABLE = frozenset({"42P01", "42703"})
"""PostgreSQL's codes for a table or a column that is not there."""
FULL = "53"
"""The class of PostgreSQL's codes for a disk, a memory or a table of connections that is full."""
BUSY = "40"
"""The class for transactions that others got in the way of."""

PASSING = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
OUT_OF_SPACE = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN})

DUPLICATE = frozenset({"23505", sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY})
DANGLING = frozenset({"23503", sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY})


def is_duplicate(error: IntegrityError) -> bool:
    """Whether a row with this key was there already."""
    return _constraint(error) in DUPLICATE


@contextmanager
def reporting(database: str, secret: str | None) -> Iterator[None]:
    """What the database itself cannot do becomes a ServiceError, one that may pass an UnavailableError.

    A row that names one which another transaction has just removed, or the other way round, is a ConflictError. Other
    broken constraints and statements are raised as they are: what was asked for is wrong, not the database.
    `database` is how messages name it, `secret` what they must not say.
    """
    try:
        yield
    except TimeoutError as error:
        detail = f"all connections to the database {database} stayed busy; too many ask at once"
        raise UnavailableError(detail, BUSY_RETRY_S) from error
    except IntegrityError as error:
        if _constraint(error) not in DANGLING:
            raise
        raise ConflictError("what this names was removed, or named, by somebody else meanwhile; ask again") from error
    except DBAPIError as error:
        reported = _reported(error, f"the database {database} cannot be used: {_cause(error, secret)}")
        if reported is None:
            raise
        raise reported from error


def _constraint(error: IntegrityError) -> str | int | None:
    """PostgreSQL's code for the constraint that is broken, or SQLite's."""
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "sqlite_errorcode", None)


def _reported(error: DBAPIError, detail: str) -> PipeplanError | None:
    code = getattr(error.orig, "sqlstate", None) or ""
    if code in NO_SUCH_TABLE or (isinstance(error.orig, sqlite3.OperationalError) and "no such" in str(error.orig)):
        return ServiceError(f"{detail}; are its tables this version's? `pipeplan db upgrade` brings them up to date")
    if isinstance(error.orig, sqlite3.Error):
        return _of_sqlite(error, detail)
    if error.connection_invalidated or isinstance(error, OperationalError | InterfaceError):
        return UnavailableError(detail, _retry_after_s(code))
    return None


def _of_sqlite(error: DBAPIError, detail: str) -> PipeplanError | None:
    code = getattr(error.orig, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in PASSING:
        return UnavailableError(detail, BUSY_RETRY_S)
    if code in OUT_OF_SPACE:
        return UnavailableError(detail, FULL_RETRY_S)
    refused = isinstance(error, OperationalError) or type(error) is DatabaseError
    return ServiceError(detail) if refused and not isinstance(error, ProgrammingError) else None


def _retry_after_s(code: str) -> float:
    if code.startswith(BUSY):
        return BUSY_RETRY_S
    return FULL_RETRY_S if code.startswith(FULL) else CONNECTION_RETRY_S


def _cause(error: DBAPIError, secret: str | None) -> str:
    """The driver's words on one line, without the statement and its parameters, and never with the password."""
    words = " ".join(str(error.orig or error).split())
    return words.replace(secret, "***") if secret else words
