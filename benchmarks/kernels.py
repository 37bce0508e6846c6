"""`python -m benchmarks.kernels FOLDER [--fit] [--json]`: measured kernels and collectives beside their estimates.

FOLDER holds `gemm.csv.gz`, `attention.csv.gz` and `collectives.csv.gz`: times by type of GPU, as
ai-dynamo/aiconfigurator publishes them. Estimates are those of the datasheets and named clusters, through the code that
`solve` calls. `--fit` finds each type's numbers anew, prints them as the sources hold them, and the errors with both.

Products in 8 and 4 bits were measured with the cast of their left operand. It is fitted apart, as bytes an element and
a start, and left out of the numbers: an engine casts a tensor once, not for each product.
"""

import argparse
import csv
import gzip
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.documents.collectives import CollectiveShares
from pipeplan.documents.devices import KNOWN_TYPES
from pipeplan.errors import InvalidInputError, require
from worker_agent.profiler.datasheets import DATASHEETS, FLOAT4, FLOAT8, Datasheet, ProductShares
from worker_agent.profiler.kernels import Kernels
from worker_agent.profiler.operations import DeviceOperation, MatrixSizes

TYPES = {
    "a100_sxm": "a100-80gb",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
}
"""The files' names of systems, and ours."""

DTYPES = {"bfloat16": "bfloat16", "fp8": FLOAT8, "nvfp4": FLOAT4}
BYTES = {"bfloat16": 2.0, FLOAT8: 1.0, FLOAT4: 0.5}

LEAST_SIDE = 256
"""Products with a smaller side than any of a layer that is trained are left out."""

LEAST_LENGTH = 512
LEAST_HEADS = 4
"""So are shorter sequences, and fewer heads of all sequences together, in attention."""

LEAST_BYTES = 2**16
"""So are smaller collectives."""


def _alone(key: str) -> Datasheet:
    """The datasheet for single kernels, which no long job slows down."""
    return replace(DATASHEETS[key], sustained=1.0)


Numbers = Mapping[str, float]
Seconds = Callable[[Numbers], FloatArray]


@dataclass(frozen=True, eq=False)
class Group:
    """Rows that share numbers: what was measured, by size."""

    system: str
    name: str
    sizes: tuple[int, ...]
    measured_s: FloatArray

    def errors(self, predicted_s: FloatArray) -> FloatArray:
        """Relative, above 0 where more was predicted than measured."""
        return np.asarray(predicted_s / self.measured_s - 1)


