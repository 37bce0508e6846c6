"""MLflow's tracking server beside the service, in one run: `make bench-mlflow` gives it an environment of its own.

    python -m benchmarks.service_mlflow MLFLOW_PYTHON [--records N]

Both hold as many records on SQLite, 1,000 by default: MLflow runs with ten metrics and ten parameters each, the
service plans. MLflow's client writes the first 100 runs; the others are copies of their rows. A get is one record by
id, a search the first 50 of a filter in an order; 4 connections, because more only queue at MLflow.
"""

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.idle import busy_cores
from benchmarks.service import LIST, Server, compile_modules, make_token, serving
from benchmarks.service_database import fill
from benchmarks.service_load import Load, Seen, request, run

CONNECTIONS = 4
START_LIMIT_S = 120.0
VALUES = 10
API = "/api/2.0/mlflow"
WRITTEN = 100
"""So many runs are MLflow's client's. The rest are copies of their rows, each with an id and values of its own."""

_FILL = """
import sqlite3, sys, uuid
from contextlib import closing
from mlflow import MlflowClient
from mlflow.entities import Metric, Param

path = sys.argv[1]
records, values, written = map(int, sys.argv[2:])
client = MlflowClient(tracking_uri=f"sqlite:///{path}")
experiment = client.create_experiment("bench")

def value_of(index, i):
    return float(index * i % 97)

ids = []
for index in range(min(records, written)):
    run_id = client.create_run(experiment, start_time=index).info.run_id
    metrics = [Metric(f"metric{i}", value_of(index, i), index, 0) for i in range(values)]
    client.log_batch(run_id, metrics=metrics, params=[Param(f"param{i}", str(index % 5)) for i in range(values)])
    ids.append(run_id)

with closing(sqlite3.connect(path)) as database, database:
    database.row_factory = sqlite3.Row
    tables = [name for name, in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    held = {run_id: [] for run_id in ids}
    for table in tables:
        columns = [row["name"] for row in database.execute(f"PRAGMA table_info({table})")]
        if "run_uuid" in columns:
            for row in database.execute(f"SELECT * FROM {table} WHERE run_uuid IS NOT NULL"):
                held[row["run_uuid"]].append((table, dict(row)))
    for index in range(len(ids), records):
        origin, run_id = ids[index % written], uuid.uuid4().hex
        for table, row in sorted(held[origin], key=lambda one: one[0] != "runs"):
            copy = {name: cell.replace(origin, run_id) if isinstance(cell, str) else cell for name, cell in row.items()}
            if table == "runs":
                copy["start_time"] = index
            if "metric" in table:
                copy |= {"value": value_of(index, int(row["key"].removeprefix("metric"))), "timestamp": index}
            marks = ", ".join("?" * len(copy))
            database.execute(f"INSERT INTO {table} ({', '.join(copy)}) VALUES ({marks})", tuple(copy.values()))
        ids.append(run_id)

for index in {0, records // 2, records - 1}:
    data = client.get_run(ids[index]).data
    if data.metrics != {f"metric{i}": value_of(index, i) for i in range(values)} or len(data.params) != values:
        raise SystemExit(f"MLflow reads another run {index}: {data}")
print(experiment, *ids)
"""


@contextmanager
def serving_mlflow(python: Path, folder: Path) -> Iterator[Server]:
    """MLflow's own server with its defaults, one SQLite file behind it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.sqlite3'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    log = folder / "mlflow.log"
    start_s = time.perf_counter()
    with (
        log.open("w") as written,
        subprocess.Popen(
            command, env=environment, stdout=written, stderr=written, text=True, start_new_session=True
        ) as process,
    ):
        try:
            _wait(port, process, log)
            yield Server(port=port, process=process, ready_s=time.perf_counter() - start_s)
        finally:
            os.killpg(process.pid, 15)


def fill_mlflow(python: Path, folder: Path, records: int) -> tuple[str, list[str]]:
    """An experiment and its runs' ids; MLflow's client reads some of them back."""
    command = [str(python), "-c", _FILL, str(folder / "mlflow.sqlite3"), *map(str, (records, VALUES, WRITTEN))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    experiment, *ids = done.stdout.split()[-records - 1 :]
    return experiment, ids


def _wait(port: int, process: "subprocess.Popen[str]", log: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise LookupError(log.read_text())


def _load(server: Server, total: int, *requests: str) -> Seen:
    return run(Load(port=server.port, connections=CONNECTIONS, total=total, requests=requests))


def _mlflow(python: Path, folder: Path, records: int) -> tuple[Server, int, Seen, Seen]:
    experiment, ids = fill_mlflow(python, folder, records)
    with serving_mlflow(python, folder) as server:
        gets = [request("GET", f"{API}/runs/get?run_id={run_id}") for run_id in ids[::10]]
        wanted = {
            "experiment_ids": [experiment],
            "filter": "params.param1 = '3'",
            "order_by": ["metrics.metric1 DESC"],
            "max_results": 50,
        }
        search = request("POST", f"{API}/runs/search", body=json.dumps(wanted))
        return server, server.resident_bytes, _load(server, 500, *gets), _load(server, 50, search)


def _ours(folder: Path, records: int) -> tuple[Server, int, Seen, Seen]:
    database = folder / "service.sqlite3"
    ids = fill(database, records)
    token = make_token(database)
    with serving(database) as server:
        gets = [request("GET", f"/v1/plans/{plan_id}", token) for plan_id in ids[::10]]
        time.sleep(1)
        resident_bytes = server.resident_bytes
        return server, resident_bytes, _load(server, 10_000, *gets), _load(server, 2_000, request("GET", LIST, token))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("python", type=Path, help="the Python of the environment that MLflow is installed in")
    parser.add_argument("--records", type=int, default=1_000)
    given = parser.parse_args()
    print(f"{busy_cores():.2f} cores busy with other things before\n")
    compile_modules()
    with tempfile.TemporaryDirectory() as folder:
        theirs, their_bytes, their_gets, their_searches = _mlflow(given.python, Path(folder), given.records)
        ours, our_bytes, our_gets, our_searches = _ours(Path(folder), given.records)
    print("| | pipeplan | MLflow | ratio |\n|---|---|---|---|")
    pairs = (("gets/s", our_gets, their_gets), ("searches/s", our_searches, their_searches))
    for name, mine, other in pairs:
        print(f"| {name} | {mine.per_s:,.0f} | {other.per_s:,.1f} | {mine.per_s / other.per_s:.0f} |")
        print(f"| p99 ms | {mine.p99_ms:.1f} | {other.p99_ms:.1f} | |")
        failed = {status for seen in (mine, other) for status in seen.statuses} - {"200"}
        if failed:
            print(f"unexpected answers: {mine.statuses} {other.statuses}")
    print(f"| ready after s | {ours.ready_s:.1f} | {theirs.ready_s:.1f} | |")
    print(f"| MiB | {our_bytes / 2**20:,.0f} | {their_bytes / 2**20:,.0f} | |")


if __name__ == "__main__":
    main()
