"""Predicted against measured throughput: `python -m benchmarks.prediction [MODEL...] [--folder DIR]`.

The demo's model is profiled once; plans of every schedule are run on 2 processes. A calibration is then made from some
of the runs, and from all but one in turn, and predicts the others.

With models (of `MODELS`, or `all`) each of these is profiled, and some plans are predicted from that alone. A second
row has the errors of the predictions that each run's own first second gives, at the speed that the cores have then.

A run during which other programs took more than a tenth of a core, or that was not steady (`pipeplan.formats`), is
repeated, a few times at most. What was taken of the steadiest stands in the table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean

from benchmarks.idle import busy_cores, watched_others
from benchmarks.memory import Trained
from pipeplan.calibration.calibrate import calibrate, predicted_samples_per_s
from pipeplan.documents.calibration import Calibration, apply
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import dump, plan_document, read
from pipeplan.documents.plan import ClosedForm, Plan, Stage
from pipeplan.documents.profile import Profile
from pipeplan.formats import UNSTEADY
from pipeplan.planners.complete import Decision, complete
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.programs.program import pipelines_in_a_row
from pipeplan.programs.timeline import Timeline, throughput_samples_per_s
from pipeplan.programs.timeline_document import TimelineDocument
from pipeplan.protocol.runs import PLAN, REPORT, TIMELINE, read_run
from planner_service.demo.main_job import SMALL_GPT2

BATCHES, RUN_S = 15, 16.0
"""The training of every case: at least so many batches, and as many as are predicted to take so long."""

TRIES, PATIENCE_S, QUIET_CORES = 3, 20.0, 0.1
"""How often a disturbed run is repeated, how long to wait for a quiet moment, and what counts as quiet."""

OPTIMIZER = "adam"


def _tokens(length: int) -> str:
    return f"worker_agent.models.text:random_tokens?sequence_length={length}"


def _layers(hidden: int, layers: int) -> str:
    sizes = f"num_hidden_layers={layers}&hidden_size={hidden}&intermediate_size={3 * hidden}"
    return f"{sizes}&num_attention_heads=4&vocab_size=256&max_position_embeddings=128"


def _resnet(scale: float, image: int, samples: int) -> Trained:
    data = f"preset:random_images?size={image}&samples={samples}"
    return Trained(f"preset:resnet50?scale={scale}&image_size={image}", data, microbatch_size=samples)


def _lstm(hidden: int, layers: int) -> Trained:
    model = f"preset:gnmt?layers={layers}&hidden={hidden}&vocabulary=512"
    return Trained(model, "preset:random_translations?vocabulary=512", microbatch_size=8)


DEMO = Trained(SMALL_GPT2.model, SMALL_GPT2.data)
MODELS = {
    "gpt2": Trained("hf:gpt2?n_layer=6&n_embd=192&n_head=6&vocab_size=256&n_positions=128", _tokens(128)),
    "gpt2-small": Trained("hf:gpt2?n_layer=4&n_embd=64&n_head=4&vocab_size=256&n_positions=64", _tokens(64)),
    "llama": Trained(f"hf:llama?{_layers(192, 6)}&num_key_value_heads=4", _tokens(128)),
    "llama-small": Trained(f"hf:llama?{_layers(64, 4)}&num_key_value_heads=4", _tokens(64)),
    "bert": Trained(f"hf:bert?{_layers(192, 6)}", _tokens(128)),
    "bert-small": Trained(f"hf:bert?{_layers(64, 4)}", _tokens(64)),
    "resnet": _resnet(0.5, 96, 4),
    "resnet-small": _resnet(0.25, 64, 2),
    "lstm": _lstm(128, 6),
    "lstm-small": _lstm(32, 4),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A plan that is specified directly: where its stages end, and how a batch passes them.

    Without `stops` there are so many `stages` that the slowest is as fast as possible.
    """

    name: str
    schedule: str
    stages: int = 2
    stops: tuple[int, ...] = ()
    replicas: int = 1
    microbatches: int = 8
    recompute: bool = False
    chunks: int = 1
    two_bp: bool = False


