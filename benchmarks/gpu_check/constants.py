"""Constants: a datasheet of this device, and the share of it that training reaches, by size of operation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

import torch

from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.here import MIB, datasheet, device, is_short
from benchmarks.gpu_check.timing import device_s, host_s, synchronise
from worker_agent.profiler.datasheets import FLOAT8, Datasheet
from worker_agent.profiler.kernels import Kernels
from worker_agent.profiler.operations import DeviceOperation, MatrixSizes

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SIZES = (256, 512, 1024, 2048, 4096, 8192)
TRAINING_SHAPES = ((2048, 1024, 1024), (4096, 1024, 4096), (4096, 2048, 5632), (4096, 2048, 32000))
"""(tokens, inputs, outputs) of layers of language models."""

LONGEST_S = 0.3
"""Products that would take longer are left out."""

ATTENTIONS = tuple((8192 // length, length, head) for length in (1024, 2048, 4096, 8192) for head in (64, 128))
"""(sequences, tokens of each, a head's width) of causal attention with `HEADS` heads."""

HEADS = 16

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
    beside = partial(beside_estimates, shapes, ((1, 32, 16),) if short else ATTENTIONS, datasheet())
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        f"products in {dtype}".replace("torch.", ""): partial(products, dtype) for dtype in kinds
    }
    checks |= {"memory": memory, "launches": launches, "datasheet constants": partial(suggested, found)}
    findings.run(checks | {"kernels beside their estimates": beside})


def beside_estimates(
    shapes: Sequence[tuple[int, int, int]], attentions: Sequence[tuple[int, int, int]], sheet: Datasheet | None
) -> dict[str, Any]:
    """Seconds of products in 16 and 8 bits and of attention, measured and by the datasheet; and the mean errors.

    Devices without products in 8 bits have none.
    """
    found: dict[str, dict[str, dict[str, float | None]]] = {}

    def note(kind: str, shape: Sequence[int], operation: DeviceOperation, measured_s: float) -> None:
        alone = None if sheet is None else replace(sheet, sustained=1.0)
        estimated_s = None if alone is None else float(Kernels.of([operation]).seconds(alone).sum())
        error = None if estimated_s is None else estimated_s / measured_s - 1
        row = {"measured_s": measured_s, "estimated_s": estimated_s, "error": error}
        found.setdefault(kind, {})["x".join(map(str, shape))] = row

    for m, k, n in shapes:
        product = DeviceOperation(
            name="mm",
            flops=2 * m * k * n,
            dtype="bfloat16",
            moved_bytes=2 * (m * k + k * n + m * n),
            sizes=MatrixSizes(batch=1, m=m, n=n, k=k),
        )
        note("products", (m, k, n), product, product.flops / product_flops_per_s(m, k, n, torch.bfloat16))
        if device().type == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
            narrow = replace(product, dtype=FLOAT8, moved_bytes=m * k + k * n + 2 * m * n)
            note("products in 8 bits", (m, k, n), narrow, narrow_product_s(m, k, n))
    for batch, length, head in attentions:
        attention = DeviceOperation(
            name="_scaled_dot_product_flash_attention",
            flops=4 * batch * HEADS * length * length * head,
            dtype="bfloat16",
            moved_bytes=2 * 4 * batch * length * head * HEADS,
            sizes=MatrixSizes(batch=batch * HEADS, m=length, n=length, k=head),
            causal=True,
        )
        note("attention", (batch, length, head), attention, attention_s(batch, length, head))
    errors = {
        kind: mean(abs(row["error"]) for row in rows.values() if row["error"] is not None)
        for kind, rows in found.items()
        if sheet is not None
    }
    return {"mean_errors": errors, **found}


def narrow_product_s(rows: int, inner: int, columns: int) -> float:
    """Seconds of a product of 8-bit operands with one scale each, and a result of 16 bits."""
    where = device()
    left, right = torch.randn(rows, inner, device=where), torch.randn(columns, inner, device=where)
    one, a, b = torch.ones((), device=where), left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
    return device_s(lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16), where)


def attention_s(batch: int, length: int, head: int) -> float:
    """Seconds of the forward of causal attention in one kernel."""
    where = device()
    query, key, value = (torch.randn(batch, HEADS, length, head, device=where).bfloat16() for _ in range(3))
    return device_s(lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True), where)


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
