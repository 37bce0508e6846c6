"""How fast the planners of PipeDream-2BW and GPipe search: fixed instances, each beside a plain full search.

`python -m benchmarks.search`: the best of several repetitions in one process, in CPU seconds. The plain search is the
same closed form without bounds: it splits every configuration of the largest instance that it finishes in reasonable
time, the same one, so that the ratio is of two ways to the same plan.
"""

import random
import time
from collections.abc import Callable, Sequence

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.profile import Block, Device, Model, Profile
from pipeplan.planners.chain import profiled
from pipeplan.planners.complete import play
from pipeplan.planners.gpipe import gpipe
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.planners.two_bw.bounds import expand
from pipeplan.planners.two_bw.candidate import Evaluator
from pipeplan.planners.two_bw.planner import two_bw
from pipeplan.planners.two_bw.search import BestFirstSearch
from pipeplan.planners.two_bw.shapes import ShapeSpace

REPETITIONS = 5
SIZES = (1, 2, 4, 8, 16, 32)
SIGMA = 0.35
"""Of the logarithm of a drawn block's weight: hardly two blocks are alike, and no split is even."""


def chain(weights: Sequence[float]) -> Profile:
    """Blocks of these weights; larger microbatches are more efficient."""
    return Profile(
        model=Model(name="chain"),
        device=Device(name="device", memory_bytes=16 * 10**9),
        dtype="float32",
        blocks=tuple(_block(index, weight) for index, weight in enumerate(weights)),
    )


def uneven(blocks: int) -> list[float]:
    """Weights up to 1.3, the first and the last 2.5 times as large."""
    ends = (0, blocks - 1)
    return [(1.0 + 0.3 * (index * 37 % 101) / 101) * (2.5 if index in ends else 1.0) for index in range(blocks)]


def drawn(blocks: int) -> list[float]:
    """Log-normal weights from a fixed seed."""
    draw = random.Random(1)
    return [draw.lognormvariate(0, SIGMA) for _ in range(blocks)]


def _block(index: int, weight: float) -> Block:
    return Block(
        name=f"block {index}",
        weight_bytes=int(weight * 48e6),
        measurements=tuple(
            Measurement(
                microbatch_size=size,
                forward_s=weight * 0.004 * (size + 1.5),
                backward_s=weight * 0.008 * (size + 1.5),
                input_bytes=4_000_000 * size,
                output_bytes=4_000_000 * size,
                activation_bytes=int(weight * 60e6) * size,
            )
            for size in SIZES
        ),
    )


def instance(
    weights: Sequence[float], servers: int, gigabytes: float, batch_size: int, options: Options | None = None
) -> PlanningProblem:
    """Servers of 8 devices."""
    levels = (
        Level(size=8, bandwidth_bytes_per_s=150e9),
        Level(size=servers, bandwidth_bytes_per_s=12e9),
    )
    device = Device(name="device", memory_bytes=int(gigabytes * 1e9))
    return PlanningProblem(
        profile=chain(weights),
        cluster=Cluster(device=device, levels=levels),
        batch_size=batch_size,
        options=options or Options(),
    )


INSTANCES = {
    "200 blocks, 4,096 devices": instance(uneven(200), 512, 16, 2**13 * 15),
    "the same, plenty of memory": instance(uneven(200), 512, 100_000, 2**13 * 15),
    "the same, 4 GB": instance(uneven(200), 512, 4, 2**13 * 15),
    "the same, batch 8 x 720,720": instance(uneven(200), 512, 16, 8 * 720_720),
    "200 blocks, 10,000 devices": instance(uneven(200), 1250, 16, 2**13 * 375),
    "200 blocks, 4,096 devices, safe batch 100,003": instance(uneven(200), 512, 16, 100_003, Options(safe_batch=True)),
    "1,000 blocks, 64 devices": instance(uneven(1000), 8, 16, 2**10),
    "200 drawn blocks, 4,096 devices": instance(drawn(200), 512, 16, 2**13 * 15),
    "200 drawn blocks, 4,096 devices, 4 GB": instance(drawn(200), 512, 4, 2**13 * 15),
    "200 drawn blocks, 4,096 devices, 64 GB": instance(drawn(200), 512, 64, 2**13 * 15),
    "200 drawn blocks, 64 devices, 0.3 GB": instance(drawn(200), 8, 0.3, 2**13),
    "1,000 drawn blocks, 4,096 devices": instance(drawn(1000), 512, 16, 2**13 * 15),
    "1,000 drawn blocks, 4,096 devices, 64 GB": instance(drawn(1000), 512, 64, 2**13 * 15),
    "1,000 drawn blocks, 64 devices, 1 GB": instance(drawn(1000), 8, 1, 2**13),
}


