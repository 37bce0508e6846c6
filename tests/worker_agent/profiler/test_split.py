"""p1 and p2 of blocks, as the profiler sees them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from worker_agent.engine.backward import Split
from worker_agent.engine.graphs import CALL_BYTES
from worker_agent.models.losses import build_loss
from worker_agent.profiler.block_memory import KeptStorages
from worker_agent.profiler.times import measure_split

TENSOR_BYTES = 3 * 4 * 8


class CountingClock:
    """A mark is one second after the one before."""

    def __init__(self) -> None:
        self.marks = 0

    def mark(self) -> None:
        self.marks += 1

    def seconds(self) -> Sequence[float]:
        return [float(number) for number in range(self.marks)]


def microbatch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return (
        torch.randn(3, 4, dtype=torch.float64, generator=generator),
        torch.randn(3, 4, dtype=torch.float64, generator=generator),
    )


def chain() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4).double(), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).double()]


def test_a_round_times_p1_and_p2_of_every_block_and_counts_what_p2_needs() -> None:
    times = measure_split(chain(), build_loss(None), microbatch, rounds=2, make_clock=CountingClock)
    assert [(len(block.backward_input_s), len(block.backward_weight_s)) for block in times] == [(2, 2)] * 3
    assert {s for block in times for s in (*block.backward_input_s, *block.backward_weight_s)} == {1.0}
    assert [block.weight_gradient_bytes for block in times] == [
        2 * TENSOR_BYTES + CALL_BYTES,
        0,
        2 * TENSOR_BYTES + CALL_BYTES,
    ]
    assert [block.defers for block in times] == [True, False, True]


def test_what_is_measured_is_the_whole_backward() -> None:
    blocks, whole = chain(), nn.Sequential(*chain())
    measure_split(blocks, build_loss(None), microbatch, rounds=2, make_clock=CountingClock)
    for number in range(3):
        inputs, targets = microbatch(number)
        torch.autograd.backward(build_loss(None)(whole(inputs), targets))
    for measured, expected in zip(nn.Sequential(*blocks).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(measured.grad, expected.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "dropout": 0.2}, {"bidirectional": True}])
def test_a_recurrent_network_written_out_keeps_no_more_for_its_backward_than_torchs_own(
    kind: type[nn.LSTM | nn.GRU | nn.RNN], options: dict[str, Any]
) -> None:
    """A profile has the fused forward's activations, and a split plan must not need more: GRUs once kept 1/8 more."""
    network, inputs = kind(8, 8, **options), torch.randn(6, 4, 8, requires_grad=True)

    def kept_bytes() -> int:
        kept = KeptStorages(network)
        with saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            output = network(inputs)
        del output
        return kept.bytes

    with Split(network.parameters()).active(deferring=False):
        written_out_bytes = kept_bytes()
    assert 0 < written_out_bytes <= kept_bytes()
