"""Predicted against measured throughput, a row a schedule: `python -m benchmarks.prediction`."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.idle import busy_cores
from planner_service.demo.main_job import DATA, MODEL

STEPS = {"pipedream": 90}
"""PipeDream's steps are minibatches; the other schedules do 12 batches of 32 samples."""
ASKED = {
    "data-parallel": ("pipedream-2bw", "--schedule", "data-parallel", "--batch-size", "32"),
    "naive": ("pipedream-2bw", "--schedule", "naive", "--stages", "2", "--batch-size", "32"),
    "gpipe": ("gpipe", "--batch-size", "32"),
    "1f1b": ("pipedream-2bw", "--schedule", "1f1b", "--stages", "2", "--batch-size", "32"),
    "pipedream-2bw": ("pipedream-2bw", "--schedule", "pipedream-2bw", "--stages", "2", "--batch-size", "32"),
    "pipedream": ("pipedream", "--batch-size", "4"),
}


def main() -> None:
    """Profiles the demo's model once, at a microbatch of 4, then plans and runs every schedule on 2 processes."""
    print(f"{busy_cores():.2f} cores were busy before\n")
    print("| schedule | stages x replicas | predicted samples/s | measured | difference |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile, cluster = folder / "profile.json", folder / "cluster.json"
        measure = ["--devices", "2", "--microbatch-sizes", "4", "--optimizer", "adam", "-o", str(profile)]
        model = ["--model", MODEL, "--data", DATA]
        _call("worker_agent", "profile", *model, *measure, "--cluster-output", str(cluster))
        for schedule, (planner, *asked) in ASKED.items():
            found = ["--profile", str(profile), "--cluster", str(cluster), "--planner", planner, "--optimizer", "adam"]
            plan = _call("planner_service", "solve", *found, *asked, "--json")
            (folder / "plan.json").write_text(plan)
            steps = ["--steps", str(STEPS.get(schedule, 12)), "--learning-rate", "0.001", "--checkpoint-every", "0"]
            out = ["--plan", str(folder / "plan.json"), "--out", str(folder / schedule), "--json"]
            _print_row(schedule, json.loads(plan), json.loads(_call("worker_agent", "run", *model, *steps, *out)))


def _print_row(schedule: str, plan: dict[str, object], report: dict[str, dict[str, float]]) -> None:
    throughput = report["throughput_samples_per_s"]
    predicted, measured = throughput["predicted"], throughput["measured"]
    shape = f"{plan['depth']} x {plan['width']}"
    print(f"| {schedule} | {shape} | {predicted:.1f} | {measured:.1f} | {measured / predicted - 1:+.1%} |", flush=True)


def _call(package: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", package, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    main()
