"""Auto's answers beside those of the planners that it asks, and its time: `python -m benchmarks.auto`.

`python -m benchmarks.auto PROFILE CLUSTER BATCH_SIZE OPTIMIZER` asks about a problem of one's own: its answer's closed
form, bound and play, and the fastest play that any schedule and depth gives that is forced upon it.
"""

import random
import sys
import time
from dataclasses import replace

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.files import load
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Answer, Plan
from pipeplan.documents.profile import Block, Device, Model, Profile
from pipeplan.errors import InvalidInputError
from pipeplan.planners.auto.space import SEARCHED
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.questions.smallest import rate

GPU = Device(name="gpu", memory_bytes=16 * 10**9)
ASKED = (("pipedream", None), ("pipedream-2bw", None), ("pipedream-2bw", "1f1b"), ("pipedream-2bw", "data-parallel"))


SIZES = (1, 2, 4, 8)


def transformer(
    blocks: int, servers: int, batch_size: int, *, sigma: float = 0.0, gigabytes: float = 16
) -> PlanningProblem:
    """Blocks of 14 million parameters in 16 bits, equal or times log-normal factors, on servers of 8 at 10 Gb/s."""
    gpu = replace(GPU, memory_bytes=int(gigabytes * 1e9))
    draw = random.Random(1)
    profile = Profile(
        model=Model(name="drawn" if sigma else "equal"),
        device=GPU,
        dtype="float16",
        blocks=tuple(_block(f"{index}", draw.lognormvariate(0, sigma)) for index in range(blocks)),
    )
    levels = (
        Level(size=8, bandwidth_bytes_per_s=5e10, latency_s=5e-6),
        Level(size=servers, bandwidth_bytes_per_s=1.25e9, latency_s=2e-5),
    )
    return PlanningProblem(profile=profile, cluster=Cluster(device=gpu, levels=levels), batch_size=batch_size)


def _block(name: str, factor: float) -> Block:
    measured = tuple(
        Measurement(
            microbatch_size=size,
            forward_s=factor * 0.01 * size,
            backward_s=factor * 0.02 * size,
            input_bytes=10**6 * size,
            output_bytes=10**6 * size,
            activation_bytes=int(factor * 30 * 10**6) * size,
        )
        for size in SIZES
    )
    return Block(name=name, weight_bytes=int(factor * 28 * 10**6), measurements=measured)


def main() -> None:
    """Prints a table, of the named problem, or of equal and drawn blocks on three clusters."""
    if sys.argv[1:]:
        profile, cluster, batch_size, optimizer = sys.argv[1:]
        problem = PlanningProblem(
            profile=load(Profile, profile),
            cluster=load(Cluster, cluster),
            batch_size=int(batch_size),
            options=Options(optimizer=optimizer),
        )
        _forced(problem)
    else:
        _equal_blocks()


def _forced(problem: PlanningProblem) -> None:
    """Auto's answer beside the fastest of auto's answers to the same problem with a schedule and a depth."""
    best, seconds = _timed("auto", problem)
    forced = 0.0
    deepest = min(problem.cluster.devices, len(problem.profile.blocks))
    for schedule in SEARCHED:
        for depth in (2**power for power in range(deepest.bit_length())):
            options = replace(problem.options, schedule=schedule, stages=depth)
            try:
                answer = solve("auto", replace(problem, options=options))
            except InvalidInputError:
                continue  # such as data parallelism of two stages
            forced = max(forced, rate(answer) if isinstance(answer, Plan) else 0.0)
    assert isinstance(best, Plan) and best.certificate is not None
    found = f"{best.schedule} {best.depth} x {best.width or 'mixed'}"
    print("| plan | CPU s | closed form | bound | played | best of what is forced |\n|---|---|---|---|---|---|")
    print(
        f"| {found} | {seconds:.2f} | {best.closed_form.throughput_samples_per_s:.4g} | "
        f"{1 / best.certificate.bound:.4g} | {rate(best):.4g} | {forced:.4g} |"
    )


def _equal_blocks() -> None:
    """Seconds, and the played throughput as a share of auto's."""
    print(
        "| devices x blocks | planner | processor s | plan | samples/s, played | of auto's |\n|---|---|---|---|---|---|"
    )
    cases: list[tuple[int, int, float, float]]
    cases = [(1, 64, 0.0, 16), (8, 512, 0.0, 16), (128, 8192, 0.0, 16), (1, 64, 0.35, 16), (8, 512, 0.35, 16)]
    cases += [(8, 512, 0.35, 2), (128, 8192, 0.35, 2), (8, 512, 0.35, 0.2)]  # memory decides, twice; nothing fits
    for servers, batch_size, sigma, gigabytes in cases:
        problem = transformer(48, servers, batch_size, sigma=sigma, gigabytes=gigabytes)
        best, seconds = _timed("auto", problem)
        _row(problem, "auto", best, seconds, best)
        for planner, schedule in ASKED:
            size = 1 if planner == "pipedream" else None
            options = Options(schedule=schedule, microbatch_size=size)
            plan, seconds = _timed(planner, replace(problem, options=options))
            _row(problem, f"{planner} {schedule or ''}".strip(), plan, seconds, best)


def _timed(planner: str, problem: PlanningProblem) -> tuple[Answer, float]:
    start_s = time.process_time()
    answer = solve(planner, problem)
    return answer, time.process_time() - start_s


def _row(problem: PlanningProblem, planner: str, plan: Answer, seconds: float, best: Answer) -> None:
    model, machines, blocks = problem.profile.model.name, problem.cluster.devices, len(problem.profile.blocks)
    found, rates = "none fits", ["", ""]
    if isinstance(plan, Plan) and isinstance(best, Plan):
        found = f"{plan.schedule} {plan.depth} x {plan.width or 'mixed'}"
        rates = [f"{rate(plan):.4g}", f"{rate(plan) / rate(best):.3f}"]
    gigabytes = problem.cluster.device.memory_bytes / 1e9
    row = [f"{machines} x {blocks} {model}, {gigabytes:g} GB", planner, f"{seconds:.2f}", found]
    print("|", " | ".join([*row, *rates]), "|", flush=True)


if __name__ == "__main__":
    main()
