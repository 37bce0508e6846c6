"""Counted: what one device does of a row's model in the row's form, from its operations.

The program that was measured decides how a model is built. GPT models ran in Megatron: one kernel for a bias and what
follows it, attention in four kernels, dropout. MPT models have no biases, a tied embedding and attention in one kernel;
others are built like Llama.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.truth.rows import Row
from pipeplan.documents.forms import Collective, Form
from worker_agent.models.losses import Loss, default_loss
from worker_agent.profiler.counts import BlockCounts
from worker_agent.profiler.datasheets import FLOAT8
from worker_agent.profiler.kernels import Kernels
from worker_agent.profiler.operations import DeviceOperation
from worker_agent.profiler.sharded import KindCounts, ShapedModel, count_form, shape_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family's models are built, beside their sizes.

    `fused_loss`: cross entropy keeps logits of 16 bits and their gradient, and no copies of 32 bits.
    """

    settings: str
    attention: str
    dtype: str
    fused_loss: bool = False


FAMILIES = {
    "gpt": Family(settings="dropout=0.1&fused=true&tied=true", attention="unfused", dtype="float16"),
    "mpt": Family(settings="bias=false&tied=true", attention="flash", dtype="bfloat16", fused_loss=True),
}
LLAMA = Family(settings="bias=false&norm=rms&activation=swiglu&positions=rotary", attention="flash", dtype="bfloat16")


def family_of(row: Row) -> Family:
    """By the first word of the model's name."""
    return FAMILIES.get(row.model.split("-")[0].lower(), LLAMA)


def spec_of(row: Row, settings: str) -> str:
    """The model with one layer: the others are equal."""
    sizes = {
        "hidden": row.hidden,
        "layers": 1,
        "heads": row.heads,
        "kv_heads": row.kv_heads,
        "ffn": row.ffn,
        "vocabulary": row.vocab,
        "sequence_length": row.sequence_length,
    }
    return "preset:transformer?" + "&".join(f"{k}={v}" for k, v in sizes.items()) + "&" + settings


@dataclass(frozen=True, eq=False)
class Pass:
    """A block's forward or backward: its operations and what it exchanges."""

    operations: tuple[DeviceOperation, ...]
    collectives: tuple[Collective, ...]

    @cached_property
    def kernels(self) -> Kernels:
        """The operations as arrays."""
        return Kernels.of(self.operations)

    @cached_property
    def float8(self) -> Kernels:
        """The same with matrix products in 8 bits: their operands are read, and written in rows and in columns."""
        return Kernels.of([changed for op in self.operations for changed in _in_float8(op)])


def _in_float8(op: DeviceOperation) -> Iterable[DeviceOperation]:
    if op.sizes is None or op.sizes.batch > 1 or "attention" in op.name:
        return (op,)
    operands = op.sizes.m * op.sizes.k + op.sizes.k * op.sizes.n
    cast = replace(op, name="float8", flops=0, moved_bytes=4 * operands, sizes=None)
    return replace(op, dtype=FLOAT8), cast


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedKind:
    """Embedding, layer or head. `tied_parameters` are the embedding's that the head uses."""

    parameters: int
    tied_parameters: int
    counts: BlockCounts
    forward: Pass
    backward: Pass
    attention: Pass | None


@dataclass(frozen=True, slots=True)
class RowKey:
    """What decides what a device does: rows with the same share it."""

    spec: str
    family: Family
    form: Form
    sequence_length: int


def key_of(row: Row) -> RowKey:
    """The row's key."""
    family = family_of(row)
    form = Form(
        tensor=row.tensor_parallel,
        sequence_parallel=row.sequence_parallel and row.tensor_parallel > 1,
        context=row.context_parallel,
    )
    return RowKey(spec_of(row, family.settings), family, form, row.sequence_length)


Kinds = tuple[CountedKind, CountedKind, CountedKind]
"""Embedding, layer, head."""

Counted = dict[tuple[RowKey, int], Kinds]
"""By key and microbatch size."""


def count_rows(rows: Sequence[Row]) -> Counted:
    """What a device does for every row, at every microbatch size that it may have had.

    Raises InvalidInputError for degrees that do not divide what they share.
    """
    wanted: dict[RowKey, set[int]] = {}
    for row in rows:
        wanted.setdefault(key_of(row), set()).update(row.microbatches)
    models: dict[tuple[str, str], ShapedModel] = {}
    found: Counted = {}
    for key, sizes in wanted.items():
        kinds = _form_kinds(models, key, key.spec, key.form, sizes, default_loss)
        found.update({(key, size): each for size, each in kinds.items()})
    return found


def _form_kinds(
    models: dict[tuple[str, str], ShapedModel], key: RowKey, spec: str, form: Form, sizes: set[int], loss: Loss
) -> dict[int, Kinds]:
    """Embedding, layer and head of a spec in a form, by microbatch size."""
    name = (spec, key.family.dtype)
    if name not in models:
        models[name] = shape_model(*name)
    counted = count_form(
        models[name],
        form,
        microbatch_sizes=sorted(sizes),
        sequence_length=key.sequence_length,
        attention=key.family.attention,
        loss=loss,
    )
    found = {}
    for size in sizes:
        embedding, layer, head = (_kind(each, each.by_size[size]) for each in counted.kinds)
        found[size] = (embedding, layer, head)
    return found


def _kind(kind: KindCounts, counts: BlockCounts) -> CountedKind:
    again = counts.selective
    return CountedKind(
        parameters=kind.parameters,
        tied_parameters=kind.tied_parameters,
        counts=counts,
        forward=Pass(counts.forward, counts.forward_collectives),
        backward=Pass(counts.backward, counts.backward_collectives),
        attention=None if again is None else Pass(again.operations, ()),
    )
