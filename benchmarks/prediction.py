"""Predicted against measured throughput, without and with calibration: `python -m benchmarks.prediction [DIR]`.

The demo's model is profiled once; every case is planned and run on 2 processes. A calibration is then made from some of
the runs, and from all but one in turn, and predicts the others. Runs whose ranks hold several stages teach none: what
each of the stages costs cannot be told apart. A run during which other programs took more than a
tenth of a core is repeated, a few times at most; what was taken in the end stands in the table.

The cores' own speed (`benchmarks.speed`) is taken before and after the profile and every run: what a run measured is
stated at the speed that the cores had for the profile.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.idle import busy_cores, watched_others
from benchmarks.speed import passes_per_s
from pipeplan.calibration.calibrate import calibrate, predicted_samples_per_s
from pipeplan.documents.calibration import Calibration, apply
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import dump, plan_document, read
from pipeplan.documents.plan import ClosedForm, Plan, Stage
from pipeplan.documents.profile import Profile
from pipeplan.planners.complete import Decision, complete
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.programs.program import pipelines_in_a_row
from pipeplan.programs.timeline import Timeline, throughput_samples_per_s
from pipeplan.programs.timeline_document import TimelineDocument
from pipeplan.protocol.runs import PLAN, TIMELINE, read_run
from planner_service.demo.main_job import SMALL_GPT2

SAMPLES = 480
"""The training of every case: 15 batches of 32."""

TRIES, PATIENCE_S, QUIET_CORES = 3, 20.0, 0.1
"""How often a disturbed run is repeated, how long to wait for a quiet moment, and what counts as quiet."""

MICROBATCH_SIZE, BLOCKS, OPTIMIZER = 4, 8, "adam"


@dataclass(frozen=True, slots=True)
class Case:
    """A plan that is specified directly: where its stages end, and how a batch passes them."""

    name: str
    schedule: str
    stops: tuple[int, ...] = (4, BLOCKS)
    replicas: int = 1
    microbatches: int = 8
    recompute: bool = False
    chunks: int = 1
    two_bp: bool = False


@dataclass(frozen=True, slots=True)
class Timed:
    """A run of a plan; its folder holds what a calibration reads. `speed` is that of the cores, 1 for the profile."""

    plan: Plan
    timeline: Timeline
    folder: Path
    speed: float

    @property
    def samples_per_s(self) -> float:
        """The measured throughput, at the profile's speed."""
        return throughput_samples_per_s(self.timeline) / self.speed


QUARTERS = (2, 4, 6, BLOCKS)

CASES = (
    Case("data-parallel", "data-parallel", stops=(BLOCKS,), replicas=2, microbatches=4),
    Case("naive", "naive"),
    Case("gpipe", "gpipe", recompute=True),
    Case("1f1b", "1f1b"),
    Case("pipedream-2bw", "pipedream-2bw"),
    Case("pipedream", "pipedream", microbatches=1),
    Case("pipedream, replicated", "pipedream", stops=(BLOCKS,), replicas=2, microbatches=1),
    Case("gpipe, nothing recomputed", "gpipe"),
    Case("1f1b, 4 microbatches", "1f1b", microbatches=4),
    Case("1f1b, 5 and 3 blocks", "1f1b", stops=(5, BLOCKS)),
    Case("pipedream-2bw, 3 and 5 blocks", "pipedream-2bw", stops=(3, BLOCKS)),
    Case("zb-h1", "zb-h1"),
    Case("gpipe, 2BP", "gpipe", two_bp=True),
    Case("1f1b, 2BP", "1f1b", two_bp=True),
    Case("1f1b-interleaved", "1f1b-interleaved", stops=QUARTERS, chunks=2),
    Case("zb-v", "zb-v", stops=QUARTERS, chunks=2),
    Case("v-half", "v-half", stops=QUARTERS, chunks=2),
    Case("dual-pipe-v", "dual-pipe-v", stops=QUARTERS, chunks=2),
)
TEACHERS = (("gpipe", "naive"), ("gpipe", "1f1b", "data-parallel"))
"""The cases from which a calibration is made that predicts all others."""

Errors = Mapping[str, float]


