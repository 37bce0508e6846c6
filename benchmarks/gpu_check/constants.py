"""Constants: a datasheet of this device, and the share of it that training reaches, by size of operation."""

from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.here import MIB, datasheet, device, is_short
from benchmarks.gpu_check.timing import device_s, host_s, synchronise

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SIZES = (256, 512, 1024, 2048, 4096, 8192)
TRAINING_SHAPES = ((2048, 1024, 1024), (4096, 1024, 4096), (4096, 2048, 5632), (4096, 2048, 32000))
"""(tokens, inputs, outputs) of layers of language models."""

LONGEST_S = 0.3
"""Products that would take longer are left out."""

BYTES = (MIB, 8 * MIB, 64 * MIB, 512 * MIB)


def check(findings: Findings) -> None:
    """Matrix throughput by type and size, memory bandwidth by size, launches, and the constants that follow."""
    short = is_short(findings)
    sizes, sizes_bytes = ((64, 128), (MIB // 4,)) if short else (SIZES, BYTES)
    shapes = ((32, 16, 64),) if short else TRAINING_SHAPES
    found: dict[str, dict[str, Any]] = {}

    def products(dtype: torch.dtype) -> dict[str, Any]:
        square: dict[str, float] = {}
        for n in sizes:
            if square and 2 * n**3 / max(square.values()) > LONGEST_S:
                break
            square[str(n)] = product_flops_per_s(n, n, n, dtype)
        layers = {"x".join(map(str, shape)): product_flops_per_s(*shape, dtype) for shape in shapes}
        found[str(dtype)] = {"flops_per_s": square, "layers_flops_per_s": layers}
        return {"most_flops_per_s": max(square.values())} | found[str(dtype)]

    def memory() -> dict[str, Any]:
        found["memory"] = {str(size): bytes_per_s(size) for size in sizes_bytes}
        most = max(rate for rates in found["memory"].values() for rate in rates.values())
        return {"most_bytes_per_s": most, "bytes_per_s": found["memory"]}

    def launches() -> dict[str, Any]:
        found["launches"] = launch_seconds()
        return found["launches"]

    kinds = DTYPES[:1] if short else DTYPES
    findings.run(
        {f"products in {dtype}".replace("torch.", ""): partial(products, dtype) for dtype in kinds}
        | {"memory": memory, "launches": launches, "datasheet constants": partial(suggested, found)}
    )


def product_flops_per_s(rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
    """Of a product (rows, inner) x (inner, columns)."""
    where = device()
    left, right = (torch.randn(shape, device=where).to(dtype) for shape in ((rows, inner), (inner, columns)))
    out = torch.empty(rows, columns, device=where, dtype=dtype)
    flops = 2 * rows * inner * columns
    return flops / device_s(lambda: torch.mm(left, right, out=out), where)


def bytes_per_s(size_bytes: int) -> dict[str, float]:
    """The bandwidth of a copy (read and written once) and of a sum (two read, one written)."""
    where = device()
    one, other, out = (torch.ones(size_bytes // 4, device=where) for _ in range(3))
    return {
        "copy": 2 * size_bytes / device_s(lambda: out.copy_(one), where),
        "sum": 3 * size_bytes / device_s(lambda: torch.add(one, other, out=out), where),
    }


def launch_seconds() -> dict[str, float]:
    """Seconds of the host by operation, of the device by operation when it has nothing to compute, and with a wait."""
    where = device()
    one, weight = torch.ones(8, 8, device=where), torch.ones(8, 8, device=where, requires_grad=True)

    def waited() -> None:
        one.add_(1)
        synchronise(where)

    def trained() -> None:
        torch.autograd.backward((one @ weight).tanh().sum())

    return {
        "host_s": host_s(lambda: one.add_(1), where),
        "device_s": device_s(lambda: one.add_(1), where, repeats=200),
        "waited_for_s": host_s(waited, where),
        "forward_and_backward_of_three_operations_s": host_s(trained, where, repeats=50),
    }


def suggested(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A Datasheet of this device, beside the known one if there is one."""
    sheet = datasheet()
    rates = {
        dtype.removeprefix("torch."): {"most": max(each["flops_per_s"].values()), **each["layers_flops_per_s"]}
        for dtype, each in found.items()
        if dtype.startswith("torch.")
    }
    largest = list(found["memory"].values())[-1]
    constants: dict[str, Any] = {
        "flops_per_s": {dtype: each["most"] for dtype, each in rates.items()},
        "memory_bandwidth_bytes_per_s": max(largest.values()),
        "launch_s": found["launches"]["host_s"],
    }
    if sheet is None:
        return constants | {"datasheet": None}
    shares = {
        dtype: {shape: rate / sheet.flops_per_s[dtype] for shape, rate in each.items()}
        for dtype, each in rates.items()
        if dtype in sheet.flops_per_s
    }
    return constants | {
        "datasheet": sheet.name,
        "compute_efficiency": shares,
        "memory_efficiency": max(largest.values()) / sheet.memory_bandwidth_bytes_per_s,
        "datasheet_says": {
            "compute_efficiency": sheet.compute_efficiency,
            "memory_efficiency": sheet.memory_efficiency,
            "launch_s": sheet.launch_s,
        },
    }
