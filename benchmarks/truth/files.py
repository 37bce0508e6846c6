"""Files: measured rows in each of the forms that their sources have, recognised by their headers.

Rows that say nothing about a plan are left out: another simulator's answers, and fine-tuning of frozen weights.
"""

import csv
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.truth.models import spec_of, spec_of_sizes
from benchmarks.truth.rows import Program, Row, server_of
from pipeplan.errors import InvalidInputError, require
from pipeplan.planners.problem import Options

SHARDINGS = {
    "none": "none",
    "": "optimizer",
    "zero-1": "optimizer",
    "zero-2": "gradients",
    "zero-3": "weights",
    "fsdp": "weights",
    "hsdp": "weights",
}
"""The data's words for `documents.engines.SHARDINGS`. Megatron's users share out the optimizer unless they say so."""

RECOMPUTES: Mapping[str, tuple[bool | None, str | None]] = {
    "none": (False, None),
    "": (None, None),
    "selective": (True, "attention"),
    "full": (True, "block"),
}
"""The data's words; nothing where it was not published, and the planner chooses."""

OF_2021 = Program(engine="megatron", attention="unfused")
PROGRAMS = {
    "vtrain": Program(engine="deepspeed", attention="unfused", network_gbit_per_s=800),
    "korthikanti": OF_2021,
    "narayanan": OF_2021,
    "torchtitan": Program(engine="fsdp", memory_gib=95),
    "llm-foundry": Program(engine="fsdp", fusion="loss"),
    "hf-ultrascale": Program(engine="megatron", fusion="none"),
    "bigscience": Program(engine="deepspeed", attention="unfused", network_gbit_per_s=400),
    "NeMo": Program(engine="megatron"),
    "fms-fsdp": Program(engine="fsdp"),
    "Automodel": Program(engine="fsdp"),
}
"""What ran the rows of a source, by its beginning. A row's precision says whether torchtitan compiled."""

SIMULATED = "vtrain-single-node"


class Fields:
    """A line's fields by column. A wrong field raises one error that names its place."""

    def __init__(self, fields: Mapping[str, str | None], place: str) -> None:
        self._fields, self.place = fields, place

    def text(self, column: str) -> str:
        """The field as it stands, without blanks around it."""
        return (self._fields.get(column) or "").strip()

    def count(self, column: str, default: int | None = None) -> int:
        """A whole number of at least 1; the default for an empty field or n/a."""
        text = self.text(column).replace(",", "")
        if default is not None and text in ("", "-", "n/a", "0"):
            return default
        good = text.isascii() and text.isdigit() and int(text) >= 1
        require(good, f"{self.place} {column}", "must be a whole number of at least 1", text)
        return int(text)

    def maybe(self, column: str) -> int | None:
        """A count; None for an empty field."""
        return self.count(column) if self.text(column) not in ("", "-", "n/a") else None

    def amount(self, column: str) -> float:
        """A number above 0."""
        text = self.text(column).replace(",", "")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        require(0 < value < float("inf"), f"{self.place} {column}", "must be a number above 0", text)
        return value

    def word(self, column: str, known: Mapping[str, Any]) -> Any:
        """What the word stands for."""
        text = self.text(column)
        require(text in known, f"{self.place} {column}", f"must be one of {', '.join(known)}", text)
        return known[text]


def _program(source: str) -> Program:
    return next((each for start, each in PROGRAMS.items() if source.startswith(start)), Program(engine="megatron"))


def _options(fields: Fields, program: Program, **more: Any) -> Options:
    t, p, c = (fields.count(f"{axis}_parallel", 1) for axis in ("tensor", "pipeline", "context"))
    again, unit = fields.word("recompute", RECOMPUTES)
    if unit == "attention" and program.engine == "fsdp":
        unit = "operation"
    chunks = fields.maybe("virtual_stages")
    found: dict[str, Any] = {
        "optimizer": "adam",
        "engine": program.engine,
        "tensor": t,
        "context": c,
        "expert": 1,
        "stages": p,
        "chunks": 1 if p == 1 else chunks,
        "microbatch_size": fields.maybe("microbatch"),
        "recompute": again,
        "recompute_unit": unit,
        "sharding": fields.word("sharding", SHARDINGS),
        "offload": "none",
        "replicate": 1,
        "graphs": False,
        **more,
    }
    if fields.text("sharding") == "hsdp":  # a group is a node
        found["replicate"] = fields.count("gpus") // fields.count("nodes_of", 8)
    rule = f"must be a multiple of the degrees {t} x {p} x {c}"
    require(fields.count("gpus") % (t * p * c) == 0, f"{fields.place} gpus", rule, fields.count("gpus"))
    found.setdefault("data", fields.count("gpus") // (t * p * c))
    return Options(**found)


SIZES = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "sequence_length")


