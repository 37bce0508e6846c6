"""NCCL: one rank on it, and as many as there are GPUs."""

from functools import partial

import torch
import torch.distributed as dist

from benchmarks.gpu_check.exactness import Exact
from benchmarks.gpu_check.findings import Case, Findings
from benchmarks.gpu_check.here import is_short
from benchmarks.gpu_check.ranks import Ranks
from benchmarks.gpu_check.schedules import CUTS, on_ranks
from pipeplan.schedules.registry import BUILT_IN
from tests.worker_agent.runtime.plans import make_plan


def check(findings: Findings) -> None:
    """Both, where there are GPUs, and NCCL in this torch."""
    if not torch.cuda.is_available():
        findings.leave_out("NCCL", "there is no GPU")
        return
    if not dist.is_nccl_available():
        findings.leave_out("NCCL", "this torch has none")
        return
    gpus = torch.cuda.device_count()
    if gpus < 2:
        findings.leave_out("NCCL among ranks", "there is one GPU")
    with Ranks() as ranks:
        findings.run(_cases(gpus, ("1f1b", "data-parallel") if is_short(findings) else BUILT_IN, ranks))


def _cases(gpus: int, schedules: tuple[str, ...], ranks: Ranks) -> dict[str, Case]:
    exact = partial(Exact, transport="nccl", ranks=ranks)
    cases: dict[str, Case] = {"one rank": exact(plan=make_plan("data-parallel", CUTS[1]), resume=True)}
    for count in (2, 4):
        if count <= gpus:
            cases |= {f"{name} on {count} ranks": on_ranks(name, count, "nccl", ranks) for name in schedules}
    if gpus not in (1, 2, 4):
        all_of_them = make_plan("data-parallel", CUTS[1], replicas=gpus)
        cases[f"data-parallel on all {gpus} GPUs"] = exact(plan=all_of_them)
    return cases
