"""The optimizers of a plan are torch's, to the last bit, and cost no process what torch's classes import."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from pipeplan.documents.plan import OPTIMIZERS
from pipeplan.errors import InvalidInputError
from tests.worker_agent.runtime.reference import CLASSES
from worker_agent.engine.optimizers import SIXTEEN_BITS, Optimizer

SHAPES = ((5, 3), (7,), (2, 3, 4, 4), (1,))
LATE = 1
"""The place of the weight that gets no gradient in the first step."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_of_torchs_class(name: str, dtype: torch.dtype) -> None:
    """Weights that get their first gradient late, rates that change, memory that is another one for each step."""
    torch.manual_seed(0)
    places = {place: torch.randn(shape, dtype=dtype) for place, shape in enumerate(SHAPES)}
    parameters = [nn.Parameter(weight.clone()) for weight in places.values()]
    fused = dtype not in SIXTEEN_BITS or name.startswith("adam")
    reference, optimizer = CLASSES[name](parameters, lr=0.1, fused=fused), Optimizer(name, 0.1)
    for step in range(4):
        gradients = {place: torch.randn_like(weight) for place, weight in places.items() if step or place != LATE}
        for place, parameter in enumerate(parameters):
            parameter.grad = gradients[place].clone() if place in gradients else None
        reference.param_groups[0]["lr"] = optimizer.learning_rate = 0.1 / (step + 1)
        if name == "momentum" and step == 1:  # torch's step takes momenta of all its weights, or of none
            reference.state[parameters[LATE]]["momentum_buffer"] = torch.zeros_like(parameters[LATE])
        reference.step()
        places = {place: weight.clone() for place, weight in places.items()}
        optimizer.step({place: places[place] for place in gradients}, gradients)
        for place, parameter in enumerate(parameters):
            assert torch.equal(places[place], parameter), (step, place)
    for place, parameter in enumerate(parameters):
        expected = {key: value for key, value in reference.state[parameter].items() if value is not None}
        assert optimizer.states[place].keys() == expected.keys()
        assert all(torch.equal(optimizer.states[place][key], value) for key, value in expected.items())


@pytest.mark.parametrize("size", [7, 16, 96, 1000])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_sixteen_bits_is_that_of_float32_rounded(name: str, dtype: torch.dtype, size: int) -> None:
    """Of 16 numbers and more, torch's fused SGD makes weights on a CPU that are wrong by as much as the step."""
    torch.manual_seed(size)
    weight, gradient = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    exact = weight.float()
    Optimizer(name, 0.1).step({0: exact}, {0: gradient.float()})
    Optimizer(name, 0.1).step({0: weight}, {0: gradient})
    torch.testing.assert_close(weight.float(), exact, rtol=2.0**-7, atol=2.0**-9)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="optimizer: must be one of sgd, momentum, adam, adamw, got 'lion'"):
        Optimizer("lion", 0.1)


def test_a_rank_does_not_import_the_compiler() -> None:
    """`torch._dynamo` takes a process 1.5 s and 72 MiB. Optimizer classes and dispatch modes of torch import it."""
    program = (
        "import sys, worker_agent.runtime.rank, torch\n"
        "from worker_agent.engine.optimizers import Optimizer\n"
        "from worker_agent.models.chain import build_model\n"
        "build_model('preset:resnet50?scale=0.125&image_size=32', seed=0)\n"
        f"for name in {OPTIMIZERS}: Optimizer(name, 0.1).step({{0: torch.ones(2)}}, {{0: torch.ones(2)}})\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