def _own(fields: Fields) -> Row | None:
    """The one schema of several sources."""
    source = fields.text("source")
    if source.startswith(SIMULATED):
        return None
    precision = fields.text("precision")
    program = _program(source)
    seconds = fields.amount("measured")
    length, batch, gpus = fields.count("sequence_length"), fields.count("batch"), fields.count("gpus")
    if fields.word("unit", {"s/iteration": False, "tokens/s/gpu": True}):
        seconds = batch * length / (seconds * gpus)
    if source.startswith("torchtitan") and "compile" not in precision:
        program = Program(engine="fsdp", fusion="none", memory_gib=95)
    sequence = fields.text("sequence_parallel")
    return Row(
        source=source,
        model=fields.text("model"),
        spec=spec_of_sizes(fields.text("model"), **{name: fields.count(name) for name in SIZES}),
        gpu=_gpu(fields),
        gpus=gpus,
        nodes_of=fields.count("nodes_of"),
        sequence_length=length,
        batch=batch,
        dtype="float16" if "fp16" in precision else "bfloat16",
        precision="fp8" if "fp8" in precision else None,
        program=program,
        options=_options(fields, program, sequence_parallel=sequence == "1" if sequence else None),
        seconds=seconds,
        memory_gib=fields.amount("memory_gib") if fields.text("memory_gib") else None,
    )


def _gpu(fields: Fields, column: str = "gpu") -> str:
    gpu = fields.text(column).lower().removeprefix("dgx-").removeprefix("nvidia ").removeprefix("blackwell gpu (")
    server_of(gpu, f"{fields.place} {column}")
    return gpu


def _sweep(fields: Fields) -> Row:
    """Hugging Face's sweep: seconds of one run are good where its twin took about as long."""
    program = _program("hf-ultrascale")
    twin = float(fields.text("twin_ratio") or "inf")
    return Row(
        source=fields.text("source"),
        model=fields.text("model"),
        spec=spec_of_sizes(fields.text("model"), **{name: fields.count(name) for name in SIZES}),
        gpu=_gpu(fields),
        gpus=fields.count("gpus"),
        nodes_of=fields.count("nodes_of"),
        sequence_length=fields.count("sequence_length"),
        batch=fields.count("batch"),
        dtype="bfloat16",
        precision=None,
        program=program,
        options=_options(fields, program),
        seconds=fields.amount("seconds"),
        memory_gib=fields.amount("memory_gib") if fields.text("memory_gib") else None,
        clean=twin <= CLEAN_TWINS and fields.text("status") == "ok",
    )


CLEAN_TWINS = 1.25
"""Rows of the sweep whose twins, with and without ZeRO-1, are no further apart are clean, as its README says."""


USUAL_HEADS = 64
"""Of BigScience's models, where a row names none. Such rows have the seconds of equal rows with 64 heads."""


def _bigscience(fields: Fields) -> Row:
    hidden, length = fields.count("hidden"), fields.count("sequence_length")
    program = _program("bigscience")
    memory = fields.text("memory").removesuffix("GB")
    spec = spec_of_sizes(
        "gpt",
        hidden=hidden,
        layers=fields.count("layers"),
        heads=fields.count("heads", USUAL_HEADS),
        kv_heads=fields.count("heads", USUAL_HEADS),
        ffn=4 * hidden,
        vocab=51_200,
        sequence_length=length,
    )
    return Row(
        source=fields.text("source"),
        model=f"bloom-{fields.text('size')}",
        spec=spec,
        gpu=_gpu(fields),
        gpus=fields.count("gpus"),
        nodes_of=fields.count("nodes_of"),
        sequence_length=length,
        batch=fields.count("batch"),
        dtype="bfloat16",
        precision=None,
        program=program,
        options=_options(fields, program, recompute=True, recompute_unit="block", chunks=1),
        seconds=None if fields.text("seconds") == "x" else fields.amount("seconds"),
        memory_gib=float(memory) if memory.isdigit() else None,
    )


PRECISIONS = {"BF16": None, "FP8": "fp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4", "fp8": "fp8", "bfloat16": None}


def _bridge(fields: Fields) -> Row:
    """Megatron-Bridge's tables, whose experts are whole; with `fsdp`, its own FSDP shards everything."""
    sharded = fields.maybe("fsdp") not in (None, 0) if fields.text("fsdp") not in ("", "0") else False
    program = Program(engine="fsdp" if sharded else "megatron")
    gpus, length, batch = fields.count("gpus"), fields.count("sequence_length"), fields.count("batch")
    expert = fields.count("expert_parallel", 1)
    return Row(
        source="megatron-bridge",
        model=fields.text("model"),
        spec=spec_of(fields.text("model")),
        gpu=_gpu(fields, "system"),
        gpus=gpus,
        nodes_of=8,
        sequence_length=length,
        batch=batch,
        dtype="bfloat16",
        precision=fields.word("precision", PRECISIONS),
        program=program,
        options=_options(
            fields,
            program,
            expert=expert,
            expert_tensor=1 if expert > 1 and not sharded else None,
            sharding="weights" if sharded else "optimizer",
            graphs=False if sharded else None,  # most of its recipes have some
            chunks=fields.count("virtual_stages", 1),
        ),
        seconds=batch * length / (fields.amount("tokens_s_gpu") * gpus),
    )


