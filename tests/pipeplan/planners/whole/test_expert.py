"""A model of Llama's size on 64 H100s, beside what people start from by hand (NVIDIA NeMo's recipe: tensor 4, pipeline
4 with 5 virtual stages, context 2, the optimizer sharded).
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from pipeplan.documents.named_clusters import named_cluster
from pipeplan.documents.plan import Plan
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from tests.pipeplan.model_forms import transformer

CLUSTER = named_cluster("dgx-h100:8")
_MODEL = transformer(
    layers=80,
    hidden=8192,
    heads=64,
    sequence=8192,
    vocabulary=128256,
    contexts=(1, 2, 4),
    sizes=(1, 2),
    flops=989e12 * 0.6,
)
PROFILE = replace(_MODEL, device=CLUSTER.device)
RECIPE: dict[str, Any] = {
    "tensor": 4,
    "stages": 4,
    "chunks": 5,
    "context": 2,
    "sharding": "optimizer",
    "microbatch_size": 1,
}


@lru_cache
def _answer(**fixed: Any) -> Plan:
    options = Options(engine="megatron", optimizer="adamw", **fixed)
    problem = PlanningProblem(profile=PROFILE, cluster=CLUSTER, batch_size=128, options=options)
    plan = solve("auto", problem)
    assert isinstance(plan, Plan), plan
    return plan


def test_the_answer_is_at_least_as_fast_as_an_experts_recipe() -> None:
    answer, recipe = _answer(), _answer(**RECIPE)
    rate, by_hand = answer.throughput_samples_per_s or 0.0, recipe.throughput_samples_per_s or 0.0
    assert rate >= by_hand * (1 - 0.005)
    assert by_hand >= 0.6 * rate, "an expert's recipe is no bad plan"


def test_the_answer_keeps_what_exchanges_most_inside_a_server() -> None:
    answer = _answer()
    assert answer.workers == 64 and answer.form.devices <= 8 and answer.offload == "none"
    assert answer.form.tensor == 1 or answer.form.sequence_parallel
    assert answer.sharding == "optimizer" or answer.width == 1
    assert max(stage.memory_bytes for stage in answer.stages) <= PROFILE.device.memory_bytes


@pytest.mark.parametrize("degree", ["tensor", "pipeline", "microbatch_size", "sharding"])
def test_other_values_of_a_degree_lose_and_the_answer_says_how_much(degree: str) -> None:
    answer = _answer()
    others = [each for each in answer.choices if each.degree == degree]
    assert others
    rates = [each.throughput_samples_per_s for each in others if each.throughput_samples_per_s is not None]
    assert all(rate <= (answer.throughput_samples_per_s or 0.0) * (1 + 0.005) for rate in rates)
    assert all("less" in each.reason or "more" in each.reason or "fits" in each.reason for each in others), others
