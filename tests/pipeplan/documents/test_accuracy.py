"""What estimated seconds rest on, in one sentence of every answer."""

from dataclasses import replace

import pytest

from pipeplan.documents.accuracy import ITERATIONS, KERNELS, basis_of
from pipeplan.documents.files import dump, parse
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Profile
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.solve import solve
from tests.pipeplan.builders import Cell, cluster, profile
from tests.pipeplan.model_forms import transformer
from worker_agent.profiler.datasheets import DATASHEETS


def estimate(device: str, *, dtype: str = "bfloat16", precision: str | None = None, experts: int = 0) -> Profile:
    made = profile([Cell(weight_bytes=4, output_bytes=2, activation_bytes=1)] * 2)
    if experts:
        held = transformer(layers=1, hidden=64, heads=4, sequence=16)
        form = held.forms[0]
        kinds = [replace(form.kinds[0], expert_parameters=experts), *form.kinds[1:]]
        made = replace(held, forms=(replace(form, kinds=tuple(kinds)),))
    known = replace(made.device, name=device)
    return replace(made, device=known, dtype=dtype, precision=precision, estimated=True)


@pytest.mark.parametrize(
    ("profiles", "engine", "sentence"),
    [
        (
            [estimate("A100-SXM4-80GB")],
            "megatron",
            "estimated from kernels measured on this GPU (A100: 16-bit products 7%, attention 4% off on average); such "
            "predictions were 5% off on average over 9 measured iterations (dense models, A100, megatron)",
        ),
        (
            [estimate("GB200-186GB", precision="nvfp4")],
            "megatron",
            "estimated from kernels measured on this GPU (GB200: 4-bit products 12% off on average, attention not "
            "measured); such predictions were 5% off on average over 9 measured iterations (dense models, GB200, "
            "megatron)",
        ),
        (
            [estimate("H100-SXM5-80GB", dtype="float32")],
            "pipeplan",
            "estimated from kernels measured on this GPU (H100: attention 6% off on average, 32-bit products not "
            "measured); no measured iteration of dense models on this GPU with pipeplan was predicted yet",
        ),
        (
            [estimate("MI300X-192GB")],
            "megatron",
            "estimated from the vendor's peaks in the datasheet of MI300X-192GB, of which no kernels were measured; no "
            "measured iteration of dense models on this GPU with megatron was predicted yet",
        ),
        (
            [estimate("GB200-186GB")],
            "fsdp",
            "estimated from kernels measured on this GPU (GB200: 16-bit products 9% off on average, attention not "
            "measured); such predictions were 34% off on average over 1 measured iteration (dense models, GB200, "
            "fsdp)",
        ),
        (
            [estimate("H100-SXM5-80GB", experts=1)],
            "megatron",
            "estimated from kernels measured on this GPU (H100: 16-bit products 6%, attention 6% off on average); such "
            "predictions were 36% off on average over 3 measured iterations (mixtures, H100, megatron)",
        ),
        ([replace(estimate("A100-SXM4-80GB"), estimated=False)], "megatron", None),
    ],
)
def test_a_sentence_says_what_was_measured_and_how_far_it_was_off(
    profiles: list[Profile], engine: str, sentence: str | None
) -> None:
    assert basis_of(profiles, engine) == sentence


def test_a_plan_of_several_types_says_it_of_each() -> None:
    both = basis_of([estimate("A100-SXM4-80GB"), estimate("T4"), estimate("T4")], "pipeplan")
    assert both is not None and both.count("estimated from") == 2
    assert "(A100: " in both and "datasheet of T4" in both


def test_every_answer_of_an_estimate_says_it_and_is_read_back() -> None:
    made = estimate("A100-SXM4-80GB")
    problem = PlanningProblem(profile=made, cluster=replace(cluster((2, 1e9)), device=made.device), batch_size=4)
    plan = solve("auto", problem)
    assert isinstance(plan, Plan) and plan.basis == basis_of([made], "pipeplan")
    assert parse(Plan, dump(plan)) == plan


def test_types_with_measured_kernels_are_those_of_the_datasheets() -> None:
    assert KERNELS.keys() == {key for key, sheet in DATASHEETS.items() if sheet.measured}
    assert {each.generation for each in ITERATIONS} <= {each.generation for each in KERNELS.values()}