def _mlperf(fields: Fields) -> Row | None:
    """MLPerf's pre-training, where layout and precision are known."""
    benchmark = fields.text("benchmark")
    if "lora" in benchmark or not fields.text("tensor_parallel") or not fields.text("precision"):
        return None
    program = Program(engine="megatron")
    return Row(
        source=f"mlperf {benchmark}",
        model=benchmark,
        spec=spec_of(benchmark),
        gpu=_gpu(fields),
        gpus=fields.count("gpus"),
        nodes_of=fields.count("gpus_per_node"),
        sequence_length=fields.count("sequence_length"),
        batch=fields.count("batch"),
        dtype="bfloat16",
        precision=fields.word("precision", PRECISIONS),
        program=program,
        options=_options(fields, program),
        seconds=fields.amount("seconds_per_step"),
    )


def _small(fields: Fields) -> Row | None:
    source = fields.text("source").split()[0]
    program = _program(source)
    length, gpus = fields.count("sequence_length"), fields.count("gpus")
    t, p, c = (fields.count(f"{axis}_parallel") for axis in ("tensor", "pipeline", "context"))
    batch = fields.count("batch", fields.count("microbatch") * gpus // (t * p * c))
    gpu = fields.text("gpu").removeprefix("dgx-")
    if "Gb/s" in gpu:
        gpu, network = gpu.split()
        program = Program(engine=program.engine, network_gbit_per_s=float(network.removesuffix("Gb/s")))
    return Row(
        source=source,
        model=fields.text("model"),
        spec=spec_of(fields.text("model")),
        gpu=gpu,
        gpus=gpus,
        nodes_of=8,
        sequence_length=length,
        batch=batch,
        dtype="bfloat16",
        precision=fields.word("precision", PRECISIONS),
        program=program,
        options=_options(fields, program),
        seconds=batch * length / (fields.amount("measured") * gpus),
    )


def _automodel(fields: Fields) -> Row | None:
    """NeMo Automodel's pre-training: FSDP2, with experts on devices of their own."""
    if "Pre-Training" not in fields.text("section"):
        return None
    program = _program("Automodel")
    gpus, length = fields.count("#GPUs"), fields.count("Seq Length")
    t, p, c = (fields.count(axis, 1) for axis in ("TP", "PP", "CP"))
    options = Options(
        optimizer="adam",
        engine=program.engine,
        tensor=t,
        context=c,
        expert=fields.maybe("EP"),
        expert_tensor=1 if (fields.maybe("EP") or 1) > 1 else None,
        stages=p,
        chunks=fields.maybe("VP") if p > 1 else 1,
        data=gpus // (t * p * c),
        microbatch_size=fields.count("MBS"),
        sharding="weights",
        offload="none",
        replicate=1,
        graphs=False,
    )
    return Row(
        source="automodel",
        model=fields.text("Model"),
        spec=spec_of(fields.text("Model").partition(" (")[0]),
        gpu="h100",
        gpus=gpus,
        nodes_of=8,
        sequence_length=length,
        batch=fields.count("GBS"),
        dtype="bfloat16",
        precision=None,
        program=program,
        options=options,
        seconds=fields.amount("Time per Global Step (s)"),
    )


FORMS: tuple[tuple[tuple[str, ...], Callable[[Fields], Row | None]], ...] = (
    (("twin_ratio", "tokens_s_gpu"), _sweep),
    (("release", "tokens_s_gpu", "system"), _bridge),
    (("benchmark", "seconds_per_step"), _mlperf),
    (("Model", "GBS", "Time per Global Step (s)"), _automodel),
    (("tflops_gpu_as_published", "size"), _bigscience),
    (("source", "other", "measured"), _small),
    (("source", "gpu", "model", *SIZES, "tensor_parallel", "measured", "unit"), _own),
)
"""The columns by which a form is recognised, and its reader; the first that fits."""


def read_rows(file: Path) -> list[Row]:
    """The file's rows, in its order. Raises InvalidInputError for a file in no form that is known, or a wrong row."""
    require(file.is_file(), "file", "must be a file of measured rows", str(file))
    with file.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        try:
            header, found = tuple(reader.fieldnames or ()), list(reader)
        except (UnicodeDecodeError, csv.Error) as error:
            raise InvalidInputError("file", f"must be a CSV file ({error})", str(file)) from error
    form = next((reader for columns, reader in FORMS if set(columns) <= set(header)), None)
    rule = "must have the columns of one form: " + "; ".join(", ".join(columns) for columns, _ in FORMS)
    if form is None:
        raise InvalidInputError(file.name, rule, header)
    rows = (form(Fields(fields, f"{file.name}:{line}")) for line, fields in enumerate(found, start=2))
    known = [row for row in rows if row is not None]
    return _best_releases(known) if form is _bridge else known


def _best_releases(rows: list[Row]) -> list[Row]:
    """The rows; of several releases' seconds of one configuration, the shortest are clean."""

    def asked(row: Row) -> Row:
        return replace(row, seconds=None)

    best: dict[Row, float] = {}
    for row in rows:
        best[asked(row)] = min(row.seconds or inf, best.get(asked(row), inf))
    return [replace(row, clean=row.seconds == best[asked(row)]) for row in rows]
