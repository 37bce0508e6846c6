"""Profiles under autocast: what blocks keep, what is cast how often, and what belongs to an update."""

import pytest
import torch
from torch import nn

from pipeplan.documents.profile import AUTOCASTS
from pipeplan.errors import InvalidInputError
from pipeplan.protocol.jobs import ProfileTask
from tests.worker_agent.profiler.clocks import SquaresClock
from tests.worker_agent.runtime.test_casts import SHAPE, Casts
from worker_agent.engine.casts import keeping_casts
from worker_agent.engine.graphs import NODE_BYTES
from worker_agent.models.data import Microbatch
from worker_agent.profiler.autocast import Autocast
from worker_agent.profiler.block_memory import measure_memory
from worker_agent.profiler.job import ProfileJob
from worker_agent.profiler.times import measure_times
from worker_agent.profiler.updates import Updating, measure_updates
from worker_agent.runtime.stage import StageBlocks

CPU = torch.device("cpu")
SAMPLES, WIDE, NARROW = 4, SHAPE[1], SHAPE[0]


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.float().mean()


def microbatch(number: int) -> Microbatch:
    return torch.full((SAMPLES, WIDE), 1.0 + number), torch.zeros(1)


def chain() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDE, WIDE), nn.Linear(WIDE, NARROW)]


def under(blocks: list[nn.Module], dtype: torch.dtype = torch.bfloat16) -> Autocast:
    return Autocast(blocks, CPU, dtype)


def test_a_block_keeps_what_autocast_keeps_and_its_weights_copy_once() -> None:
    """Input 4 x 5 in float32, and again as the product takes it; the second block is given 16 bits.

    The weight of the first is of no use to a backward, which nobody asks for the data's gradient.
    """
    blocks = chain()
    with keeping_casts():
        first, second = measure_memory(blocks, mean, microbatch(0), CPU, under(blocks))
    assert first.activation_bytes == SAMPLES * WIDE * (4 + 2)
    assert first.output_bytes == second.input_bytes == second.activation_bytes == SAMPLES * WIDE * 2
    assert (first.cast_bytes, second.cast_bytes) == (0, 2 * WIDE * NARROW)
    plain, _ = measure_memory(blocks, mean, microbatch(0), CPU)
    assert (plain.activation_bytes, plain.cast_bytes) == (SAMPLES * WIDE * 4, 0)


def test_a_stage_of_the_runtime_holds_the_same() -> None:
    blocks = chain()
    inputs = torch.ones(SAMPLES, WIDE)
    stage = StageBlocks(
        blocks, first_block=0, criterion=None, recompute=False, seed=0, device=CPU, autocast=torch.bfloat16
    )
    with keeping_casts():
        first, second = measure_memory(blocks, lambda outputs, _: outputs.sum(), (inputs, inputs), CPU, under(blocks))
        stage.weights_changed()
        stage.forward(1, (inputs,))
    graphs_bytes = (
        first.graph_bytes + second.graph_bytes - 2 * NODE_BYTES
    )  # the sum, and a stage's view of the second's input
    assert (
        stage.memory.held_bytes() == first.activation_bytes + second.activation_bytes + second.cast_bytes + graphs_bytes
    )


def test_rounds_share_a_weights_copy_as_a_versions_microbatches_do() -> None:
    blocks = chain()
    casts = Casts()  # type: ignore[no-untyped-call]  # torch's own
    with casts, keeping_casts():
        measure_times(
            blocks,
            mean,
            microbatch,
            warm_up_rounds=1,
            rounds=3,
            make_clock=SquaresClock,
            before_round=lambda number: None,
            autocast=under(blocks),
        )
    assert casts.count == 1


def test_the_copies_of_a_new_version_belong_to_its_update() -> None:
    blocks, casts = chain(), Casts()  # type: ignore[no-untyped-call]  # torch's own
    autocast = under(blocks)
    with keeping_casts():
        measure_memory(blocks, mean, microbatch(0), CPU, autocast)
        with casts:
            how = Updating(
                optimizer="sgd",
                dtype="float32",
                rounds=3,
                make_clock=SquaresClock,
                before_step=lambda number: None,
                afterwards=autocast.cast_anew,
            )
            measure_updates(blocks, how)
    assert casts.count == 2 * (3 + 2)  # of all blocks together, and one by one; two each that do not count


@pytest.mark.parametrize("name", AUTOCASTS)
def test_float16_is_measured_with_the_loss_scale_that_its_runs_begin_with(name: str) -> None:
    blocks = chain()
    autocast = under(blocks, getattr(torch, name))
    measure_memory(blocks, mean, microbatch(0), CPU, autocast)
    bias = blocks[1].get_parameter("bias").grad
    assert bias is not None
    scale = 65536.0 if name == "float16" else 1.0
    assert bias.tolist() == pytest.approx([scale / NARROW] * NARROW, rel=1e-2)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_autocast_is_for_weights_in_float32(dtype: str) -> None:
    task = ProfileTask.model_validate(
        {"model": "preset:mlp", "microbatch_sizes": [1], "dtype": dtype, "autocast": "bfloat16"}
    )
    with pytest.raises(InvalidInputError, match=f"autocast: must be left out for weights in {dtype}"):
        ProfileJob(task=task)
