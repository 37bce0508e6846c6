"""What a stage keeps and hands on of one microbatch."""

import pytest
import torch
from torch import nn

from worker_agent.runtime.stage import StageBlocks


@pytest.mark.parametrize("split_backward", [False, True])
def test_sent_gradients_have_memory_of_their_own(split_backward: bool) -> None:
    """Through views alone it once was: the next gradient was received into what was still being sent."""
    stage = StageBlocks(
        [nn.Flatten()],
        first_block=0,
        criterion=None,
        recompute=False,
        seed=0,
        device=torch.device("cpu"),
        split_backward=split_backward,
    )
    stage.forward(1, (torch.zeros(2, 3, 4, requires_grad=True),))
    received = torch.arange(24.0).view(2, 12)
    (sent,) = stage.backward(1, (received,))
    assert torch.equal(sent, torch.arange(24.0).view(2, 3, 4))
    assert sent.untyped_storage().data_ptr() != received.untyped_storage().data_ptr()
