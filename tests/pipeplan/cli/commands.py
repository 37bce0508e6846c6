"""Runs `pipeplan`: its output and its exit status."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan.cli.app import build_app
from pipeplan.cli.console import run_app

PROFILES = Path(__file__).parents[2] / "data" / "profiles"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as one JSON document."""
        return json.loads(self.out)


def pipeplan(*arguments: str | Path) -> Ended:
    """`pipeplan` with these arguments, without the start of a process."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            words = [str(argument) for argument in arguments]
            run_app(build_app(words[0] if words else None), words)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
    return Ended(status, out.getvalue(), err.getvalue())


def pipeplan_process(*arguments: str | Path) -> Ended:
    """`pipeplan` with these arguments, as users start it."""
    command = [sys.executable, "-c", "from pipeplan.cli.app import main; main()", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


def write(path: Path, document: Any) -> Path:
    """A document in a file."""
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def profile_document(blocks: int = 2, **block: Any) -> dict[str, Any]:
    """A chain of equal blocks, measured at sizes 1 and 2."""
    return {
        "model": {"name": "chain"},
        "device": {"name": "cpu", "memory_bytes": 10**9},
        "dtype": "float32",
        "blocks": [
            {
                "name": f"block{index}",
                "weight_bytes": 1000,
                "measurements": [
                    {
                        "microbatch_size": size,
                        "forward_s": 0.01 * size,
                        "backward_s": 0.02 * size,
                        "input_bytes": 10 * size,
                        "output_bytes": 10 * size,
                        "activation_bytes": 50 * size,
                    }
                    for size in (1, 2)
                ],
            }
            | block
            for index in range(blocks)
        ],
    }


def cluster_document(devices: int = 2, memory_bytes: int = 10**9) -> dict[str, Any]:
    """One level."""
    return {
        "device": {"name": "cpu", "memory_bytes": memory_bytes},
        "levels": [{"size": devices, "bandwidth_bytes_per_s": 1e6, "latency_s": 1e-4}],
    }
