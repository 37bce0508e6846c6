"""How fast the whole space is searched: `python -m benchmarks.whole`.

GPT-175B (Brown et al. 2020, table 2.1) with Adam in 16 bits for Megatron: the forms are estimated once, then `auto`
plans it on 64, 256, 1,024 and 16,384 A100s. Processor seconds of the search in a warm process, with the plays of the
answer and of what other values of its degrees give.
"""

import time
from dataclasses import replace

from pipeplan.documents.named_clusters import named_cluster
from pipeplan.documents.plan import Plan
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.protocol.estimates import FormsAsked
from pipeplan.protocol.jobs import ProfileTask
from worker_agent.profiler.analytic import estimate_profile
from worker_agent.profiler.datasheets import find_datasheet
from worker_agent.profiler.forms import with_forms
from worker_agent.profiler.job import ProfileJob

MODEL = "preset:transformer?hidden=12288&layers=96&heads=96&vocabulary=51200&sequence_length=2048&fused=true"
SIZES = (("dgx-a100:8", 256), ("dgx-a100:32", 512), ("dgx-a100:128", 1024), ("dgx-a100:2048", 4096))


def main() -> None:
    """Prints a row for every cluster."""
    sheet = find_datasheet("a100-80gb")
    task = ProfileTask(
        model=MODEL, microbatch_sizes=(1, 2, 4, 8), dtype="bfloat16", optimizer="adamw", sequence_length=2048
    )
    started_s = time.process_time()
    profile = estimate_profile(ProfileJob(task=task), sheet)
    profile = with_forms(profile, FormsAsked(most_tensor=8, attention="unfused"), task, sheet)
    print(f"{len(profile.forms)} forms estimated in {time.process_time() - started_s:.1f} s of processor time\n")
    print("| cluster | batch | configurations | search, processor s | samples/s | gap | of any stages | degrees |")
    print("|---|---|---|---|---|---|---|---|")
    for name, batch in SIZES:
        cluster = replace(named_cluster(name), device=profile.device)
        options = Options(optimizer="adamw", engine="megatron")
        problem = PlanningProblem(profile=profile, cluster=cluster, batch_size=batch, options=options)
        started_s = time.process_time()
        plan = solve("auto", problem)
        taken_s = time.process_time() - started_s
        if not isinstance(plan, Plan) or plan.certificate is None:
            print(f"| {name} | {batch} | | {taken_s:.1f} | none fits | | | |")
            continue
        degrees = ", ".join(f"{axis} {value}" for axis, value in plan.degrees.items() if value not in (1, True, False))
        rate = plan.throughput_samples_per_s or 0.0
        print(
            f"| {name} | {batch} | {plan.configurations_considered:,} | {taken_s:.1f} | {rate:.4g} "
            f"| {plan.certificate.gap:.2%} | {plan.certificate.gap_of_all:.2%} "
            f"| {degrees}, {plan.sharding} sharded, recompute {plan.recomputes} |"
        )


if __name__ == "__main__":
    main()
