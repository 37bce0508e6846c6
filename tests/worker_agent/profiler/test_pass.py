"""A pass block by block computes what the whole chain does."""

import pytest
import torch
from torch import Tensor

from worker_agent.models.chain import Chain, build_model
from worker_agent.models.losses import default_loss
from worker_agent.models.values import first_trained
from worker_agent.profiler.times import nothing_around, pass_backward, pass_forward


def whole_gradients(chain: Chain, inputs: Tensor, targets: Tensor) -> list[Tensor | None]:
    chain.root.zero_grad()
    torch.autograd.backward(default_loss(chain.root(inputs), targets))
    return [p.grad for p in chain.root.parameters()]


def test_the_gradients_are_those_of_the_whole_chain() -> None:
    chain = build_model("worker_agent.models.presets:mlp?width=4&depth=3", seed=0, dtype=torch.float64)
    inputs, targets = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    expected = whole_gradients(chain, inputs, targets)
    chain.root.zero_grad()
    pass_backward(pass_forward(chain.blocks, default_loss, inputs, targets, nothing_around), nothing_around)
    for found, wanted in zip([p.grad for p in chain.root.parameters()], expected, strict=True):
        assert found is not None and wanted is not None and torch.equal(found, wanted)


def test_several_tensors_and_whole_numbers_pass_between_blocks() -> None:
    chain = build_model("tests.worker_agent.models.factories:two_streams", seed=0)
    inputs = torch.tensor([[1.0, 5.0, 2.0, 0.0], [0.0, 1.0, 0.0, 3.0]])
    crossings = pass_forward(chain.blocks, default_loss, inputs, torch.zeros(2, 1), nothing_around)
    assert [c.input_bytes for c in crossings] == [2 * 4 * 4, 2 * 4 * 4 + 2 * 8]
    pass_backward(crossings, nothing_around)
    weight = chain.root.get_parameter("0.weight")
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.tensor([0.0, 25.0, 0.0, 9.0]))  # d/dw of the mean of (5 w1)^2 and (3 w3)^2


@pytest.mark.parametrize(("trained", "graded"), [(1, []), (6, [3, 4, 5, 6, 7])])
def test_no_gradient_goes_back_beyond_the_first_trained_block(trained: int, graded: list[int]) -> None:
    """As in a run: a frozen block that no trained one precedes makes no graph and has no backward."""
    chain = build_model(f"tests.worker_agent.runtime.awkward:extractor?width=4&trained={trained}", seed=0)
    crossings = pass_forward(chain.blocks, default_loss, torch.randn(5, 4), torch.randn(5, 4), nothing_around)
    assert first_trained(chain.blocks) == 8 - trained
    assert [n for n, c in enumerate(crossings) if any(t.requires_grad for t in c.inputs)] == graded
    assert [n for n, c in enumerate(crossings) if any(t.requires_grad for t in c.roots)] == [*range(8 - trained, 8)]
