"""How long `pipeplan serve` takes until it is ready, and what memory it holds when idle: fixed work, best of five.

    python -m benchmarks.startup

The peer of the same run is the least that such a service can be: a FastAPI application with one route under uvicorn.
"""

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

REPETITIONS = 5
MIB = 2**20
PEER = """
import sys, uvicorn
from fastapi import FastAPI
app = FastAPI()
@app.get("/readyz")
def ready() -> dict[str, str]:
    return {"status": "ok"}
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""
PORT = 18_437


def main() -> None:
    """Measures both and prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        ours = [sys.executable, "-m", "planner_service", "serve", "--port", str(PORT), "--log-level", "error"]
        rows = {
            "pipeplan serve, new database": _best(lambda i: [*ours, "--database", f"sqlite:///{folder}/{i}.sqlite3"]),
            "pipeplan serve, same database": _best(lambda _: [*ours, "--database", f"sqlite:///{folder}/0.sqlite3"]),
            "FastAPI with one route": _best(lambda _: [sys.executable, "-c", PEER, str(PORT)]),
        }
    print(f"{'':32} {'ready after':>12} {'processor':>12} {'idle memory':>12}")
    for name, (ready_s, used_s, idle_bytes) in rows.items():
        print(f"{name:32} {ready_s:10.2f} s {used_s:10.2f} s {idle_bytes / MIB:8.0f} MiB")


def _best(command: Callable[[int], Sequence[str]]) -> tuple[float, ...]:
    measured = [_measure(command(repetition)) for repetition in range(REPETITIONS)]
    return tuple(map(min, zip(*measured, strict=True)))


def _measure(command: Sequence[str]) -> tuple[float, float, float]:
    """Seconds until it is ready, on the clock and of its processor time, and the bytes it keeps a second later."""
    start_s = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            while not _ready():
                time.sleep(0.01)
            ready_s, used_s = time.perf_counter() - start_s, _used_s(process.pid)
            time.sleep(1)
            return ready_s, used_s, _resident_bytes(process.pid)
        finally:
            process.terminate()


def _ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def _used_s(pid: int) -> float:
    """Processor time of the process's threads, without the processes that it started."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> float:
    """Of the process and those that it started."""
    pids = [pid, *(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return float(sum(_rss(each) for each in pids))


def _rss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    main()
