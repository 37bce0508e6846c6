"""Precision: a block's operations and bytes where its linear layers compute in 8 or 4 bits.

As Transformer Engine 2 does it (its documentation of recipes, "Low precision training"): the three products of a linear
layer have narrow operands and results of 16 bits. Its input and its output's gradient are each cast once, into rows for
one product and columns for the other. Of the input the backward keeps the columns alone. The weights are kept narrow,
in rows and columns, and are cast when they are updated. Attention, norms, softmax and the head stay in 16 bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeplan.documents.profile import PRECISIONS
from pipeplan.errors import require
from worker_agent.profiler.counts import BlockCounts
from worker_agent.profiler.datasheets import FLOAT4, FLOAT8, Datasheet
from worker_agent.profiler.operations import DeviceOperation
from worker_agent.profiler.sharded import FormCounts

WIDE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRecipe:
    """The number format of linear layers. `needs` is the dtype that devices must support."""

    dtype: str
    needs: str
    element_bytes: float


RECIPES: Mapping[str, PrecisionRecipe] = {
    name: PrecisionRecipe(dtype=dtype, needs=needs, element_bytes=PRECISIONS[name])
    for name, dtype, needs in (("fp8", FLOAT8, FLOAT8), ("mxfp8", FLOAT8, FLOAT4), ("nvfp4", FLOAT4, FLOAT4))
}
"""By the names of `documents.profile.PRECISIONS`. Devices that scale blocks in their products also have 4 bits."""


def recipe_of(precision: str, sheet: Datasheet) -> PrecisionRecipe:
    """The recipe. Raises InvalidInputError for a device that does not compute so."""
    recipe = RECIPES[precision]
    able = ", ".join(name for name, each in RECIPES.items() if each.needs in sheet.flops_per_s)
    rule = f"must be left out on {sheet.name}" + (f", or be one of {able}" if able else ", which has 16 bits and more")
    require(recipe.needs in sheet.flops_per_s, "precision", rule, precision)
    return recipe


def in_recipe(counts: FormCounts, recipe: PrecisionRecipe) -> FormCounts:
    """The counts of a form with narrow linear layers in all blocks but the last, which holds the head."""
    head = counts.blocks[-1]
    kinds = (
        kind
        if number == head
        else replace(kind, by_size={size: narrowed(each, recipe) for size, each in kind.by_size.items()})
        for number, kind in enumerate(counts.kinds)
    )
    return replace(counts, kinds=tuple(kinds))


def narrowed(counts: BlockCounts, recipe: PrecisionRecipe) -> BlockCounts:
    """The counts of the same block with narrow linear layers."""
    experts = counts.expert_matrices
    trained = {(op.sizes.m, op.sizes.k, op.sizes.n) for op in counts.backward if is_linear(op, experts) and op.sizes}
    kept_bytes, made_bytes, modules = 0.0, 0.0, counts.modules
    made_again = list(modules.products) if modules else []
    for op in counts.forward:
        if op.sizes is None or not is_linear(op, experts) or op.operand == "again":
            continue
        sizes = op.sizes
        if {(sizes.n, sizes.m, sizes.k), (sizes.k, sizes.m, sizes.n)} & trained:  # for the weights' gradient
            beside = op.operand == "attention"  # its own backward keeps its result
            more_bytes = sizes.batch * sizes.m * sizes.k * (recipe.element_bytes - (0 if beside else WIDE_BYTES))
            kept_bytes += more_bytes
            if sizes in made_again:  # neither wide nor narrow is it kept
                made_again.remove(sizes)
                made_bytes += more_bytes
    again = counts.selective
    if again and again.unit == "operation":  # inputs of linear layers are not kept, but made again
        again = replace(again, operations=tuple(_narrow(again.operations, recipe, experts)))
    elif again:
        again = replace(again, activation_bytes=max(0, again.activation_bytes + round(kept_bytes)))
    if modules:
        left_bytes = max(0, modules.activation_bytes + round(kept_bytes - made_bytes))
        operations = tuple(_narrow(modules.operations, recipe, experts))
        modules = replace(modules, operations=operations, activation_bytes=left_bytes)
    return replace(
        counts,
        modules=modules,
        forward=tuple(_narrow(counts.forward, recipe, experts)),
        backward=tuple(_narrow(counts.backward, recipe, experts)),
        backward_input=tuple(_narrow(counts.backward_input, recipe, experts)),
        activation_bytes=max(0, counts.activation_bytes + round(kept_bytes)),
        selective=again,
    )


def is_linear(op: DeviceOperation, experts: Sequence[tuple[int, ...]]) -> bool:
    """Whether it is a product of a linear layer, or of all `experts` with weights of these shapes; not of attention."""
    if op.sizes is None or "attention" in op.name or op.operand is None:
        return False
    batch, m, n, k = op.sizes.batch, op.sizes.m, op.sizes.n, op.sizes.k
    return batch == 1 or any((batch, *sides) in experts for sides in ((k, n), (n, k), (m, n), (n, m)))


def _narrow(
    operations: Sequence[DeviceOperation], recipe: PrecisionRecipe, experts: Sequence[tuple[int, ...]]
) -> Iterator[DeviceOperation]:
    for op in operations:
        if not is_linear(op, experts) or op.sizes is None:
            yield op
            continue
        sizes = op.sizes
        if op.operand != "again":
            elements = sizes.batch * sizes.m * sizes.k
            moved_bytes = round(elements * (WIDE_BYTES + 2 * recipe.element_bytes))
            yield DeviceOperation(name="cast", flops=0, dtype=op.dtype, moved_bytes=moved_bytes)
        operands = sizes.batch * (sizes.m * sizes.k + sizes.k * sizes.n)
        moved_bytes = round(operands * recipe.element_bytes + WIDE_BYTES * sizes.batch * sizes.m * sizes.n)
        yield replace(op, dtype=recipe.dtype, moved_bytes=moved_bytes)
