"""Durable writes that share a transaction beside one transaction each: reports a second of the service, SQLite.

    python -m benchmarks.shared_writes

The same service twice, in turns: as it is, and with a limit of one writer a transaction. Each report is on the disk
when it is answered (synchronous FULL). The best of three rounds each.
"""

import sys
import tempfile
from pathlib import Path

from benchmarks.idle import busy_cores
from benchmarks.service import PIPEPLAN, Best, best, compile_modules, leased_jobs, make_token, serving
from benchmarks.service_database import fill
from benchmarks.service_load import Load

REPORTS = 1_000
CONNECTIONS = (1, 4, 16)
ALONE = (
    sys.executable,
    "-c",
    "from planner_service.platform import turns; turns.MOST_WRITERS = 1; from pipeplan.cli.app import main; main()",
)


def main() -> None:
    """Prints the table."""
    print(f"{busy_cores():.2f} cores busy with other things before\n")
    compile_modules()
    print("| connections | shared, reports/s | p99 ms | CPU ms | separate, reports/s | p99 ms | CPU ms | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for connections in CONNECTIONS:
        shared, alone = (_measured(program, connections) for program in (PIPEPLAN, ALONE))
        cells = [f"{one.seen.per_s:,.0f} | {one.seen.p99_ms:.1f} | {one.cpu_ms:.2f}" for one in (shared, alone)]
        print(f"| {connections} | {' | '.join(cells)} | {shared.seen.per_s / alone.seen.per_s:.2f} |", flush=True)


def _measured(program: tuple[str, ...], connections: int) -> Best:
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "service.sqlite3"
        fill(database, 1)
        token = make_token(database)
        with serving(database, program) as server:
            reports = tuple(leased_jobs(server, token, connections))
            found = best(server, Load(port=server.port, connections=connections, total=REPORTS, requests=reports))
    if set(found.seen.statuses) != {"200"}:
        raise LookupError(f"unexpected answers: {found.seen.statuses}")
    return found


if __name__ == "__main__":
    main()
