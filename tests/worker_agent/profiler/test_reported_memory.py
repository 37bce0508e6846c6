"""What public reports say ran out of memory does not fit, and what they say ran does.

DeepSpeed's tutorial "Zero Redundancy Optimizer" (docs/_tutorials/zero.md, deepspeed.ai/tutorials/zero): GPT-2 of 1.5
billion parameters (48 layers of 1,600, 16 heads, sequences of 1,024, a sample a device) runs out of memory on 8 V100s
of 32 GB without ZeRO, and runs with stage 1. One of 10 billion (50 layers of 4,096, 32 heads, activations checkpointed)
runs with stage 2 on 32 of them.

DeepSpeed's "Training overview and features" (docs/_pages/training.md): models of more than 1.4 billion parameters run
out of memory with PyTorch's data parallelism on such devices.
"""

from functools import lru_cache
from typing import Any

import pytest

from pipeplan.documents.named_clusters import named_cluster
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.profile import Profile
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.protocol.estimates import FormsAsked
from pipeplan.protocol.jobs import ProfileTask
from worker_agent.profiler.datasheets import DATASHEETS
from worker_agent.profiler.forms import profile_with_forms

GPT_1_5B = {"hidden": 1600, "layers": 48, "heads": 16}
GPT_10B = {"hidden": 4096, "layers": 50, "heads": 32}


@lru_cache
def _profile(hidden: int, layers: int, heads: int) -> Profile:
    """Of GPT-2 in float16, with attention in four kernels, as it was in 2020."""
    spec = (
        f"preset:transformer?hidden={hidden}&layers={layers}&heads={heads}&vocabulary=50257&sequence_length=1024"
        "&tied=true&dropout=0.1"
    )
    task = ProfileTask(model=spec, microbatch_sizes=(1,), dtype="float16", optimizer="adam", sequence_length=1024)
    sheet = DATASHEETS["v100-32gb"]
    return profile_with_forms(FormsAsked(attention="unfused"), task, sheet)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("sizes", "devices", "fixed", "fits"),
    [
        (GPT_1_5B, 8, {"sharding": "none", "recompute": False}, False),
        (GPT_1_5B, 8, {"sharding": "optimizer", "recompute": False}, True),
        (GPT_10B, 32, {"sharding": "none", "recompute": True}, False),
        (GPT_10B, 32, {"sharding": "gradients", "recompute": True}, True),
    ],
)
def test_deepspeed_runs_what_its_tutorial_ran(
    sizes: dict[str, int], devices: int, fixed: dict[str, Any], fits: bool
) -> None:
    options = Options(engine="deepspeed", optimizer="adam", stages=1, microbatch_size=1, offload="none", **fixed)
    cluster = named_cluster(f"dgx-v100:{devices // 8}")
    answer = solve(
        "auto",
        PlanningProblem(profile=_profile(**sizes), cluster=cluster, batch_size=devices, options=options),
    )
    assert isinstance(answer, Plan if fits else Infeasible), answer
    if isinstance(answer, Infeasible):
        assert (answer.reasons[0].missing_bytes or 0) > 0, "memory is what it lacks"
