"""The proofs of exact and their time, beside the recurrence on the same problem: `python -m benchmarks.exact`."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeplan.documents.cluster import Cluster, DeviceGroup, Level
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Answer, Plan
from pipeplan.documents.profile import Block, Device, Model, Profile
from pipeplan.planners.problem import Options, PlanningProblem, SearchProgress
from pipeplan.planners.solve import PLANNERS, exact

ROUNDS = 5
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A problem, and the recurrence that also answers it, if there is one."""

    name: str
    problem: PlanningProblem
    recurrence: str | None


def chain(blocks: int, *, device: Device, slowness: float = 1.0) -> Profile:
    """Blocks of uneven cost, from a fixed seed."""
    draw = random.Random(1)
    return Profile(
        model=Model(name="uneven chain"),
        device=device,
        dtype="float32",
        blocks=tuple(_block(f"block{index}", draw, slowness) for index in range(blocks)),
    )


def _block(name: str, draw: random.Random, slowness: float) -> Block:
    forward_s = draw.uniform(0.002, 0.006)
    boundary_bytes = draw.randrange(1, 9) * 2**20
    measurement = Measurement(
        microbatch_size=1,
        forward_s=forward_s * slowness,
        backward_s=forward_s * draw.uniform(1.8, 2.2) * slowness,
        input_bytes=boundary_bytes,
        output_bytes=boundary_bytes,
        activation_bytes=draw.randrange(100, 400) * 2**20,
    )
    return Block(name=name, weight_bytes=draw.randrange(20, 80) * 2**20, measurements=(measurement,))


def cases() -> list[Case]:
    """One type of device with and without a limit of memory, PipeDream's own replicas, and two types."""
    roomy, small = (Device(name=name, memory_bytes=size * GIB) for name, size in (("roomy", 80), ("small", 14)))
    ethernet = Level(size=16, bandwidth_bytes_per_s=3e9)
    one = PlanningProblem(
        profile=chain(96, device=roomy),
        cluster=Cluster(device=roomy, levels=(ethernet,)),
        batch_size=64,
        options=Options(schedule="pipedream-2bw", stages=16),
    )
    tight = replace(one, cluster=Cluster(device=small, levels=(ethernet,)))
    free = replace(tight, options=Options(schedule="pipedream-2bw"))
    pipedream = PlanningProblem(
        profile=chain(40, device=roomy),
        cluster=Cluster(device=roomy, levels=(replace(ethernet, size=8),)),
        batch_size=1,
        options=Options(schedule="pipedream"),
    )
    wide = replace(pipedream, cluster=one.cluster)
    groups = tuple(DeviceGroup(device=device, count=8) for device in (roomy, small))
    mixed = replace(
        free,
        cluster=Cluster(levels=(ethernet,), groups=groups),
        other_profiles=(chain(96, device=small, slowness=1.7),),
    )
    return [
        Case(name="96 blocks, 16 stages", problem=one, recurrence="pipedream-2bw"),
        Case(name="the same in 14 GiB, stages recompute", problem=tight, recurrence="pipedream-2bw"),
        Case(name="... and any depth and width", problem=free, recurrence="pipedream-2bw"),
        Case(name="pipedream, 40 blocks, 8 devices", problem=pipedream, recurrence="pipedream"),
        Case(name="pipedream, 40 blocks, 16 devices", problem=wide, recurrence="pipedream"),
        Case(name="96 blocks, 8 + 8 devices of two types", problem=mixed, recurrence=None),
    ]


def main() -> None:
    """Prints one row for each case: the best time of several rounds, each planner in turn."""
    print(
        "| problem | exact, s | deterministic s | gap | recurrence, s | exact / recurrence |\n|---|---|---|---|---|---|"
    )
    for case in cases():
        seen: list[SearchProgress] = []
        ours_s, theirs_s = [], []
        for _ in range(ROUNDS):
            answer, seconds = _timed(lambda: exact(case.problem, seen.append))  # noqa: B023
            ours_s.append(seconds)
            if case.recurrence is not None:
                _, seconds = _timed(lambda: PLANNERS[case.recurrence](case.problem))  # type: ignore[index]  # noqa: B023
                theirs_s.append(seconds)
        assert isinstance(answer, Plan)
        assert answer.certificate is not None
        other = f"{min(theirs_s):.3f} | {min(ours_s) / min(theirs_s):.1f}" if theirs_s else "none can | "
        row = f"{min(ours_s):.3f} | {seen[-1].spent:.2f} | {answer.certificate.gap:.1e} | {other}"
        print(f"| {case.name} | {row} |", flush=True)


def _timed(ask: Callable[[], Answer]) -> tuple[Answer, float]:
    started_s = time.perf_counter()
    answer = ask()
    return answer, time.perf_counter() - started_s


if __name__ == "__main__":
    main()