@dataclass(frozen=True, slots=True)
class Timed:
    """A run of a plan; its folder holds what a calibration reads.

    `others` are the cores that other programs used meanwhile, `spread` is the largest of its ranks' compute. `again` is
    the error of the prediction that its first second gives.
    """

    plan: Plan
    timeline: Timeline
    folder: Path
    others: float
    spread: float
    again: float

    @property
    def disturbance(self) -> float:
        """How far it was from quiet and steady: 1 is the limit of either."""
        return max(self.others / QUIET_CORES, self.spread / UNSTEADY)

    @property
    def samples_per_s(self) -> float:
        """The measured throughput."""
        return throughput_samples_per_s(self.timeline)


CASES = (
    Case("data-parallel", "data-parallel", stages=1, replicas=2, microbatches=4),
    Case("naive", "naive"),
    Case("gpipe", "gpipe", recompute=True),
    Case("1f1b", "1f1b"),
    Case("pipedream-2bw", "pipedream-2bw"),
    Case("pipedream", "pipedream", microbatches=1),
    Case("pipedream, replicated", "pipedream", stages=1, replicas=2, microbatches=1),
    Case("gpipe, nothing recomputed", "gpipe"),
    Case("1f1b, 4 microbatches", "1f1b", microbatches=4),
    Case("1f1b, 5 and 3 blocks", "1f1b", stops=(5, 8)),
    Case("pipedream-2bw, 3 and 5 blocks", "pipedream-2bw", stops=(3, 8)),
    Case("zb-h1", "zb-h1"),
    Case("gpipe, 2BP", "gpipe", two_bp=True),
    Case("1f1b, 2BP", "1f1b", two_bp=True),
    Case("1f1b-interleaved", "1f1b-interleaved", stages=4, chunks=2),
    Case("zb-v", "zb-v", stages=4, chunks=2),
    Case("v-half", "v-half", stages=4, chunks=2),
    Case("dual-pipe-v", "dual-pipe-v", stages=4, chunks=2),
)
FEW = ("data-parallel", "gpipe", "1f1b", "pipedream-2bw", "pipedream", "zb-h1", "1f1b, 2BP", "1f1b-interleaved")
"""The cases for each of several models."""

TEACHERS = (("gpipe", "naive"), ("gpipe", "1f1b", "data-parallel"))
"""The cases from which a calibration is made that predicts all others."""

Errors = Mapping[str, float]


def main(models: Sequence[str] = (), folder: Path | None = None) -> None:
    """Measures, and prints the tables."""
    print(f"{busy_cores():.2f} cores were busy before")
    with tempfile.TemporaryDirectory() as temporary:
        _measure_and_print(models, folder or Path(temporary))


def _measure_and_print(models: Sequence[str], folder: Path) -> None:
    if not models:
        _print_tables(*_measure_all(DEMO, CASES, folder))
        return
    few = [case for case in CASES if case.name in FEW]
    print(f"\n| | {' | '.join(FEW)} | mean | worst | regret | others' cores | spread |")
    print(f"|---|{'---|' * (len(FEW) + 5)}")
    every = []
    for name in models:
        profile, cluster, runs = _measure_all(MODELS[name], few, folder / name)
        again = {case: run.again for case, run in runs.items()}
        disturbed = (f"{max(r.others for r in runs.values()):.2f}", f"{max(r.spread for r in runs.values()):.0%}")
        for row, errors in ((name, _errors(runs, profile, cluster)), ("from the first second", again)):
            sizes = [abs(error) for error in errors.values()]
            figures = (f"{fmean(sizes):.1%}", f"{max(sizes):.1%}", f"{_regret(runs, errors):.1%}")
            cells = (*(f"{errors[case]:+.1%}" for case in FEW), *figures, *disturbed)
            print(f"| {row} | {' | '.join(cells)} |", flush=True)
            every += sizes if row == name else []
    print(f"mean {fmean(every):.1%}, worst {max(every):.1%}")