def main() -> None:
    """Measures, and prints the tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else name)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{busy_cores():.2f} cores were busy before")
        profile, cluster, profiled_at = _profiled(folder)
        runs, others = {}, {}
        for case in CASES:
            runs[case.name], others[case.name] = _measured(case, profile, cluster, folder, profiled_at)
        _print_tables(profile, cluster, runs, others)


def _profiled(folder: Path) -> tuple[Profile, Cluster, float]:
    """The profile, the cluster, and the cores' speed meanwhile."""
    profile, cluster = folder / "profile.json", folder / "cluster.json"
    if not profile.exists():
        _wait_for_quiet()
        sizes = ("--devices", "2", "--microbatch-sizes", str(MICROBATCH_SIZE), "--rounds", "10")
        files = ("-o", str(profile), "--cluster-output", str(cluster), "--json")
        with _at_speed(folder / "speed.txt"):
            _call(
                "profile",
                "--model",
                SMALL_GPT2.model,
                "--data",
                SMALL_GPT2.data,
                "--optimizer",
                OPTIMIZER,
                *sizes,
                *files,
            )
    return read(Profile, profile), read(Cluster, cluster), float((folder / "speed.txt").read_text())


@contextmanager
def _at_speed(path: Path) -> Iterator[None]:
    """Records the cores' speed, the mean of those before and after the body."""
    before = passes_per_s()
    yield
    path.write_text(str((before + passes_per_s()) / 2))


def _measured(case: Case, profile: Profile, cluster: Cluster, folder: Path, profiled_at: float) -> tuple[Timed, float]:
    """The run that was disturbed the least, and how many cores others used meanwhile."""
    plan = plan_for(case, profile, cluster)
    out = folder / case.name.replace(", ", "-").replace(" ", "-")
    found: list[tuple[float, Timed]] = []
    while len(found) < TRIES and not any(busy <= QUIET_CORES for busy, _ in found):
        attempt = out.with_name(f"{out.name}-{len(found)}")
        if not (attempt / "run.json").exists():
            (folder / "plan.json").write_text(dump(plan_document(plan)))
            _wait_for_quiet()
            with _at_speed(attempt.with_suffix(".speed")), watched_others() as others:
                steps = str(SAMPLES // plan.batch_size)
                chosen = (
                    "--plan",
                    str(folder / "plan.json"),
                    "--model",
                    SMALL_GPT2.model,
                    "--data",
                    SMALL_GPT2.data,
                    "--steps",
                    steps,
                )
                _call("run", *chosen, "--lr", "0.001", "--checkpoint-every", "0", "--out", str(attempt), "--json")
            (attempt / "others.txt").write_text(str(others[0]))
        timeline = read(TimelineDocument, attempt / TIMELINE).timeline()
        speed = float(attempt.with_suffix(".speed").read_text()) / profiled_at
        timed = Timed(plan=read(Plan, attempt / PLAN), timeline=timeline, folder=attempt, speed=speed)
        found.append((float((attempt / "others.txt").read_text()), timed))
    busy, run = min(found, key=lambda pair: pair[0])
    return run, busy


def plan_for(case: Case, profile: Profile, cluster: Cluster) -> Plan:
    """The case's plan, with the costs that the profile gives it."""
    stages = tuple(
        Stage(start=start, stop=stop, replicas=case.replicas, recompute=case.recompute)
        for start, stop in zip((0, *case.stops), case.stops, strict=False)
    )
    batch_size = MICROBATCH_SIZE * case.microbatches * case.replicas
    decision = Decision(
        planner="benchmark",
        cost_model="simulated",
        stages=stages,
        placement=pipelines_in_a_row((case.replicas,) * (len(stages) // case.chunks)),
        schedule=case.schedule,
        microbatch_size=MICROBATCH_SIZE,
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


def _print_tables(profile: Profile, cluster: Cluster, runs: Mapping[str, Timed], others: Mapping[str, float]) -> None:
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
    print(f"\n| | measured samples/s | speed | others' cores | {' | '.join(columns)} |")
    print(f"|---|---|---|---|{'---|' * len(columns)}")
    for name, run in runs.items():
        cells = [_cell(errors[name], known=name in taught[title]) for title, errors in columns.items()]
        print(f"| {name} | {run.samples_per_s:.1f} | {run.speed:.2f} | {others[name]:.2f} | {' | '.join(cells)} |")
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
    """The calibration from those of these runs whose ranks hold one stage each."""
    taken = [runs[name] for name in sorted(names) if runs[name].plan.chunks == 1]
    return calibrate(profile, cluster, [read_run(run.folder) for run in taken])


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
    subprocess.run([sys.executable, "-m", "worker_agent", command, *arguments], stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()
