"""Chains: the blocks that a factory returns, their names in the whole model, the same in every process."""

import pytest
import torch

from pipeplan.errors import InvalidInputError
from worker_agent.models.chain import build_model

FACTORIES = "tests.worker_agent.models.factories"


def test_the_same_seed_gives_the_same_weights_whatever_the_random_state_was() -> None:
    torch.manual_seed(1)
    first = build_model("worker_agent.models.presets:mlp", seed=7).root.state_dict()
    torch.manual_seed(2)
    second = build_model("worker_agent.models.presets:mlp", seed=7).root.state_dict()
    other = build_model("worker_agent.models.presets:mlp", seed=8).root.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["0.0.weight"], other["0.0.weight"])


def test_building_leaves_the_random_state_as_it_was() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    build_model("worker_agent.models.presets:mlp", seed=7)
    assert torch.equal(torch.rand(4), expected)


def test_parameters_and_persistent_buffers_are_named_as_a_sequential_names_them() -> None:
    chain = build_model(f"{FACTORIES}:shared", seed=0)
    assert sorted(chain.names().values()) == [
        "0.weight",
        "1.bias",
        "1.num_batches_tracked",
        "1.running_mean",
        "1.running_var",
        "1.weight",
    ]
    assert chain.names()[chain.blocks[2].get_parameter("weight")] == "0.weight"


def test_the_blocks_weights_add_up_to_the_models_and_shared_ones_count_once() -> None:
    chain = build_model(f"{FACTORIES}:shared", seed=0)
    assert chain.weight_bytes() == (4 * 4 * 4, (4 + 4) * 4, 0)
    assert sum(chain.weight_bytes()) == sum(p.nbytes for p in chain.root.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_chain_has_the_type_that_is_asked_for(dtype: torch.dtype) -> None:
    chain = build_model("worker_agent.models.presets:mlp?depth=2", seed=0, dtype=dtype)
    assert {p.dtype for p in chain.root.parameters()} == {dtype}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("nothing", "must have at least one block"),
        ("numbers", "must be a factory that returns a module or a list of modules"),
        ("absent", "must name something that module tests.worker_agent.models.factories holds"),
    ],
)
def test_a_factory_that_returns_no_blocks_is_refused(name: str, rule: str) -> None:
    with pytest.raises(InvalidInputError, match=rule) as caught:
        build_model(f"{FACTORIES}:{name}", seed=0)
    assert caught.value.field == "model"


def test_waiting_blocks_pass_values_and_gradients_through() -> None:
    chain = build_model("worker_agent.models.presets:sleep?depth=3&forward_s=0&backward_s=0&width=2", seed=0)
    x = value = torch.tensor([[2.0, 3.0]], requires_grad=True)
    for block in chain.blocks:
        value = block(value)
    torch.autograd.backward(value.sum())
    assert torch.equal(value, x) and x.grad is not None
    assert torch.equal(x.grad, torch.ones(1, 2))
    assert all(torch.equal(p.grad, x.detach()[0]) for p in chain.root.parameters() if p.grad is not None)
