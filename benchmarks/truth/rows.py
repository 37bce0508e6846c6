"""Rows: measured iterations in the one schema of the data's files."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.truth.machines import require_known
from benchmarks.truth.programs import MeasuredProgram, program_of
from pipeplan.errors import InvalidInputError, require

GIB = 2**30

SIMULATED = "vtrain-single-node"
"""Rows of sources that begin so are another simulator's answers, no measured iterations: they are left out."""

UNITS = ("s/iteration", "tokens/s/gpu")
SHARDINGS = {
    "none": "none",
    "zero-1": "optimizer",
    "zero-2": "gradients",
    "zero-3": "weights",
    "fsdp": "weights",
}
"""The data's words for `documents.engines.SHARDINGS`."""

RECOMPUTES = ("none", "selective", "full")
COUNTS = (
    "gpus",
    "nodes_of",
    "hidden",
    "layers",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "sequence_length",
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "context_parallel",
    "batch",
)
OPEN_COUNTS = ("virtual_stages", "microbatch")
"""Where they are not published, the best are taken."""

COLUMNS = (
    "source",
    "gpu",
    "model",
    *COUNTS,
    *OPEN_COUNTS,
    "sharding",
    "sequence_parallel",
    "recompute",
    "precision",
    "measured",
    "unit",
    "memory_gib",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured configuration. The columns have the data's names; None: not published."""

    source: str
    gpu: str
    model: str
    gpus: int
    nodes_of: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence_length: int
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    context_parallel: int
    batch: int
    virtual_stages: int | None
    microbatch: int | None
    sharding: str
    sequence_parallel: bool
    recompute: str
    precision: str
    measured: float
    unit: str
    memory_gib: float | None

    @property
    def seconds(self) -> float:
        """What an iteration took."""
        if self.unit == "s/iteration":
            return self.measured
        return self.batch * self.sequence_length / (self.measured * self.gpus)

    @property
    def group(self) -> tuple[object, ...]:
        """What rows have in common among which one chooses."""
        return self.model, self.gpus, self.batch, self.sequence_length, self.precision

    @property
    def program(self) -> MeasuredProgram:
        """What ran it."""
        return program_of(self.source, self.sharding)

    @property
    def microbatches(self) -> tuple[int, ...]:
        """The microbatch sizes that may have been taken.

        FSDP's pipelines have as many microbatches as ranks unless they are set otherwise (torchtitan 2024,
        `build_pipeline_schedule`: the degree is the default of `pipeline_parallel_microbatches`).
        """
        if self.microbatch is not None:
            return (self.microbatch,)
        each, p = self.batch // self.data_parallel, self.pipeline_parallel
        if self.program.engine == "fsdp" and p > 1 and each % p == 0:
            return (each // p,)
        return tuple(size for size in (1, 2, 4, 8, 16) if each % size == 0)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The virtual stages that a rank may have had: those that give every stage as many layers."""
        if self.virtual_stages is not None:
            return (self.virtual_stages,)
        p = self.pipeline_parallel
        each = range(1, self.layers // p + 1) if p > 1 else (1,)
        found = tuple(v for v in each if self.layers % (p * v) == 0)
        return found or tuple(v for v in each if self.layers // (p * v) >= 1)


def read_rows(file: Path) -> list[Row]:
    """The file's rows, in its order. Raises InvalidInputError for one that has not the schema."""
    require(file.is_file(), "file", "must be a file of measured rows", str(file))
    with file.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        try:
            header, found = tuple(reader.fieldnames or ()), list(reader)
        except (UnicodeDecodeError, csv.Error) as error:
            raise InvalidInputError("file", f"must be a CSV file ({error})", str(file)) from error
    missing = [column for column in COLUMNS if column not in header]
    require(not missing, f"{file.name}", f"must have the columns {', '.join(COLUMNS)}; it lacks some", missing)
    return [
        _row(fields, f"{file.name}:{line}")
        for line, fields in enumerate(found, start=2)
        if not (fields["source"] or "").startswith(SIMULATED)
    ]


def _row(fields: Mapping[str, str | None], place: str) -> Row:
    counts = {column: _count(fields, column, place) for column in COUNTS}
    t, p, c = (counts[f"{axis}_parallel"] for axis in ("tensor", "pipeline", "context"))
    of_row = {
        "gpus": t * p * c * counts["data_parallel"],
        "batch": counts["batch"] // counts["data_parallel"] * counts["data_parallel"],
    }
    for column, expected in of_row.items():
        rule = "must be the product of the degrees" if column == "gpus" else "must be a multiple of data_parallel"
        require(counts[column] == expected, f"{place} {column}", rule, counts[column])
    require_known(fields["gpu"] or "", place)
    require(p <= counts["layers"], f"{place} pipeline_parallel", "must be at most layers", p)
    words_of = {"unit": UNITS, "sharding": tuple(SHARDINGS), "recompute": RECOMPUTES}
    for column, words in words_of.items():
        require(fields[column] in words, f"{place} {column}", f"must be one of {', '.join(words)}", fields[column])
    open_counts = {column: _count(fields, column, place) if fields[column] else None for column in OPEN_COUNTS}
    values: dict[str, Any] = {  # checked above, by the columns' names
        **{column: fields[column] for column in ("source", "gpu", "model", "precision", *words_of)},
        **counts,
        **open_counts,
        "sequence_parallel": _count(fields, "sequence_parallel", place, at_least=0) > 0,
        "measured": _amount(fields, "measured", place),
        "memory_gib": _amount(fields, "memory_gib", place) if fields["memory_gib"] else None,
    }
    return Row(**values)


def _count(fields: Mapping[str, str | None], column: str, place: str, at_least: int = 1) -> int:
    text = (fields[column] or "").strip()
    good = text.isascii() and text.isdigit() and int(text) >= at_least
    require(good, f"{place} {column}", f"must be a whole number of at least {at_least}", text)
    return int(text)


def _amount(fields: Mapping[str, str | None], column: str, place: str) -> float:
    try:
        value = float(fields[column] or "")
    except ValueError:
        value = 0.0
    require(0 < value < float("inf"), f"{place} {column}", "must be a number above 0", fields[column])
    return value


def by_source(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each source, in the order in which they come."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.source, []).append(row)
    return found
