"""Engines: what each of them can do; a plan cannot ask more of one."""

from dataclasses import replace

import pytest

from pipeplan.documents.engines import (
    ENGINES,
    engine_named,
    require_executable,
    require_form,
    require_replicate,
    require_sharding,
)
from pipeplan.documents.forms import WHOLE, Form
from pipeplan.errors import InvalidInputError
from tests.pipeplan.documents.test_plan import gpipe_by_hand

HALVED = Form(tensor=2)


def test_our_runtime_has_one_device_for_each_replica() -> None:
    ours = engine_named("pipeplan")
    require_form(ours, WHOLE)
    for axis, form in (("tensor", HALVED), ("context", Form(context=2)), ("expert", Form(expert=2))):
        with pytest.raises(InvalidInputError, match="parallelism") as raised:
            require_form(ours, form)
        assert raised.value.field == axis


def test_a_form_above_an_engines_abilities_is_named() -> None:
    with pytest.raises(InvalidInputError) as raised:
        require_form(ENGINES["deepspeed"], Form(tensor=2, sequence_parallel=True))
    assert raised.value.field == "sequence_parallel"


def test_experts_have_a_tensor_degree_of_their_own_where_the_engine_has_it() -> None:
    own = Form(tensor=4, expert=8, expert_tensor=1)
    require_form(ENGINES["megatron"], own)
    with pytest.raises(InvalidInputError) as raised:
        require_form(ENGINES["deepspeed"], own)
    assert raised.value.field == "expert_tensor"
    assert (own.expert_devices, own.replicas_together, own.expert_replicas(6)) == (8, 2, 3)
    cut = Form(tensor=4, expert=8)
    assert (cut.expert_devices, cut.replicas_together, cut.expert_replicas(16)) == (32, 8, 2)


@pytest.mark.parametrize(("tensor", "own"), [(1, 1), (4, 4), (4, 2), (4, 8)])
def test_a_form_has_one_way_to_say_its_experts_tensor_degree(tensor: int, own: int) -> None:
    with pytest.raises(InvalidInputError, match=f"must be 1 below the tensor degree, {tensor}, or left out"):
        Form(tensor=tensor, expert_tensor=own)


def test_sharding_that_goes_with_one_stage_need_not_go_with_several() -> None:
    require_sharding(ENGINES["deepspeed"], "weights", pipelined=False)
    with pytest.raises(InvalidInputError, match="with several stages"):
        require_sharding(ENGINES["deepspeed"], "weights", pipelined=True)


@pytest.mark.parametrize(
    ("engine", "replicate", "expert", "rule"),
    [
        (
            "megatron",
            2,
            1,
            "must be 1 for the engine megatron: only fsdp has groups of replicas that each share the states",
        ),
        ("fsdp", 3, 1, "must divide the 8 replicas"),
        ("fsdp", 8, 1, "must divide the 8 replicas"),
        ("fsdp", 2, 8, r"must divide the 8 replicas \(data\) into groups of several, 8 of them with all experts"),
    ],
)
def test_groups_that_an_engine_or_its_replicas_do_not_have_are_named(
    engine: str, replicate: int, expert: int, rule: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"^replicate: {rule}"):
        require_replicate(ENGINES[engine], replicate, data=8, together=expert)
    require_replicate(ENGINES[engine], 1, data=8, together=expert)
    require_replicate(ENGINES["fsdp"], 2, data=8, together=2)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="megatron"):
        engine_named("horovod")


def test_a_plan_for_another_engine_is_not_executed() -> None:
    plan = gpipe_by_hand()
    require_executable(plan.engine)
    with pytest.raises(InvalidInputError, match="export it") as raised:
        require_executable(replace(plan, engine="megatron", form=HALVED).engine)
    assert raised.value.field == "plan.engine"


def test_a_plan_counts_the_devices_of_its_form() -> None:
    plan = gpipe_by_hand()
    halved = replace(plan, engine="megatron", form=HALVED)
    assert halved.workers == 2 * plan.workers
    assert halved.degrees | {"tensor": 1, "expert_tensor": 1} == plan.degrees
