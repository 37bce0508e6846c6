"""Compiling: a layer's forward and backward with and without `torch.compile`."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_check.blocks import Gpt2Layer, LlamaLayer
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.here import device, is_installed, is_short
from benchmarks.gpu_check.timing import device_s, host_s, synchronise


def check(findings: Findings) -> None:
    """A layer of each model. On a CPU the short form takes a backend that generates no code."""
    short = is_short(findings)
    if device().type == "cuda" and not is_installed("triton"):
        findings.leave_out("torch.compile", "it needs triton on a GPU, which is not installed")
        return
    if short:
        findings.leave_out("generated kernels", "the short form compiles by the backend aot_eager")
    layers: dict[str, Callable[[], nn.Module]] = {
        "gpt2 layer": partial(Gpt2Layer, *((32, 4) if short else (1024, 16))),
        "llama layer": partial(LlamaLayer, *((32, 4, 2, 64) if short else (2048, 32, 4, 5632))),
    }
    backend = "aot_eager" if short else "inductor"
    shape = (1, 8, 32) if short else (8, 512)
    findings.run({name: partial(compared, make, shape, backend) for name, make in layers.items()})


def compared(make: Callable[[], nn.Module], shape: tuple[int, ...], backend: str) -> dict[str, Any]:
    """Seconds of device and host for a forward and backward, and those of the first compiled call."""
    where = device()
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    layer = make().to(where, dtype)
    width = next(module for module in layer.modules() if isinstance(module, nn.Linear)).in_features
    inputs = torch.randn(*shape[:2], width, device=where, dtype=dtype, requires_grad=True)
    figures = _timed("plain", layer, inputs, where)
    compiled: Callable[[Tensor], Tensor] = torch.compile(layer, backend=backend)
    start_s = time.perf_counter()
    _pass(compiled, inputs)
    synchronise(where)
    return figures | {"compiling_s": time.perf_counter() - start_s} | _timed("compiled", compiled, inputs, where)


def _timed(name: str, layer: Callable[[Tensor], Tensor], inputs: Tensor, where: torch.device) -> dict[str, float]:
    one_pass = partial(_pass, layer, inputs)
    on_device_s = device_s(one_pass, where, repeats=3)
    return {f"{name}_device_s": on_device_s, f"{name}_host_s": host_s(one_pass, where, repeats=3)}


def _pass(layer: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
    torch.autograd.backward(layer(inputs).float().square().mean())
