"""Writers to one SQLite file: those that wait share a transaction, and each is answered once it is on the disk."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, event, text

from pipeplan.errors import ConflictError, UnavailableError
from planner_service.platform import turns
from planner_service.platform.database import Database

WRITERS = 6
Work = Callable[[Connection], None]


@pytest.fixture
def database(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """One with a table, whose transactions take writers for as long as any wait."""
    monkeypatch.setattr(turns, "OPEN_S", 1e9)
    database = Database(sqlite_url)
    with database.write() as connection:
        connection.execute(text("CREATE TABLE taken (name TEXT NOT NULL UNIQUE)"))
    yield database
    database.close()


def _add(name: str) -> Work:
    def work(connection: Connection) -> None:
        connection.execute(text("INSERT INTO taken VALUES (:name)"), {"name": name})

    return work


def _names(database: Database) -> list[str]:
    with database.read() as connection:
        return list(connection.execute(text("SELECT name FROM taken ORDER BY name")).scalars())


def _commits(database: Database) -> list[Connection]:
    """The commits from now on of transactions that write: those that read end with one too."""
    found: list[Connection] = []

    def note(connection: Connection) -> None:
        if "begin" in connection.get_execution_options():
            found.append(connection)

    event.listen(database.engine, "commit", note)
    return found


def _write(database: Database, work: Work) -> None:
    with database.write() as connection:
        work(connection)


def _together(database: Database, works: list[Work]) -> list["Future[None]"]:
    """Writes of threads that all wait in this order before the first of them is through; each has ended."""
    begun, go = threading.Event(), threading.Event()

    def first(connection: Connection) -> None:
        begun.set()
        go.wait()
        works[0](connection)

    with ThreadPoolExecutor(len(works)) as pool:
        written = [pool.submit(_write, database, first)]
        begun.wait()
        for place, work in enumerate(works[1:], start=1):
            written.append(pool.submit(_write, database, work))
            while _waiting(database) < place:
                pass
        go.set()
    return written


def _waiting(database: Database) -> int:
    assert database._turns is not None
    return len(database._turns._queue._waiting)


def test_writers_that_wait_are_stored_by_one_commit(database: Database) -> None:
    commits = _commits(database)
    written = _together(database, [_add(str(number)) for number in range(WRITERS)])
    assert [one.exception() for one in written] == [None] * WRITERS
    assert _names(database) == [str(number) for number in range(WRITERS)]
    assert len(commits) == 1


def test_a_writer_alone_has_a_transaction_of_its_own(database: Database) -> None:
    commits = _commits(database)
    _write(database, _add("one"))
    _write(database, _add("two"))
    assert len(commits) == 2


@pytest.mark.parametrize("failing", range(4))
def test_a_writer_that_fails_leaves_nothing_and_the_others_stay(database: Database, failing: int) -> None:
    def refuse(connection: Connection) -> None:
        _add("refused")(connection)
        raise ConflictError("refused")

    works = [_add(str(number)) for number in range(4)]
    works[failing] = refuse
    written = _together(database, works)
    assert [type(one.exception()) for one in written] == [
        ConflictError if number == failing else type(None) for number in range(4)
    ]
    assert _names(database) == [str(number) for number in range(4) if number != failing]


def test_a_broken_constraint_is_its_own_writers_alone(database: Database) -> None:
    written = _together(database, [_add("one"), _add("one"), _add("two")])
    assert [one.exception() is None for one in written] == [True, False, True]
    assert _names(database) == ["one", "two"]


def test_nobody_is_answered_before_the_transaction_is_stored(database: Database) -> None:
    begun, go, last = threading.Event(), threading.Event(), threading.Event()

    def hold(name: str, started: threading.Event, end: threading.Event) -> Work:
        def work(connection: Connection) -> None:
            started.set()
            end.wait()
            _add(name)(connection)

        return work

    second = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(_write, database, hold("one", begun, go))
        begun.wait()
        two = pool.submit(_write, database, hold("two", second, last))
        while not _waiting(database):
            pass
        go.set()
        second.wait()  # the first is through with its work, and the second is at its own
        assert not one.done()
        assert _names(database) == []
        last.set()
        assert one.result() is None and two.result() is None
    assert _names(database) == ["one", "two"]


def test_a_commit_that_fails_is_every_writers_failure(database: Database) -> None:
    def fail(_connection: Connection) -> None:
        raise UnavailableError("the disk is gone", 1.0)

    event.listen(database.engine, "commit", fail)
    written = _together(database, [_add("one"), _add("two")])
    assert [type(one.exception()) for one in written] == [UnavailableError, UnavailableError]
    event.remove(database.engine, "commit", fail)
    assert _names(database) == []
    _write(database, _add("three"))
    assert _names(database) == ["three"]


def test_a_transaction_that_sqlite_ended_is_every_writers_failure(database: Database) -> None:
    def fill(connection: Connection) -> None:
        connection.execute(text("PRAGMA max_page_count=1"))
        try:
            _add("x" * 10**6)(connection)
        finally:
            connection.connection.driver_connection.execute("PRAGMA max_page_count=1000000")  # type: ignore[union-attr]

    written = _together(database, [_add("one"), fill, _add("two")])
    failures = [one.exception() for one in written]
    assert isinstance(failures[0], UnavailableError) and isinstance(failures[1], UnavailableError)
    assert "full" in str(failures[0])
    assert failures[2] is None  # it came when the transaction was over, and began another
    assert _names(database) == ["two"]


def test_a_transaction_takes_no_more_after_its_time_or_its_number(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = _commits(database)
    monkeypatch.setattr(turns, "MOST_WRITERS", 2)
    _together(database, [_add(str(number)) for number in range(WRITERS)])
    assert len(commits) == WRITERS / 2
    monkeypatch.setattr(turns, "OPEN_S", 0.0)
    _together(database, [_add(f"again {number}") for number in range(WRITERS)])
    assert len(commits) == WRITERS / 2 + WRITERS
    assert len(_names(database)) == 2 * WRITERS


def test_a_writer_that_gives_up_waiting_holds_nobody_up(database: Database) -> None:
    assert database._turns is not None
    database._turns._patience_s = 0.01
    with database.write() as connection, ThreadPoolExecutor(1) as pool:
        with pytest.raises(UnavailableError, match="turn"):
            pool.submit(_write, database, _add("late")).result()
        _add("one")(connection)
    _write(database, _add("two"))
    assert _names(database) == ["one", "two"]