def plain(problem: PlanningProblem) -> float:
    """The highest rate, with every configuration split on its own."""
    measured = profiled(problem)
    space = ShapeSpace(problem=problem, measured=measured)
    evaluator = Evaluator(problem=problem, measured=measured)
    search = BestFirstSearch(space=space, evaluator=evaluator)
    best = 0.0
    for rows in space.rows:
        found = expand(rows)
        for index in range(len(found)):
            candidate = evaluator.fastest(search.shape(found, index))
            best = max(best, candidate.throughput_samples_per_s if candidate else 0.0)
    return best


def best_s(work: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """CPU seconds of the fastest repetition."""
    return min(_once_s(work) for _ in range(repetitions))


def _once_s(work: Callable[[], object]) -> float:
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def main() -> None:
    """Prints a line an instance: the planner's call, the play of its plan's streams, the search by play, and what was
    split of how many by the closed form.
    """
    print(f"{'pipedream-2bw':46} {'plan ms':>9} {'play ms':>10} {'by play ms':>11}  split of considered")
    for name, problem in INSTANCES.items():
        plan = two_bw(problem)
        if isinstance(plan, Infeasible):
            print(f"{name:46} {1e3 * best_s(lambda p=problem: two_bw(p)):9.1f} {'':>10} {'':>11}  none fits")  # type: ignore[misc]
            continue
        assert plan.certificate is not None
        whole_s, played_s = best_s(lambda p=problem: two_bw(p)), best_s(lambda p=plan: play(p))  # type: ignore[misc]
        searched_s = best_s(lambda p=problem: solve("pipedream-2bw", p), 1)  # type: ignore[misc]
        split = f"{int(plan.certificate.witness[-1])} of {plan.configurations_considered}"
        print(f"{name:46} {1e3 * whole_s:9.1f} {1e3 * played_s:10.1f} {1e3 * searched_s:11.1f}  {split}")
    for kind, weights in (("", uneven(100)), (" drawn", drawn(100))):
        small = instance(weights, 8, 16, 2**7)
        plan = two_bw(small)
        assert isinstance(plan, Plan)
        assert abs(plain(small) / plan.closed_form.throughput_samples_per_s - 1) < 1e-12
        ratio = best_s(lambda p=small: plain(p), 1) / best_s(lambda p=small: two_bw(p))  # type: ignore[misc]
        print(f"100{kind} blocks, 64 devices: a search that splits every configuration takes {ratio:.0f} times as long")
    print(f"\n{'gpipe, one microbatch size':46} {'plan ms':>9} {'play ms':>10}")
    for blocks in (200, 1000):
        options = Options(microbatch_size=4)
        problem = instance(uneven(blocks), 8, 1000, 2**10, options)
        plan = gpipe(problem)
        assert isinstance(plan, Plan)
        whole_s, played_s = best_s(lambda p=problem: gpipe(p)), best_s(lambda p=plan: play(p))  # type: ignore[misc]
        print(f"{f'{blocks} blocks, 64 cells':46} {1e3 * whole_s:9.1f} {1e3 * played_s:10.1f}")


if __name__ == "__main__":
    main()
