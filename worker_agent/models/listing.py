"""Listing: the names of a model's blocks, their weights, and their outputs, from one run of them."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from pipeplan.errors import PipeplanError, require
from pipeplan.formats import size
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.data import default_feed, in_blocks, open_data
from worker_agent.models.recipe import ConstructionMode
from worker_agent.models.spec import parse_spec, user_code
from worker_agent.models.values import as_values

MOST_CONTENTS_BYTES = 4 * 2**30
"""The upper bound on weights that are made for blocks whose listing needs contents."""

_WITHOUT_CONTENTS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_WITHOUT_CONTENTS_SAID = (
    "data pointer",
    "data is not allocated",
    "numpy() is not supported",
    "all Tensors to FakeTensors",
)
"""torch's errors where code reads the contents of a fake tensor: of special types, and of general ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """A tensor that a block passes on."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockList:
    """A model's blocks in order. `own`: it is a module that was cut, and whose attribute `cuts` may name the blocks."""

    names: tuple[str, ...]
    weight_bytes: tuple[int, ...]
    hands_on: tuple[tuple[OutputTensor, ...], ...]
    own: bool


def list_blocks(
    model: str, data: str | None, *, microbatch_size: int, on_contents: Callable[[int], None] = lambda _: None
) -> BlockList:
    """The blocks of the model that a SPEC names. Tensors without elements are left out.

    Of presets and Hugging Face models no weights are made, unless a block's output depends on the contents:
    `on_contents` is then called with their bytes first. Raises InvalidInputError for a model that cannot be cut, data
    that it does not take, and weights of more than MOST_CONTENTS_BYTES.
    """
    spec = parse_spec(model, field="model")
    if not (spec.is_preset or spec.is_hugging_face):
        return _listed(build_model(model, seed=0), data, microbatch_size, None)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled = True  # it reports errors after which the code below tries again
    try:
        fake = FakeTensorMode()
        with fake:
            whole = build_model(model, seed=0)
        return _listed(whole, data, microbatch_size, fake)
    except PipeplanError as error:
        # A failure for another reason than missing contents occurs with contents too.
        cause = error.__cause__
        if not isinstance(cause, _WITHOUT_CONTENTS) and not any(part in str(cause) for part in _WITHOUT_CONTENTS_SAID):
            raise
    finally:
        log.disabled = False
    whole = build_model(model, seed=0, empty=True)
    size_bytes = sum(tensor.nbytes for tensor in {*whole.root.parameters(), *whole.root.buffers()})
    rule = (
        f"must have at most {size(MOST_CONTENTS_BYTES)} of weights, because what its blocks give depends on contents: "
        "list a smaller one with the same kinds of blocks, by keys of its config (hf:...?num_hidden_layers=2)"
    )
    require(size_bytes <= MOST_CONTENTS_BYTES, "model", rule, size(size_bytes))
    on_contents(size_bytes)
    whole.materialise()
    return _listed(whole, data, microbatch_size, None)


class _AnyFloatingType(ConstructionMode):  # type: ignore[no-untyped-call]
    """Grouped products of fake tensors in every type: torch's rule for them knows bfloat16 alone, its kernels all."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        left, right, *others = args
        found = func(left.to(torch.bfloat16), right.to(torch.bfloat16), *others, **(kwargs or {}))
        return found.to(left.dtype)


def _listed(whole: Chain, data: str | None, microbatch_size: int, fake: FakeTensorMode | None) -> BlockList:
    """The blocks; under `fake` nothing has contents."""
    data = default_feed(whole).data if data is None else data
    chain = in_blocks(whole, data, microbatch_size=microbatch_size, seed=0, dtype=torch.float32)
    source = open_data(data, microbatch_size=microbatch_size, seed=0, form=chain.batches)
    with user_code(f"microbatch 1 of the data {data}"):
        inputs, _ = source.microbatch(0)
    values: Any = inputs if isinstance(inputs, tuple) else (inputs,)
    hands_on: list[tuple[OutputTensor, ...]] = []
    with torch.no_grad(), fake or nullcontext(), _AnyFloatingType() if fake else nullcontext():
        if fake:
            values = tuple(torch.empty(value.shape, dtype=value.dtype) for value in values)
        for name, block in zip(chain.block_names, chain.blocks, strict=True):
            with user_code(f"block {len(hands_on)} ({name})"):
                values = as_values(block(*values))
            given = [(tuple(v.shape), str(v.dtype).removeprefix("torch.")) for v in values if v.numel()]
            hands_on.append(tuple(OutputTensor(shape=shape, dtype=dtype) for shape, dtype in given))
    return BlockList(
        names=chain.block_names, weight_bytes=chain.weight_bytes(), hands_on=tuple(hands_on), own=whole.uncut
    )
