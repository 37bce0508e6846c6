"""The value of cuts between branches: `python -m benchmarks.graphs`.

The PipeDream authors' profiles of ResNet-50 and GNMT, on clusters of 16 devices of 16 GB; a batch has 32 minibatches of
the profile's size. A line has the samples a second where one tensor crosses every cut, and where any may cross: as
played, and by the closed form that chooses the stages.
"""

import time
from dataclasses import dataclass, replace

from benchmarks.partition import PROFILES, servers
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Device, Model, Profile
from pipeplan.imports.pipedream_graph import import_pipedream_graph
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve

DEVICE = Device(name="device", memory_bytes=16 * 10**9)
MINIBATCHES = 32

CLUSTERS: dict[str, tuple[Level, ...]] = {
    "4 x 4, 12 GB/s and 10 Gb/s": servers((4, 12e9), (4, 1.25e9)),
    "2 x 8, 12 GB/s and 25 Gb/s": servers((8, 12e9), (2, 3.125e9)),
}

ASKED = {
    "pipedream-2bw": ("pipedream-2bw", Options(schedule="pipedream-2bw")),
    "1f1b, 8 stages": ("pipedream-2bw", Options(schedule="1f1b", stages=8)),
    "gpipe, 8 stages": ("gpipe", Options(stages=8)),
    "auto": ("auto", Options()),
}
"""Planners and their options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A planner's samples a second, played and by its closed form, and the CPU seconds that it took."""

    played: float
    closed_form: float
    cpu_s: float


def imported(name: str) -> Profile:
    """A profile of the PipeDream authors, at the size that its file implies."""
    text = (PROFILES / f"{name}.graph.txt").read_text()
    return import_pipedream_graph(text, microbatch_size=None, model=Model(name=name), device=DEVICE, dtype="float32")


def answered(planner: str, problem: PlanningProblem) -> Answered | None:
    """The answer; None if no plan fits."""
    start_s = time.process_time()
    plan = solve(planner, problem)
    cpu_s = time.process_time() - start_s
    if not isinstance(plan, Plan) or plan.throughput_samples_per_s is None:
        return None
    return Answered(
        played=plan.throughput_samples_per_s,
        closed_form=plan.closed_form.throughput_samples_per_s,
        cpu_s=cpu_s,
    )


def main() -> None:
    """Prints a line for each model, cluster and planner."""
    print("| | | played: one tensor | any | ratio | closed form: one tensor | any | ratio | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in ("resnet50", "gnmt"):
        profile = imported(name)
        (size,) = profile.microbatch_sizes
        for where, levels in CLUSTERS.items():
            cluster = Cluster(device=DEVICE, levels=levels)
            for asked, (planner, options) in ASKED.items():
                problem = PlanningProblem(profile=profile, cluster=cluster, batch_size=MINIBATCHES * size)
                one, every = (
                    answered(planner, replace(problem, options=replace(options, cuts=cuts)))
                    for cuts in ("single-tensor", "any")
                )
                if one is None or every is None:
                    print(f"| {name}, {where} | {asked} | none fits |  |  |  |  |  |  |")
                    continue
                rates = [
                    f"{before:.0f} | {now:.0f} | {now / before:.3f}"
                    for before, now in ((one.played, every.played), (one.closed_form, every.closed_form))
                ]
                print(f"| {name}, {where} | {asked} | {' | '.join(rates)} | {every.cpu_s:.2f} |", flush=True)


if __name__ == "__main__":
    main()
