"""Listing: the names of a model's blocks, their weights, and what they pass on, found by running them once."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeplan.errors import InvalidInputError
from worker_agent.models.chain import build_model
from worker_agent.models.data import default_feed, in_blocks, open_data
from worker_agent.models.spec import UserCodeError, parse_spec, user_code
from worker_agent.models.values import as_values


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


def list_blocks(model: str, data: str | None, *, microbatch_size: int) -> BlockList:
    """The blocks of the model that a SPEC names. Tensors without elements are left out.

    Of presets and Hugging Face models no weights are made, unless what a block gives depends on the contents.
    Raises InvalidInputError for a model that cannot be cut, or data that it does not take.
    """
    spec = parse_spec(model, field="model")
    if spec.is_preset or spec.is_hugging_face:
        log = logging.getLogger("torch._subclasses.fake_tensor")
        log.disabled = True  # it reports what is tried again below
        try:
            return _listed(model, data, microbatch_size, FakeTensorMode())
        except InvalidInputError:
            raise
        except (UserCodeError, RuntimeError, TypeError, ValueError):  # it needs contents, or fails with them as well
            pass
        finally:
            log.disabled = False
    return _listed(model, data, microbatch_size, None)


def _listed(model: str, data: str | None, microbatch_size: int, fake: FakeTensorMode | None) -> BlockList:
    """The blocks; under `fake` nothing has contents."""
    with fake or nullcontext():
        whole = build_model(model, seed=0)
    data = default_feed(whole).data if data is None else data
    chain = in_blocks(whole, data, microbatch_size=microbatch_size, seed=0, dtype=torch.float32)
    source = open_data(data, microbatch_size=microbatch_size, seed=0, form=chain.batches)
    with user_code(f"microbatch 1 of the data {data}"):
        inputs, _ = source.microbatch(0)
    values: Any = inputs if isinstance(inputs, tuple) else (inputs,)
    hands_on: list[tuple[OutputTensor, ...]] = []
    with torch.no_grad(), fake or nullcontext():
        if fake:
            values = tuple(torch.empty(value.shape, dtype=value.dtype) for value in values)
        for name, block in zip(chain.block_names, chain.blocks, strict=True):
            with user_code(f"block {len(hands_on)} ({name})"):
                values = as_values(block(*values))
            hands_on.append(tuple(map(_handed, filter(Tensor.numel, values))))
    return BlockList(
        names=chain.block_names, weight_bytes=chain.weight_bytes(), hands_on=tuple(hands_on), own=whole.uncut
    )


def _handed(tensor: Tensor) -> OutputTensor:
    return OutputTensor(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
