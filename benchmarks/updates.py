"""An update's time, predicted and measured: `python -m benchmarks.updates [MODEL...] [--optimizer NAME]`.

Every model of `benchmarks.memory` is profiled on two cores at once and run in two stages under 1F1B. Predicted: the
profile's seconds for each byte of weights, times those of the stage. Measured: the median update of the stage's run,
the batches that warm it up left out, by the wall clock.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.idle import watched_others
from benchmarks.memory import MODELS, Case, Trained, plan_for
from pipeplan.calibration.samples import MeasuredRun, Sample, stage_samples
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import dump, plan_document, read
from pipeplan.documents.plan import OPTIMIZERS
from pipeplan.documents.profile import Profile
from pipeplan.protocol.runs import read_run

FIVE = ("gpt2", "llama", "bert", "resnet", "lstm")
BATCHES, ROUNDS, MICROBATCHES = 20, 20, 4


def main(models: Sequence[str], optimizer: str) -> None:
    """Prints a row a stage."""
    print("| | optimizer | stage | weights MiB | predicted ms | measured ms | spread ms | error | others' cores |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in models or FIVE:
        trained = MODELS[model]
        trained = replace(trained, cuts=trained.cuts[::2])
        with tempfile.TemporaryDirectory() as name:
            run, others = _run(trained, optimizer, Path(name))
        for stage, costs in enumerate(run.plan.costs):
            cells = _cells(costs.update_s, stage_samples(run)[stage, "update"])
            print(f"| {model} | {optimizer} | {stage} | {costs.version_bytes / 2**20:.1f} | {cells} | {others:.2f} |")


def _cells(predicted_s: float, measured: Sample) -> str:
    seconds = (predicted_s, measured.value, measured.spread)
    return " | ".join((*(f"{each * 1e3:.2f}" for each in seconds), f"{predicted_s / measured.value - 1:+.1%}"))


def _run(trained: Trained, optimizer: str, folder: Path) -> tuple[MeasuredRun, float]:
    """The run of the model's plan, and how many cores others used meanwhile."""
    profile, cluster, plan, out = (folder / name for name in ("profile.json", "cluster.json", "plan.json", "run"))
    sizes = ("--devices", "2", "--microbatch-sizes", str(trained.microbatch_size), "--rounds", str(ROUNDS))
    files = ("--optimizer", optimizer, "-o", str(profile), "--cluster-output", str(cluster), "--json")
    work = ("--model", trained.model, "--data", trained.data)
    with watched_others() as others:
        _call("profile", *work, *sizes, *files)
        case = Case("1f1b", "1f1b", microbatches=MICROBATCHES)
        made = plan_for(case, trained, read(Profile, profile), read(Cluster, cluster), optimizer)
        plan.write_text(dump(plan_document(made)))
        steps = ("--steps", str(BATCHES), "--lr", "0.0001", "--checkpoint-every", "0")
        _call("run", "--plan", str(plan), *work, *steps, "--out", str(out), "--json")
    return read_run(out), others[0]


def _call(command: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "worker_agent", command, *arguments], stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", choices=[*FIVE, []], metavar="MODEL")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    asked = parser.parse_args()
    main(asked.models, asked.optimizer)
