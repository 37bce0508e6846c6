"""2BP on 4 stages against its own table 1: `python -m benchmarks.two_bp`.

The stages wait instead of computing (forward, p1 and p2 alike), so that two cores show the schedules of four devices.
"""

import tempfile

from benchmarks.idle import busy_cores
from planner_service.core.plan import Plan, Stage
from planner_service.core.predict import predict
from planner_service.core.profile import Model
from planner_service.core.report import RunReport
from planner_service.core.schedule.program import pipelines_in_a_row
from planner_service.core.stage_costs import unit_costs
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.run import execute

STAGES, UNIT_S, SAMPLES, STEPS, ROUNDS = 4, 0.02, 2, 8, 3
MODEL = f"benchmarks.waiting:blocks?depth={STAGES}&unit_s={UNIT_S}&samples={SAMPLES}"
DATA = "worker_agent.models.presets:regression?width=8"
SCHEDULES = {
    "naive": ("naive", 1),
    "GPipe": ("gpipe", STAGES),
    "1F1B-1": ("1f1b", STAGES),
    "1F1B-2": ("1f1b", 2 * STAGES),
}


def plan_for(schedule: str, microbatches: int, *, split_backward: bool) -> Plan:
    """Four stages of one block each, with the times that the blocks wait."""
    costs = unit_costs(forward_s=UNIT_S, backward_input_s=UNIT_S, backward_weight_s=UNIT_S)
    return Plan(
        planner="benchmark",
        cost_model="unit",
        model=Model(name="waiting", spec=MODEL),
        dtype="float32",
        profile_id="0" * 32,
        cluster_id="0" * 32,
        batch_size=SAMPLES * microbatches,
        stages=tuple(Stage(start=s, stop=s + 1) for s in range(STAGES)),
        costs=(costs,) * STAGES,
        placement=pipelines_in_a_row((1,) * STAGES),
        schedule=schedule,
        microbatch_size=SAMPLES,
        microbatches=microbatches,
        optimizer="sgd",
        memory_accounting="training",
        time_per_microbatch_s=UNIT_S,
        throughput_samples_per_s=1.0,
        bubble_fraction=0.0,
        optimal_in_flight=STAGES,
        configurations_considered=1,
        split_backward=split_backward,
    )


def run(plan: Plan) -> RunReport:
    """Executes the plan through torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        job = RunJob(plan=plan, model=MODEL, data=DATA, steps=STEPS, learning_rate=1e-6, out=folder, device="cpu")
        return execute(job, lambda _: None).report


def main() -> None:
    """Prints a table: the best of some rounds in turn, beside what the streams predict."""
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
        print(f"| {name} | {' | '.join(cells)} | {expected:.3f}, {_speed(split) / _speed(fused):.3f} |")


def _speed(report: RunReport) -> float:
    return report.throughput_samples_per_s.measured


if __name__ == "__main__":
    main()