def _measure_all(trained: Trained, cases: Sequence[Case], folder: Path) -> tuple[Profile, Cluster, dict[str, Timed]]:
    """Profile, cluster, and by case its run."""
    folder.mkdir(parents=True, exist_ok=True)
    profile, cluster = _profiled(trained, folder)
    return profile, cluster, {case.name: _measured(case, trained, profile, cluster, folder) for case in cases}


def _profiled(trained: Trained, folder: Path) -> tuple[Profile, Cluster]:
    profile, cluster = folder / "profile.json", folder / "cluster.json"
    if not profile.exists():
        _wait_for_quiet()
        sizes = ("--devices", "2", "--microbatch-sizes", str(trained.microbatch_size))
        files = ("--optimizer", OPTIMIZER, "-o", str(profile), "--cluster-output", str(cluster), "--json")
        _call("profile", "--model", trained.model, "--data", trained.data, *sizes, *files)
    return read(Profile, profile), read(Cluster, cluster)


def _measured(case: Case, trained: Trained, profile: Profile, cluster: Cluster, folder: Path) -> Timed:
    """The run that was disturbed the least."""
    plan = plan_for(case, trained.microbatch_size, profile, cluster)
    predicted = predicted_samples_per_s(plan, profile, cluster, batches=BATCHES)
    steps = max(BATCHES, round(RUN_S * predicted / plan.batch_size))
    out = folder / case.name.replace(", ", "-").replace(" ", "-")
    found: list[Timed] = []
    while len(found) < TRIES and not any(run.disturbance <= 1 for run in found):
        attempt = out.with_name(f"{out.name}-{len(found)}")
        if not (attempt / "run.json").exists():
            asked = out.with_suffix(".plan.json")
            asked.write_text(dump(plan_document(plan)))
            _wait_for_quiet()
            with watched_others() as others:
                work = ("--plan", str(asked), "--model", trained.model, "--data", trained.data, "--steps", str(steps))
                _call("run", *work, "--lr", "0.001", "--checkpoint-every", "0", "--out", str(attempt), "--json")
            (attempt / "others.txt").write_text(str(others[0]))
        timeline = read(TimelineDocument, attempt / TIMELINE).timeline()
        report = json.loads((attempt / REPORT).read_text())
        again = report["repredicted"]["throughput_samples_per_s"]
        timed = Timed(
            plan=read(Plan, attempt / PLAN),
            timeline=timeline,
            folder=attempt,
            others=float((attempt / "others.txt").read_text()),
            spread=max(rank["compute_spread"] or 0.0 for rank in report["ranks"]),
            again=again["predicted"] / again["measured"] - 1,
        )
        found.append(timed)
    return min(found, key=lambda run: run.disturbance)


