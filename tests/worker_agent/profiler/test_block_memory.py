"""Kept bytes, against what the formulas of the layers say that a backward needs."""

import pytest
import torch

from pipeplan.documents.profile import DTYPE_BYTES
from worker_agent.models.chain import build_model
from worker_agent.models.losses import default_loss, mean_of_squares
from worker_agent.profiler.block_memory import BlockMemory, measure_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_linear_layer_keeps_its_input_and_a_relu_its_output(dtype: str) -> None:
    #   inputs (4, 3) -> [linear] (4, 5) -> [relu] (4, 5) -> [linear] (4, 2), squared error with targets (4, 2)
    chain = build_model("tests.worker_agent.models.factories:linear_relu", seed=0, dtype=getattr(torch, dtype))
    inputs, targets = (torch.zeros(4, n, dtype=getattr(torch, dtype)) for n in (3, 2))
    number = DTYPE_BYTES[dtype]
    assert measure_memory(chain.blocks, default_loss, (inputs, targets), CPU) == (
        BlockMemory(input_bytes=12 * number, output_bytes=20 * number, activation_bytes=12 * number, workspace_bytes=0),
        BlockMemory(
            input_bytes=20 * number,
            output_bytes=20 * number,
            activation_bytes=(20 + 20) * number,  # its output; and as a stage of its own its input, which nobody saves
            shared_bytes=20 * number,
            kept_output_bytes=20 * number,
            workspace_bytes=0,
        ),
        BlockMemory(
            input_bytes=20 * number,
            output_bytes=8 * number,
            activation_bytes=(20 + 8 + 8) * number,  # its input; outputs and targets for the loss
            shared_bytes=20 * number,  # the ReLU's output
            workspace_bytes=0,
        ),
    )


def test_a_view_keeps_its_whole_storage_and_a_storage_counts_once() -> None:
    chain = build_model("worker_agent.models.presets:mlp?width=2&depth=1", seed=0)
    storage = torch.zeros(8, 2)
    (memory,) = measure_memory(chain.blocks, mean_of_squares, (storage[:4], torch.zeros(4)), CPU)
    assert memory.input_bytes == 4 * 2 * 4
    assert memory.activation_bytes == 8 * 2 * 4 + 4 * 2 * 4  # the storage behind the input, and the squared outputs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_boundaries_have_the_models_type(dtype: str) -> None:
    chain = build_model("worker_agent.models.presets:mlp?width=4&depth=2", seed=0, dtype=getattr(torch, dtype))
    inputs = torch.zeros(3, 4, dtype=getattr(torch, dtype))
    memories = measure_memory(chain.blocks, mean_of_squares, (inputs, torch.zeros(3)), CPU)
    assert [m.output_bytes for m in memories] == [3 * 4 * 2] * 2


def test_measuring_leaves_only_gradients() -> None:
    chain = build_model("worker_agent.models.presets:mlp?width=4&depth=2", seed=0)
    measure_memory(chain.blocks, mean_of_squares, (torch.ones(3, 4), torch.zeros(3)), CPU)
    assert all(p.grad is not None for p in chain.root.parameters())
