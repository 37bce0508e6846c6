"""How fast PipeDream's partitioner answers, beside the recurrence of the paper: `python -m benchmarks.partition`.

Fixed instances; the whole call of a warm process, states, certificate and the play of its plan in it, the best of
several repetitions in CPU seconds. The peer is the recurrence itself, vectorised over states (2018, section 3.2): its
tables have to give the same bottleneck. A line says what the first answer of a fresh process takes.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.profile import Block, Device, Model, Profile
from pipeplan.imports.pipedream_graph import import_pipedream_graph
from pipeplan.planners.pipedream.planner import pipedream
from pipeplan.planners.pipedream.states import States, cut_states
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve

PROFILES = Path(__file__).parents[1] / "tests" / "data" / "profiles"
REPETITIONS = 5
DEVICE = Device(name="device", memory_bytes=10**13)
EXCHANGE = 4.0
"""Through a parameter server: 4 (m - 1)/m of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on servers, from the inside out, of devices with so much memory.

    `peer`: whether the recurrence, which does not look at memory, finishes in reasonable time.
    """

    name: str
    profile: Profile
    levels: tuple[Level, ...]
    peer: bool = False
    memory_bytes: int = DEVICE.memory_bytes

    @property
    def problem(self) -> PlanningProblem:
        """For one minibatch of the profile's only size."""
        (size,) = self.profile.microbatch_sizes
        cluster = Cluster(device=replace(DEVICE, memory_bytes=self.memory_bytes), levels=self.levels)
        return PlanningProblem(
            profile=self.profile,
            cluster=cluster,
            batch_size=size,
            options=Options(synchronisation="parameter-server"),
        )


def imported(name: str) -> Profile:
    """A profile of the PipeDream authors."""
    text = (PROFILES / f"{name}.graph.txt").read_text()
    return import_pipedream_graph(text, microbatch_size=64, model=Model(name=name), device=DEVICE, dtype="float32")


def drawn(*branches: int) -> Profile:
    """Branches of so many uneven blocks each, between two empty blocks; one branch is a chain."""
    draw = random.Random(1)
    edges, first = list[tuple[int, int]](), 0
    for length in branches:
        edges += [(block, block + 1) for block in range(first, first + length - 1)]
        first += length
    return Profile(
        model=Model(name="drawn"),
        device=DEVICE,
        dtype="float32",
        blocks=tuple(_block(f"block{index}", draw) for index in range(first)),
        edges=tuple(edges) if len(branches) > 1 else None,
    )


def _block(name: str, draw: random.Random) -> Block:
    compute_s = draw.lognormvariate(0, 0.7) * 1e-3
    output_bytes = int(draw.lognormvariate(0, 1) * 1e6)
    measurement = Measurement(
        microbatch_size=64,
        forward_s=compute_s / 3,
        backward_s=2 * compute_s / 3,
        input_bytes=output_bytes,
        output_bytes=output_bytes,
        activation_bytes=output_bytes,
    )
    return Block(name=name, weight_bytes=int(draw.lognormvariate(0, 1.5) * 2e6), measurements=(measurement,))


def alike(blocks: int) -> Profile:
    """A chain of blocks that are nearly alike: everything is log-normal with the same small spread."""
    draw = random.Random(1)
    return Profile(
        model=Model(name="alike"),
        device=DEVICE,
        dtype="float32",
        blocks=tuple(_like_others(f"block{index}", draw) for index in range(blocks)),
    )


def _like_others(name: str, draw: random.Random) -> Block:
    compute_s, sent, kept, weights = (draw.lognormvariate(0, 0.35) for _ in range(4))
    measurement = Measurement(
        microbatch_size=64,
        forward_s=compute_s * 1e-2 / 3,
        backward_s=compute_s * 2e-2 / 3,
        input_bytes=int(sent * 1e6),
        output_bytes=int(sent * 1e6),
        activation_bytes=int(kept * 5e7),
    )
    return Block(name=name, weight_bytes=int(weights * 2e7), measurements=(measurement,))


def servers(*levels: tuple[int, float]) -> tuple[Level, ...]:
    """Sizes and bytes a second, from the inside out."""
    return tuple(Level(size=size, bandwidth_bytes_per_s=bandwidth) for size, bandwidth in levels)


def cases() -> list[Case]:
    """The authors' profiles, graphs and long chains."""
    ethernet = servers((16, 1.25e9))
    return [
        *(Case(name=f"{name}, 16", profile=imported(name), levels=ethernet, peer=True) for name in _AUTHORS),
        Case(name="graph of 1,495 cuts, 16", profile=drawn(64, 22), levels=ethernet, peer=True),
        Case(name="1,000 blocks, 64", profile=drawn(1000), levels=servers((64, 1.25e9)), peer=True),
        Case(name="1,000 blocks, 4,096", profile=drawn(1000), levels=servers((4096, 1.25e9))),
        Case(name="1,000 blocks, 8 x 512", profile=drawn(1000), levels=servers((8, 1e10), (512, 1.25e9))),
        Case(
            name="1,000 blocks, 8 x 32 x 64",
            profile=drawn(1000),
            levels=servers((8, 1e11), (32, 1.25e10), (64, 1.25e9)),
        ),
        Case(name="1,000 blocks nearly alike, 8 x 512", profile=alike(1000), levels=servers((8, 1e10), (512, 1.25e9))),
        *(
            Case(name=f"{name} in {gigabytes:g} GB", profile=profile, levels=levels, memory_bytes=int(gigabytes * 1e9))
            for name, profile, levels, *several in _tight()
            for gigabytes in several
        ),
    ]


