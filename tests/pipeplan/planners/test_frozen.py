"""Frozen weights and buffers: every planner counts them once, and plans as if there were only the trained weights."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.costs.ledger import ledger
from pipeplan.costs.memory import rank_bytes
from pipeplan.costs.tied import untrained_bytes
from pipeplan.documents.forms import WHOLE, BlockKind, FormMeasurement, ModelForm
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.profile import Block, Profile
from pipeplan.documents.tied import TiedWeights
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.simulation.predict import predict
from tests.pipeplan.builders import Cell, cluster, profile
from tests.properties import examples

CELLS = [Cell(weight_bytes=20, output_bytes=1, activation_bytes=2, shared_bytes=1) for _ in range(8)]
TRAINED = profile(CELLS)
"""The trained weights alone."""

ASKED = {
    "pipedream": Options(optimizer="adam"),
    "pipedream, paper": Options(memory="paper"),
    "pipedream-2bw": Options(optimizer="adam"),
    "pipedream-2bw, paper": Options(memory="paper"),
    "gpipe": Options(optimizer="adam"),
    "exact": Options(optimizer="adam", schedule="1f1b"),
    "exact, interleaved": Options(optimizer="adam", schedule="1f1b-interleaved", stages=2, chunks=2, microbatch_size=1),
    "auto": Options(optimizer="adam"),
    "auto, interleaved": Options(optimizer="adam", schedule="1f1b-interleaved", stages=2),
}


def frozen(model: Profile, more: list[tuple[int, int]]) -> Profile:
    """The model with so many bytes of frozen weights and of buffers in every block."""
    pairs = zip(model.blocks, more, strict=True)
    blocks = tuple(
        replace(block, weight_bytes=block.weight_bytes + weights, frozen_bytes=weights, buffer_bytes=buffers)
        for block, (weights, buffers) in pairs
    )
    return replace(model, blocks=blocks)


def answer(asked: str, model: Profile, memory_bytes: int = 10**9, *, stages: int | None = None) -> Plan | Infeasible:
    machines = cluster((4, 100.0), memory_bytes=memory_bytes)
    options = replace(ASKED[asked], stages=stages or ASKED[asked].stages)
    problem = PlanningProblem(profile=model, cluster=machines, batch_size=16, options=options)
    return solve(asked.split(",")[0], problem)


@pytest.mark.each_case
@pytest.mark.parametrize("asked", ASKED)
def test_a_plan_is_that_of_the_trained_weights_with_all_others_once(asked: str) -> None:
    model = frozen(TRAINED, [(1000 * (number + 1), number) for number in range(8)])
    plan, plain = answer(asked, model), answer(asked, TRAINED)
    assert isinstance(plan, Plan) and isinstance(plain, Plan)
    assert plan.throughput_samples_per_s == plain.throughput_samples_per_s
    assert plan.closed_form == plain.closed_form
    for stage, other in zip(plan.stages, plain.stages, strict=True):
        once = untrained_bytes(model, stage.start, stage.stop)
        assert stage.memory is not None and other.memory is not None and once
        assert stage.memory == replace(other.memory, weights=other.memory.weights + once)
        assert replace(stage, memory=None, memory_bytes=0) == replace(other, memory=None, memory_bytes=0)
    for costs, others, stage in zip(plan.costs, plain.costs, plan.stages, strict=True):
        assert costs == replace(
            others, fixed_bytes=others.fixed_bytes + untrained_bytes(model, stage.start, stage.stop)
        )


@pytest.mark.each_case
@pytest.mark.parametrize("asked", ASKED)
def test_the_least_memory_is_found_to_the_byte(asked: str) -> None:
    """The play of a plan that fits stays within the device. Where everything is trained, none fits there."""
    model = frozen(TRAINED, [(300, 10)] * 8)
    fits, misses = 4096, 0
    while fits - misses > 1:
        middle = (fits + misses) // 2
        fits, misses = (middle, misses) if isinstance(answer(asked, model, middle), Plan) else (fits, middle)
    plan = answer(asked, model, fits)
    assert isinstance(plan, Plan)
    assert max(rank_bytes(plan)) <= fits
    whole = replace(model, blocks=tuple(replace(block, frozen_bytes=0) for block in model.blocks))
    if "paper" not in asked:  # which counts versions alone
        assert all(lane.peak_memory_bytes <= fits for lane in predict(plan, batches=3).lanes)
        assert isinstance(answer(asked, whole, fits), Infeasible)


@settings(examples(40), deadline=None)
@given(
    more=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=8, max_size=8),
    memory_bytes=st.integers(60, 400),
    asked=st.sampled_from([asked for asked in ASKED if "interleaved" not in asked]),
)
def test_plans_on_small_devices_fit(more: list[tuple[int, int]], memory_bytes: int, asked: str) -> None:
    plan = answer(asked, frozen(TRAINED, more), memory_bytes)
    if isinstance(plan, Plan):
        assert all(stage.memory_bytes <= memory_bytes for stage in plan.stages)
        if "paper" not in asked:
            assert all(lane.peak_memory_bytes <= memory_bytes for lane in predict(plan, batches=3).lanes)


def test_a_stage_of_frozen_blocks_has_no_exchange_and_no_update() -> None:
    blocks = tuple(
        replace(block, frozen_bytes=20 if number < 4 else 0, update_s=0.5)
        for number, block in enumerate(TRAINED.blocks)
    )
    model, slow = replace(TRAINED, blocks=blocks), cluster((4, 1.0), latency_s=0.25)
    options = Options(stages=2, schedule="pipedream-2bw", microbatch_size=1)
    plan = solve("pipedream-2bw", PlanningProblem(profile=model, cluster=slow, batch_size=16, options=options))
    assert isinstance(plan, Plan) and plan.width == 2 and plan.stages[0].stop == 4
    first, second = plan.costs
    assert (first.reduce_s, first.reduce_tail_s, first.update_s, first.version_bytes) == (0.0, 0.0, 0.0, 0)
    assert first.gradient_bytes == first.own_gradient_bytes == 0
    assert second.reduce_s > 0 and second.update_s > 0 and second.version_bytes == 80


@pytest.mark.each_case
@pytest.mark.parametrize("asked", ["pipedream-2bw", "pipedream", "gpipe", "exact", "auto"])
def test_a_stage_has_its_copy_of_frozen_weights_of_another_stage(asked: str) -> None:
    """A frozen embedding, which the head uses too."""
    model = frozen(TRAINED, [(500, 0), *[(0, 0)] * 7])
    tied = replace(model, tied_frozen=(TiedWeights(block=0, also=(7,), weight_bytes=500),))
    stages = None if asked == "pipedream" else 4
    plan, apart = (answer(asked, each, stages=stages) for each in (tied, model))
    assert isinstance(plan, Plan) and isinstance(apart, Plan) and plan.depth > 1
    assert not plan.tied  # no gradients are summed
    assert plan.throughput_samples_per_s == apart.throughput_samples_per_s
    more = [a.memory_bytes - b.memory_bytes for a, b in zip(plan.stages, apart.stages, strict=True)]
    assert more == [*[0] * (plan.depth - 1), 500]
    assert plan.costs[-1].fixed_bytes == apart.costs[-1].fixed_bytes + 500


def test_of_frozen_parameters_other_engines_keep_the_weights() -> None:
    for engine, sharding, kept in (
        ("megatron", "optimizer", 2.0),
        ("deepspeed", "gradients", 2.0),
        ("deepspeed", "weights", 0.5),
        ("fsdp", "weights", 1.0),
    ):
        found = ledger(engine, sharding, dtype="bfloat16", optimizer="adam", replicas=4, trained=False)
        assert (found.kept, found.exchanged, found.updated) == (kept, 0, 0.0)
    host = ledger(
        "fsdp", "weights", dtype="bfloat16", optimizer="adam", replicas=4, optimizer_on_host=True, trained=False
    )
    assert (host.kept, host.host, host.weights_up, host.update_host) == (0.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize("engine", ["megatron", "deepspeed", "fsdp"])
def test_plans_of_other_engines_count_frozen_parameters_by_their_weights(engine: str) -> None:
    measured = FormMeasurement(
        microbatch_size=1, forward_s=1.0, backward_s=2.0, input_bytes=1, output_bytes=1, activation_bytes=2
    )
    layer = BlockKind(name="layer", parameters=1000, measurements=(measured,))

    def planned(kind: BlockKind) -> Plan:
        form = ModelForm(form=WHOLE, kinds=(kind,), blocks=(0,) * 8)
        block = Block(name="layer", weight_bytes=2000, measurements=profile(CELLS[:1]).blocks[0].measurements)
        blocks = tuple(replace(block, name=f"layer.{n}", frozen_bytes=2 * kind.frozen_parameters) for n in range(8))
        model = replace(profile(CELLS), dtype="bfloat16", blocks=blocks, forms=(form,))
        options = Options(
            engine=engine, optimizer="adam", stages=1, data=4, sharding="none" if engine == "megatron" else None
        )
        machines = cluster((4, 1e9))
        plan = solve("auto", PlanningProblem(profile=model, cluster=machines, batch_size=16, options=options))
        assert isinstance(plan, Plan)
        return plan

    whole, mostly = planned(layer), planned(replace(layer, frozen_parameters=900))
    assert whole.stages[0].memory is not None and mostly.stages[0].memory is not None
    assert mostly.stages[0].memory.optimizer_states == pytest.approx(0.1 * whole.stages[0].memory.optimizer_states)
    assert mostly.stages[0].memory.gradients == pytest.approx(0.1 * whole.stages[0].memory.gradients)
    assert mostly.stages[0].memory.weights == pytest.approx(whole.stages[0].memory.weights)
    assert mostly.costs[0].update_s == pytest.approx(0.1 * whole.costs[0].update_s)


def test_defaults_are_not_part_of_an_id_and_parts_are_no_larger_than_the_whole() -> None:
    assert content_id(frozen(TRAINED, [(0, 0)] * 8)) == content_id(TRAINED)
    assert content_id(frozen(TRAINED, [(1, 0)] * 8)) != content_id(TRAINED)
    with pytest.raises(InvalidInputError, match="frozen_bytes: must be at most weight_bytes, 20"):
        replace(TRAINED.blocks[0], frozen_bytes=21)
    with pytest.raises(InvalidInputError, match="must be at most the frozen weights of block 0"):
        replace(TRAINED, tied_frozen=(TiedWeights(block=0, also=(7,), weight_bytes=1),))
