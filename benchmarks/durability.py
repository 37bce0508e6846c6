"""The service under faults: mixed requests while it is killed (-9) and started again, on both databases.

Fixed work: 10,000 requests of 8 clients, 20 kills. Afterwards every acknowledged write must be in the database, and
none twice. SQLite runs with synchronous=FULL, PostgreSQL with fsync; PostgreSQL has two services on it, killed in turn.
"""

import tempfile
from collections import Counter
from pathlib import Path

from tests.planner_service.chaos import Acknowledged, Findings, compare, endure
from tests.planner_service.postgresql import running

REQUESTS = 10_000
KILLS = 20


def main() -> None:
    """Prints one line for each database."""
    print("| database | services | requests | kills | asked again | lost | twice | undone | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        _measure("SQLite", f"sqlite:///{Path(folder) / 'service.sqlite3'}", services=1)
    with running(durable=True) as server:
        _measure("PostgreSQL", server.url(server.new_database()), services=2)


def _measure(name: str, url: str, *, services: int) -> None:
    told = endure(url, requests=REQUESTS, kills=KILLS, services=services)
    found = compare(url, told)
    print(_line(name, services, told, found), flush=True)


def _line(name: str, services: int, told: Acknowledged, found: Findings) -> str:
    again: Counter[str] = told.repetitions
    wrong = (len(found.lost), len(found.twice), len(found.unfinished))
    cells = (name, services, told.requests, told.kills, sum(again.values()), *wrong, f"{told.elapsed_s:.0f}")
    return f"| {' | '.join(str(cell) for cell in cells)} |"


if __name__ == "__main__":
    main()