def _tight() -> list[tuple[str, Profile, tuple[Level, ...], float, float]]:
    """Models with two sizes of memory in GB: one that decides, and one in which nothing fits."""
    return [
        ("vgg16, 16", imported("vgg16"), servers((16, 1.25e9)), 8, 4),
        ("resnet50, 16", imported("resnet50"), servers((16, 1.25e9)), 16, 4),
        ("200 blocks nearly alike, 64", alike(200), servers((64, 1.25e9)), 4.8, 2.4),
        ("1,000 blocks nearly alike, 16", alike(1000), servers((16, 1.25e9)), 36, 24),
    ]


_AUTHORS = ("vgg16", "resnet50", "gnmt")


def recurrence(states: States, level: Level) -> float:
    """A(j, m) for all states j and machines m, on one level: the least bottleneck of all machines."""
    below = np.arange(len(states))[:, None] < np.arange(len(states)) if states.before is None else states.before
    compute_s = np.where(below, states.compute_s - states.compute_s[:, None], np.inf)
    weight_bytes = states.weight_bytes - states.weight_bytes[:, None]
    boundary_s = 2.0 * states.boundary_bytes / level.bandwidth_bytes_per_s
    tables = list[np.ndarray[tuple[int], np.dtype[np.float64]]]()
    for machines in range(1, level.size + 1):
        best = _stage_s(compute_s, weight_bytes, level, machines)[0]
        for replicas in range(1, machines):
            before_s = np.maximum(tables[machines - replicas - 1], boundary_s)
            stage_s = _stage_s(compute_s, weight_bytes, level, replicas)
            best = np.minimum(best, np.maximum(before_s[:, None], stage_s).min(axis=0))
        tables.append(best)
    return float(tables[-1][-1])


def _stage_s(
    compute_s: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    weight_bytes: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    level: Level,
    replicas: int,
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    exchange_s = EXCHANGE * (replicas - 1) / replicas * weight_bytes / level.bandwidth_bytes_per_s
    return np.asarray(np.maximum(compute_s, exchange_s) / replicas)


def best_s(work: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """CPU seconds of the fastest repetition."""
    return min(_once_s(work) for _ in range(repetitions))


def _once_s(work: Callable[[], object]) -> float:
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def of_recurrence(case: Case, plan: Plan) -> float:
    """The recurrence's time for the same bottleneck."""
    (size,) = case.profile.microbatch_sizes
    states = cut_states(case.profile, size).states
    start_s = time.process_time()
    bottleneck_s = recurrence(states, case.levels[0])
    taken_s = time.process_time() - start_s
    found_s = plan.closed_form.time_per_microbatch_s
    assert abs(bottleneck_s / found_s - 1) < 1e-9, (bottleneck_s, found_s)
    return taken_s


def fresh_s(case: Case) -> float:
    """The command from its start to its answer, without compiled files or caches: wall clock."""
    with tempfile.TemporaryDirectory() as folder:
        for name, document in (("profile", case.profile), ("cluster", case.problem.cluster)):
            (Path(folder) / f"{name}.json").write_text(json.dumps(asdict(document)))
        command = [sys.executable, "-m", "planner_service", "solve", "--planner", "pipedream", "--json"]
        command += ["--profile", f"{folder}/profile.json", "--cluster", f"{folder}/cluster.json"]
        command += ["--batch-size", "64"]
        start_s = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - start_s


def main() -> None:
    """Prints one line for each instance."""
    print("| | stages | whole, ms | recurrence, ms | ratio | by play, ms |\n|---|---|---|---|---|---|")
    for case in cases():
        plan = pipedream(case.problem)
        if isinstance(plan, Infeasible):
            whole_s = best_s(lambda problem=case.problem: pipedream(problem))  # type: ignore[misc]
            print(f"| {case.name} | none fits | {1e3 * whole_s:.1f} |  |  |  |", flush=True)
            continue
        assert plan.certificate is not None and plan.certificate.gap < 1e-9
        whole_s = best_s(lambda problem=case.problem: pipedream(problem))  # type: ignore[misc]
        peer = ["", ""]
        if case.peer:
            peer_s = of_recurrence(case, plan)
            peer = [f"{1e3 * peer_s:.1f}", f"{peer_s / whole_s:.1f}"]
        played = f"{1e3 * best_s(lambda problem=case.problem: solve('pipedream', problem), 1):.1f}"  # type: ignore[misc]
        row = [case.name, f"{len(plan.stages)}", f"{1e3 * whole_s:.1f}", *peer, played]
        print("|", " | ".join(row), "|", flush=True)
    first = cases()[0]
    first_s = min(fresh_s(first) for _ in range(3))
    print(f"\nFirst answer of a fresh process, {first.name}: {first_s:.2f} s, imports and all")


if __name__ == "__main__":
    main()