def fitted(group: Group, seconds: Seconds, start: Numbers, grids: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The numbers with the least mean error: one at a time over its grid, until none improves it."""
    best, least = dict(start), float(np.abs(group.errors(seconds(start))).mean())
    improved = True
    while improved:
        improved = False
        for name, grid in grids.items():
            for value in grid:
                error = float(np.abs(group.errors(seconds(best | {name: value}))).mean())
                if error < least - 1e-6:
                    best[name], least, improved = value, error, True
    return best


# ---- products ----

PRODUCT_GRIDS = {
    "efficiency": [n / 50 for n in range(20, 50)],
    "start_depth": [0.0, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048],
    "tile_reads": [n / 20 for n in range(16)],
}
MEMORY_GRIDS = {
    "product_memory_efficiency": [n / 50 for n in range(20, 49)],
    "kernel_s": [n / 2 * 1e-6 for n in range(1, 16)],
}
CAST_GRIDS = {"cast_bytes": [float(n) for n in range(12)], "cast_start_s": [n * 1e-6 for n in range(16)]}


@dataclass(frozen=True, eq=False)
class Products:
    """The measured products of one system and dtype."""

    group: Group
    sheet: Datasheet
    dtype: str
    kernels: Kernels
    left_elements: FloatArray

    def seconds(self, numbers: Numbers) -> FloatArray:
        """Their estimates with these numbers in place of the datasheet's."""
        shares = ProductShares(**{name: numbers[name] for name in PRODUCT_GRIDS})
        sheet = replace(
            self.sheet,
            products={self.dtype: shares},
            product_memory_efficiency=numbers["product_memory_efficiency"],
            kernel_s=numbers["kernel_s"],
        )
        cast_s = numbers["cast_start_s"] + numbers["cast_bytes"] * self.left_elements / sheet.product_bytes_per_s
        return np.asarray(self.kernels.seconds(sheet) + cast_s)

    @property
    def stored(self) -> dict[str, float]:
        """The datasheet's numbers, with the cast that fits them best."""
        shares = self.sheet.product_shares(self.dtype)
        numbers = {
            **{name: getattr(shares, name) for name in PRODUCT_GRIDS},
            **{name: getattr(self.sheet, name) for name in MEMORY_GRIDS},
            **dict.fromkeys(CAST_GRIDS, 0.0),
        }
        return numbers if self.dtype == "bfloat16" else fitted(self.group, self.seconds, numbers, CAST_GRIDS)

    def fit(self, memory: Numbers | None) -> dict[str, float]:
        """The numbers that fit best. Those of the memory are taken from 16-bit products where they are given."""
        start = self.stored | dict(memory or {})
        grids: Mapping[str, Sequence[float]] = PRODUCT_GRIDS | (CAST_GRIDS if memory else MEMORY_GRIDS)
        found = [
            fitted(self.group, self.seconds, start | {"efficiency": efficiency, "start_depth": 64.0}, grids)
            for efficiency in (0.5, 0.8)
        ]
        return min(found, key=lambda each: float(np.abs(self.group.errors(self.seconds(each))).mean()))


def read_products(rows: Iterable[Mapping[str, str]]) -> list[Products]:
    """By system and dtype."""
    grouped: dict[tuple[str, str], list[tuple[int, int, int, float]]] = {}
    for row in rows:
        m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
        if row["system"] in TYPES and row["gemm_dtype"] in DTYPES and min(n, k) >= LEAST_SIDE:
            grouped.setdefault((row["system"], row["gemm_dtype"]), []).append((m, n, k, float(row["ms"]) / 1e3))
    found = []
    for (system, name), of_group in grouped.items():
        dtype = DTYPES[name]
        operations = [_product(m, n, k, dtype) for m, n, k, _ in of_group]
        group = Group(system, name, tuple(m for m, *_ in of_group), np.array([row[-1] for row in of_group]))
        left = np.array([float(m * k) for m, _, k, _ in of_group])
        found.append(Products(group, _alone(TYPES[system]), dtype, Kernels.of(operations), left))
    return found


def _product(m: int, n: int, k: int, dtype: str) -> DeviceOperation:
    moved_bytes = int(BYTES[dtype] * (m * k + k * n) + 2 * m * n)
    return DeviceOperation(
        name="mm", flops=2 * m * n * k, dtype=dtype, moved_bytes=moved_bytes, sizes=MatrixSizes(batch=1, m=m, n=n, k=k)
    )


# ---- attention ----

ATTENTION_GRIDS = {
    "attention_efficiency": [n / 50 for n in range(10, 46)],
    "attention_start_s": [n * 1e-6 for n in range(26)],
    "attention_half_length": [100.0 * n for n in range(41)],
}


@dataclass(frozen=True, eq=False)
class Attention:
    """The measured attention of one system."""

    group: Group
    sheet: Datasheet
    kernels: Kernels

    def seconds(self, numbers: Numbers) -> FloatArray:
        """Their estimates with these numbers in place of the datasheet's."""
        sheet = replace(
            self.sheet,
            attention_efficiency=numbers["attention_efficiency"],
            attention_start_s=numbers["attention_start_s"],
            attention_half_length=numbers["attention_half_length"],
        )
        return self.kernels.seconds(sheet)

    @property
    def stored(self) -> dict[str, float]:
        """The datasheet's numbers."""
        return {name: getattr(self.sheet, name) for name in ATTENTION_GRIDS}


def read_attention(rows: Iterable[Mapping[str, str]]) -> list[Attention]:
    """By system."""
    grouped: dict[str, list[tuple[int, DeviceOperation, float]]] = {}
    for row in rows:
        batch, length, heads = int(row["batch_size"]), int(row["isl"]), int(row["num_heads"])
        if row["system"] not in TYPES or length < LEAST_LENGTH or batch * heads < LEAST_HEADS:
            continue
        kv_heads, head = int(row["num_key_value_heads"]), int(row["head_dim"])
        operation = DeviceOperation(
            name="_scaled_dot_product_flash_attention",
            flops=4 * batch * heads * length * length * head,
            dtype="bfloat16",
            moved_bytes=2 * 2 * batch * length * head * (heads + kv_heads),
            sizes=MatrixSizes(batch=batch * heads, m=length, n=length, k=head),
            causal=True,
        )
        grouped.setdefault(row["system"], []).append((length, operation, float(row["ms"]) / 1e3))
    return [
        Attention(
            Group(system, "attention", tuple(length for length, *_ in of_system), np.array([s for *_, s in of_system])),
            _alone(TYPES[system]),
            Kernels.of([operation for _, operation, _ in of_system]),
        )
        for system, of_system in grouped.items()
    ]


# ---- collectives ----

KINDS = {"all_gather": "gather", "reduce_scatter": "gather", "all_reduce": "all_reduce", "alltoall": "all_to_all"}
COLLECTIVE_GRIDS = {
    "start_s": [n / 2 * 1e-6 for n in range(6, 60)],
    "share": [n / 50 for n in range(2, 40)],
    "bulk_start_s": [n * 1e-6 for n in range(10, 100)],
    "bulk_share": [n / 50 for n in range(15, 50)],
    "growth": [n / 20 for n in range(16)],
}


@dataclass(frozen=True, eq=False)
class MeasuredCollectives:
    """The measured collectives of one system and kind."""

    group: Group
    units: tuple[int, ...]
    port_bytes: tuple[float, ...]
    bandwidth_bytes_per_s: float
    shares: CollectiveShares | None

    def seconds(self, numbers: Numbers) -> FloatArray:
        """Their estimates with these numbers."""
        shares, bandwidth = CollectiveShares(**numbers), self.bandwidth_bytes_per_s
        pairs = zip(self.units, self.port_bytes, strict=True)
        return np.array([sum(shares.seconds(units, size_bytes, bandwidth)) for units, size_bytes in pairs])

    @property
    def stored(self) -> dict[str, float] | None:
        """The named clusters' numbers."""
        return {name: getattr(self.shares, name) for name in COLLECTIVE_GRIDS} if self.shares else None


def read_collectives(rows: Iterable[Mapping[str, str]]) -> list[MeasuredCollectives]:
    """By system and kind, of the newest release of NCCL."""
    every = [row for row in rows if row["system"] in TYPES]
    releases = {(row["system"], _release(row["nccl"])) for row in every}
    newest = dict(sorted(releases))  # of several releases the last stays
    grouped: dict[tuple[str, str], list[tuple[int, float, int, float]]] = {}
    for row in every:
        size_bytes = int(row["elements"]) * (2 if row["nccl_dtype"] == "half" else 1)
        if _release(row["nccl"]) != newest[row["system"]] or size_bytes < LEAST_BYTES:
            continue
        units, kind = int(row["num_gpus"]), KINDS[row["op_name"]]
        port_bytes = (2 if kind == "all_reduce" else 1) * (units - 1) / units * size_bytes
        grouped.setdefault((row["system"], kind), []).append((units, port_bytes, size_bytes, float(row["ms"]) / 1e3))
    found = []
    for (system, kind), of_group in grouped.items():
        known = KNOWN_TYPES[TYPES[system]]
        units_of, port_of, sizes, seconds = zip(*of_group, strict=True)
        shares = getattr(known.collectives, kind) if known.collectives else None
        group = Group(system, kind, sizes, np.array(seconds))
        found.append(MeasuredCollectives(group, units_of, port_of, known.link_bandwidth_bytes_per_s, shares))
    return found


def _release(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


START_OF_COLLECTIVES = {"start_s": 1e-5, "share": 0.3, "bulk_start_s": 3e-5, "bulk_share": 0.7, "growth": 0.3}


# ---- the command ----


def main() -> int:
    """Prints tables, or JSON; status 2 and one line for a folder without the files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--fit", action="store_true", help="find the numbers anew and print them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    try:
        found = list(_compared(given.folder, fit=given.fit))
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(found, indent=1))
        return 0
    print("| system | kernels | number | mean error | with the fit | signed | by size |\n|---|---|---|---|---|---|---|")
    for each in found:
        print(f"| {' | '.join(map(_cell, list(each.values())[:7]))} |")
    for each in found if given.fit else ():
        print(each["system"], each["kernels"], each["numbers"])
    return 0


def _compared(folder: Path, *, fit: bool) -> Iterable[dict[str, object]]:
    memory: dict[str, dict[str, float]] = {}
    for products in sorted(read_products(_rows(folder, "gemm")), key=lambda each: each.dtype != "bfloat16"):
        of_system = products.group.system
        numbers = products.fit(memory.get(of_system)) if fit else None
        if numbers is not None:
            memory.setdefault(of_system, {name: numbers[name] for name in MEMORY_GRIDS})
        yield _line(products.group, products.seconds, products.stored, numbers)
    for attention in read_attention(_rows(folder, "attention")):
        numbers = fitted(attention.group, attention.seconds, attention.stored, ATTENTION_GRIDS) if fit else None
        yield _line(attention.group, attention.seconds, attention.stored, numbers)
    for collectives in read_collectives(_rows(folder, "collectives")):
        start = collectives.stored or START_OF_COLLECTIVES
        numbers = fitted(collectives.group, collectives.seconds, start, COLLECTIVE_GRIDS) if fit else None
        yield _line(collectives.group, collectives.seconds, collectives.stored, numbers)


def _line(group: Group, seconds: Seconds, stored: Numbers | None, numbers: Numbers | None) -> dict[str, object]:
    errors = None if stored is None else group.errors(seconds(stored))
    after = None if numbers is None else group.errors(seconds(numbers))
    shown = after if after is not None else errors
    by_size = {
        size: round(float(np.abs(shown[np.array(group.sizes) == size]).mean()), 3)
        for size in sorted(set(group.sizes))
        if shown is not None
    }
    return {
        "system": group.system,
        "kernels": group.name,
        "number": len(group.sizes),
        "mean_error": None if errors is None else mean(map(abs, errors.tolist())),
        "fitted_mean_error": None if after is None else mean(map(abs, after.tolist())),
        "signed_mean_error": None if shown is None else mean(shown.tolist()),
        "by_size": by_size,
        "numbers": None if numbers is None else {name: float(f"{value:.4g}") for name, value in numbers.items()},
    }


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1%}"
    if isinstance(value, dict):
        return " ".join(f"{size}: {error:.1%}" for size, error in value.items())
    return "" if value is None else str(value)


def _rows(folder: Path, name: str) -> list[dict[str, str]]:
    file = folder / f"{name}.csv.gz"
    require(file.is_file(), "folder", f"must hold {file.name}", str(folder))
    with gzip.open(file, "rt", encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


if __name__ == "__main__":
    sys.exit(main())
