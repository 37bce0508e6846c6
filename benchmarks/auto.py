"""What auto finds beside what it asks, and how long it takes: `python -m benchmarks.auto`."""

import time
from dataclasses import replace

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Block, Device, Measurement, Model, Profile
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.questions.smallest import rate

GPU = Device(name="gpu", memory_bytes=16 * 10**9)
ASKED = (("pipedream", None), ("pipedream-2bw", None), ("pipedream-2bw", "1f1b"), ("pipedream-2bw", "data-parallel"))


def transformer(blocks: int, servers: int, batch_size: int) -> PlanningProblem:
    """Equal blocks of 14 million parameters in 16 bits, on servers of 8 joined at 10 Gb/s."""
    sizes = (1, 2, 4, 8)
    measured = tuple(
        Measurement(
            microbatch_size=size,
            forward_s=0.01 * size,
            backward_s=0.02 * size,
            input_bytes=10**6 * size,
            output_bytes=10**6 * size,
            activation_bytes=30 * 10**6 * size,
        )
        for size in sizes
    )
    profile = Profile(
        model=Model(name="transformer"),
        device=GPU,
        dtype="float16",
        blocks=tuple(Block(name=f"{i}", weight_bytes=28 * 10**6, measurements=measured) for i in range(blocks)),
    )
    levels = (
        Level(size=8, bandwidth_bytes_per_s=5e10, latency_s=5e-6),
        Level(size=servers, bandwidth_bytes_per_s=1.25e9, latency_s=2e-5),
    )
    return PlanningProblem(profile=profile, cluster=Cluster(device=GPU, levels=levels), batch_size=batch_size)


def main() -> None:
    """Prints a table a cluster: seconds, and throughput when played, as a share of auto's."""
    print("| devices x blocks | planner | seconds | plan | samples/s, played | of auto's |\n|---|---|---|---|---|---|")
    for servers, blocks, batch_size in ((1, 48, 64), (8, 48, 512), (128, 48, 8192)):
        problem = transformer(blocks, servers, batch_size)
        best, seconds = _timed("auto", problem)
        _row(problem, "auto", best, seconds, rate(best))
        for planner, schedule in ASKED:
            size = 1 if planner == "pipedream" else None
            options = Options(schedule=schedule, microbatch_size=size)
            plan, seconds = _timed(planner, replace(problem, options=options))
            _row(problem, f"{planner} {schedule or ''}".strip(), plan, seconds, rate(best))


def _timed(planner: str, problem: PlanningProblem) -> tuple[Plan, float]:
    start_s = time.perf_counter()
    answer = solve(planner, problem)
    seconds = time.perf_counter() - start_s
    if not isinstance(answer, Plan):
        raise SystemExit(f"{planner}: {answer.reasons[0].detail}")
    return answer, seconds


def _row(problem: PlanningProblem, planner: str, plan: Plan, seconds: float, best: float) -> None:
    machines, blocks = problem.cluster.devices, len(problem.profile.blocks)
    found = f"{plan.schedule} {plan.depth} x {plan.width or 'mixed'}"
    print(
        f"| {machines} x {blocks} | {planner} | {seconds:.2f} | {found} | {rate(plan):.4g} | {rate(plan) / best:.3f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
