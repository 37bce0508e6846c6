"""How fast the whole space is searched: `python -m benchmarks.whole`.

GPT-175B (Brown et al. 2020, table 2.1) with Adam in 16 bits for Megatron: the forms are estimated once, then `auto`
plans it on 64, 256, 1,024 and 16,384 A100s, and on 256 with a slow network. Processor seconds of the search in a warm
process, with the plays of the answer and of what other values of its degrees give.

Where bounds and estimates are far off, on slow networks, the search may end before the best plan: GPT-7B on 64 A100s,
beside the best of what is found when depth and microbatch size are forced.
"""

import time
from dataclasses import replace
from itertools import product

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.named_clusters import named_cluster
from pipeplan.documents.plan import Answer, Plan
from pipeplan.documents.profile import Profile
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.protocol.estimates import FormsAsked
from pipeplan.protocol.jobs import ProfileTask
from worker_agent.profiler.datasheets import find_datasheet
from worker_agent.profiler.forms import profile_with_forms

WORDS = "vocabulary=51200&sequence_length=2048&fused=true"
MODEL = f"preset:transformer?hidden=12288&layers=96&heads=96&{WORDS}"
SMALLER = f"preset:transformer?hidden=4096&layers=32&heads=32&{WORDS}"
MICROBATCH_SIZES = (1, 2, 4, 8)
SLOW_GBITS, SLOW_BATCH = (10, 25, 100), 256
FORCED_STAGES = (4, 8, 16, 32)
SIZES = (
    ("dgx-a100:8", None, 256),
    ("dgx-a100:32", None, 512),
    ("dgx-a100:32", 10, 512),
    ("dgx-a100:128", None, 1024),
    ("dgx-a100:2048", None, 4096),
)
"""Clusters, their Gb/s between servers where these are not the cluster's own, and batches."""


def main() -> None:
    """Prints a row for every cluster, and for every slow network."""
    started_s = time.process_time()
    profile = estimated(MODEL)
    print(f"{len(profile.forms)} forms estimated in {time.process_time() - started_s:.1f} s of processor time\n")
    print("| cluster | Gb/s | batch | configurations | search, s | samples/s | gap | of any stages | degrees |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, gbits, batch in SIZES:
        cluster = on_network(profile, name, gbits)
        own = gbits or "its own"
        started_s = time.process_time()
        plan = _planned(profile, cluster, batch)
        taken_s = time.process_time() - started_s
        if not isinstance(plan, Plan) or plan.certificate is None:
            print(f"| {name} | {own} | {batch} | | {taken_s:.1f} | none fits | | | |")
            continue
        degrees = ", ".join(f"{axis} {value}" for axis, value in plan.degrees.items() if value not in (1, True, False))
        rate = plan.throughput_samples_per_s or 0.0
        print(
            f"| {name} | {own} | {batch} | {plan.configurations_considered:,} | {taken_s:.1f} | {rate:.4g} "
            f"| {plan.certificate.gap:.2%} | {plan.certificate.gap_of_all:.2%} "
            f"| {degrees}, {plan.sharding} sharded, recompute {plan.recomputes} |"
        )

    _print_slow_networks()


def _print_slow_networks() -> None:
    profile = estimated(SMALLER)
    print("\n| Gb/s between servers | search, processor s | samples/s | gap | best forced | forced / found |")
    print("|---|---|---|---|---|---|")
    for gbits in SLOW_GBITS:
        cluster = on_network(profile, "dgx-a100:8", gbits)
        started_s = time.process_time()
        answer = _planned(profile, cluster, SLOW_BATCH)
        taken_s = time.process_time() - started_s
        found = _rate(answer)
        gap = answer.certificate.gap if isinstance(answer, Plan) and answer.certificate else 0.0
        ways = product(FORCED_STAGES, MICROBATCH_SIZES)
        forced = max(_rate(_planned(profile, cluster, SLOW_BATCH, stages=s, microbatch_size=m)) for s, m in ways)
        print(
            f"| {gbits} | {taken_s:.1f} | {found:.4g} | {gap:.2%} | {forced:.4g} | {forced / found:.3f} |", flush=True
        )


def on_network(profile: Profile, name: str, gbits: float | None) -> Cluster:
    """A named cluster, with so many Gb/s between servers."""
    cluster = replace(named_cluster(name), device=profile.device)
    if gbits is None:
        return cluster
    outermost = replace(cluster.levels[-1], bandwidth_bytes_per_s=gbits * 1e9 / 8, device_bandwidth_bytes_per_s=None)
    return replace(cluster, levels=(*cluster.levels[:-1], outermost))


def estimated(model: str) -> Profile:
    """A model's profile, with the forms in which devices share its blocks."""
    task = ProfileTask(
        model=model, microbatch_sizes=MICROBATCH_SIZES, dtype="bfloat16", optimizer="adamw", sequence_length=2048
    )
    sheet = find_datasheet("a100-80gb")
    return profile_with_forms(FormsAsked(most_tensor=8, attention="unfused"), task, sheet)


def _planned(
    profile: Profile, cluster: Cluster, batch: int, *, stages: int | None = None, microbatch_size: int | None = None
) -> Answer:
    options = Options(optimizer="adamw", engine="megatron", stages=stages, microbatch_size=microbatch_size)
    return solve("auto", PlanningProblem(profile=profile, cluster=cluster, batch_size=batch, options=options))


def _rate(answer: Answer) -> float:
    return answer.throughput_samples_per_s or 0.0 if isinstance(answer, Plan) else 0.0


if __name__ == "__main__":
    main()