def plan_for(case: Case, microbatch_size: int, profile: Profile, cluster: Cluster) -> Plan:
    """The case's plan, with the costs that the profile gives it."""
    stops = case.stops or _even_stops(profile, microbatch_size, case.stages)
    stages = tuple(
        Stage(start=start, stop=stop, replicas=case.replicas, recompute=case.recompute)
        for start, stop in pairwise((0, *stops))
    )
    batch_size = microbatch_size * case.microbatches * case.replicas
    decision = Decision(
        planner="benchmark",
        cost_model="simulated",
        stages=stages,
        placement=pipelines_in_a_row((case.replicas,) * (len(stages) // case.chunks)),
        schedule=case.schedule,
        microbatch_size=microbatch_size,
        microbatches=case.microbatches,
        batch_size=batch_size,
        closed_form=ClosedForm(time_per_microbatch_s=1.0, throughput_samples_per_s=1.0, bubble_fraction=0.0),
        optimal_in_flight=len(stages),
        configurations_considered=1,
        chunks=case.chunks,
    )
    problem = PlanningProblem(
        profile=profile, cluster=cluster, batch_size=batch_size, options=Options(optimizer=OPTIMIZER)
    )
    return replace(complete(problem, decision), split_backward=case.two_bp)


def _even_stops(profile: Profile, microbatch_size: int, stages: int) -> tuple[int, ...]:
    """Where stages end of which the slowest is as fast as possible."""
    measured = [block.at(microbatch_size) for block in profile.blocks]
    seconds = [each.forward_s + each.backward_s for each in measured]
    count = len(seconds)
    cuts = ((*inner, count) for inner in combinations(range(1, count), stages - 1))
    return min(cuts, key=lambda stops: max(sum(seconds[i:j]) for i, j in pairwise((0, *stops))))


def _print_tables(profile: Profile, cluster: Cluster, runs: Mapping[str, Timed]) -> None:
    """One row for each case; errors of a calibration's own cases are in brackets and do not count."""
    columns: dict[str, Errors] = {"profile alone": _errors(runs, profile, cluster)}
    taught: dict[str, Sequence[str]] = {"profile alone": ()}
    for teachers in TEACHERS:
        title = f"calibrated on {' + '.join(teachers)}"
        columns[title] = _errors(runs, *apply(_calibration(profile, cluster, runs, teachers), profile, cluster))
        taught[title] = teachers
    columns["on all but this one"] = {
        name: _errors({name: run}, *apply(_calibration(profile, cluster, runs, set(runs) - {name}), profile, cluster))[
            name
        ]
        for name, run in runs.items()
    }
    taught["on all but this one"] = ()
    print(f"\n| | measured samples/s | others' cores | spread | {' | '.join(columns)} |")
    print(f"|---|---|---|---|{'---|' * len(columns)}")
    for name, run in runs.items():
        cells = [_cell(errors[name], known=name in taught[title]) for title, errors in columns.items()]
        print(f"| {name} | {run.samples_per_s:.1f} | {run.others:.2f} | {run.spread:.0%} | {' | '.join(cells)} |")
    means, regrets = [], []
    for title, errors in columns.items():
        held = {name: error for name, error in errors.items() if name not in taught[title]}
        means.append(f"{fmean(abs(error) for error in held.values()):.1%}")
        regrets.append(f"{_regret(runs, errors):.1%}")
    print(f"| mean absolute error | | | | {' | '.join(means)} |")
    print(f"| regret | | | | {' | '.join(regrets)} |")


def _cell(error: float, *, known: bool) -> str:
    return f"({error:+.1%})" if known else f"{error:+.1%}"


def _calibration(profile: Profile, cluster: Cluster, runs: Mapping[str, Timed], names: Collection[str]) -> Calibration:
    """The calibration from these runs."""
    return calibrate(profile, cluster, [read_run(runs[name].folder) for name in sorted(names)])


def _errors(runs: Mapping[str, Timed], profile: Profile, cluster: Cluster) -> Errors:
    """(predicted - measured) / measured by case."""
    return {
        name: predicted_samples_per_s(run.plan, profile, cluster, batches=run.timeline.batches) / run.samples_per_s - 1
        for name, run in runs.items()
    }


def _regret(runs: Mapping[str, Timed], errors: Errors) -> float:
    """By how much the case predicted to be the fastest measured less than the fastest."""
    measured = {name: run.samples_per_s for name, run in runs.items()}
    chosen = max(runs, key=lambda name: measured[name] * (1 + errors[name]))
    return 1 - measured[chosen] / max(measured.values())


def _wait_for_quiet() -> None:
    """Returns as soon as the cores are idle, or when patience ends."""
    end_s = time.monotonic() + PATIENCE_S
    while busy_cores() > QUIET_CORES and time.monotonic() < end_s:
        pass


def _call(command: str, *arguments: str) -> None:
    whole = [sys.executable, "-m", "worker_agent", command, *arguments]
    done = subprocess.run(whole, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", choices=[*MODELS, "all", []], metavar="MODEL")
    parser.add_argument("--folder", type=Path, help="keeps the runs there, and does not repeat those that are there")
    asked = parser.parse_args()
    main(list(MODELS) if "all" in asked.models else asked.models, asked.folder)
