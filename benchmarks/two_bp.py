"""2BP on 4 stages against its own table 1, and what goes beyond it: `python -m benchmarks.two_bp`.

The stages wait instead of computing (forward, p1 and p2 alike), so that two cores show the schedules of four devices.
"""

import tempfile

from benchmarks.idle import busy_cores
from pipeplan.documents.plan import Plan
from pipeplan.simulation.predict import predict
from pipeplan.simulation.report import RunReport
from tests.worker_agent.runtime.plans import make_plan
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.run import execute

STAGES, UNIT_S, SAMPLES, STEPS, ROUNDS = 4, 0.02, 2, 8, 3
DATA = "worker_agent.models.presets:regression?width=8"
SCHEDULES = {
    "naive": ("naive", 1),
    "GPipe": ("gpipe", STAGES),
    "1F1B-1": ("1f1b", STAGES),
    "1F1B-2": ("1f1b", 2 * STAGES),
}
BEYOND = (("1f1b", False, 1), ("1f1b", True, 1), ("zb-h1", False, 1), ("1f1b-interleaved", False, 2))
"""Schedules, whether 2BP splits their backward, and the chunks of a rank."""


def plan_for(schedule: str, microbatches: int, *, split_backward: bool, chunks: int = 1) -> Plan:
    """Four ranks with a stage each, or `chunks` stages with so much less to wait for; the times that they wait."""
    depth, unit_s = STAGES * chunks, UNIT_S / chunks
    return make_plan(
        schedule,
        tuple(range(depth + 1)),
        microbatch_size=SAMPLES,
        microbatches=microbatches,
        dtype="float32",
        split_backward=split_backward,
        chunks=chunks,
        unit_s=unit_s,
        spec=f"benchmarks.waiting:blocks?depth={depth}&unit_s={unit_s}&samples={SAMPLES}",
    )


def run(plan: Plan) -> RunReport:
    """Executes the plan through torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        spec = plan.model.spec or ""
        job = RunJob(plan=plan, model=spec, data=DATA, steps=STEPS, learning_rate=1e-6, out=folder, device="cpu")
        return execute(job, lambda _: None).report


def main() -> None:
    """Prints the tables: the best of some rounds in turn, beside what the streams predict."""
    print(f"{STEPS} batches, best of {ROUNDS}; {busy_cores():.2f} cores were busy before\n")
    print(
        "| | bubble fused: paper, measured | bubble split: paper, measured | gain: paper, measured |\n|---|---|---|---|"
    )
    for name, (schedule, microbatches) in SCHEDULES.items():
        plans = [plan_for(schedule, microbatches, split_backward=split) for split in (False, True)]
        rounds = [[run(plan) for plan in plans] for _ in range(ROUNDS)]
        fused, split = (max(column, key=_speed) for column in zip(*rounds, strict=True))
        paper = [predict(plan, batches=1) for plan in plans]
        expected = paper[0].makespan_s / paper[1].makespan_s
        cells = (
            f"{p.bubble_fraction:.3f}, {r.bubble_fraction.measured:.3f}"
            for p, r in zip(paper, (fused, split), strict=True)
        )
        print(f"| {name} | {' | '.join(cells)} | {expected:.3f}, {_speed(split) / _speed(fused):.3f} |", flush=True)
    for microbatches in (STAGES, 2 * STAGES):
        _beyond(microbatches)


def _beyond(microbatches: int) -> None:
    """Zero bubble and virtual stages beside 1F1B and 2BP, all of it in turn."""
    print(f"\n| {microbatches} microbatches | bubble: ideal, measured | throughput, of 1f1b: ideal, measured |")
    print("|---|---|---|")
    plans = [
        plan_for(schedule, microbatches, split_backward=split, chunks=chunks) for schedule, split, chunks in BEYOND
    ]
    rounds = [[run(plan) for plan in plans] for _ in range(ROUNDS)]
    found = [max(column, key=_speed) for column in zip(*rounds, strict=True)]
    ideal = [predict(plan, batches=1) for plan in plans]
    for (schedule, split, _), report, played in zip(BEYOND, found, ideal, strict=True):
        bubbles = f"{played.bubble_fraction:.3f}, {report.bubble_fraction.measured:.3f}"
        gains = f"{ideal[0].makespan_s / played.makespan_s:.3f}, {_speed(report) / _speed(found[0]):.3f}"
        print(f"| {schedule}{', 2BP' * split} | {bubbles} | {gains} |", flush=True)


def _speed(report: RunReport) -> float:
    return report.throughput_samples_per_s.measured


if __name__ == "__main__":
    main()
