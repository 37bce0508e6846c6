"""Chain: builds the blocks of a model that a SPEC names, and refuses those that a stage cannot train."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from pipeplan.errors import require
from worker_agent.models.batches import TokenInputs
from worker_agent.models.blocks import Chain as Chain
from worker_agent.models.hugging_face import build_family
from worker_agent.models.keywords import keyword_form
from worker_agent.models.randomness import seed_all
from worker_agent.models.recipe import Construction, WeightRecipe, require_stages
from worker_agent.models.sharding import joined
from worker_agent.models.spec import Spec, call_factory, load_factory, parse_spec
from worker_agent.models.values import cast_in_place, is_dense, kind_of, parts_of

BY_STAGE = "by_stage"
"""The attribute of a factory whose model may be built on the meta device, and filled a stage at a time."""


def build_model(
    spec: str, *, seed: int, dtype: torch.dtype = torch.float32, empty: bool = False, fused: bool = False
) -> Chain:
    """The chain that a SPEC names, on the CPU. The same seed gives the same weights in every process.

    With `empty` a model of Hugging Face, a preset or a factory with an attribute `by_stage` has only shapes until its
    blocks are materialised; other models are as their factory returns them. With `fused` attention of a Hugging Face
    model is one kernel with any mask, for counting. The random states of torch, NumPy and
    Python are set from the seed while the model is built, and restored afterwards. Raises InvalidInputError if the
    SPEC, its options or its factory's result break a rule.
    """
    parsed = parse_spec(spec, field="model")
    if not parsed.is_hugging_face:
        load_factory(parsed, field="model")  # an import may draw random numbers, and is not repeated
    with _seeded(seed):
        if parsed.is_hugging_face:
            chain = _from_family(parsed, seed, dtype, fused=fused)
        else:  # a preset is run without contents, and a factory that asks for it
            asked = parsed.is_preset or getattr(load_factory(parsed, field="model"), BY_STAGE, False) is True
            by_stage = asked and not isinstance(torch.empty(0), FakeTensor)
            recipe = WeightRecipe(seed)
            with recipe.noting() if by_stage else nullcontext():
                chain = _from_factory(parsed, dtype)
            if by_stage:
                require_stages(chain.root)
                chain = replace(chain, contents=Construction(root=chain.root, recipe=recipe))
    if not empty:
        chain.materialise()
    return chain


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """While it is active, global random numbers follow from the seed."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            seed_all(seed)
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _from_family(spec: Spec, seed: int, dtype: torch.dtype, *, fused: bool) -> Chain:
    """The chain of a Hugging Face model, without contents."""
    chain = build_family(spec, seed=seed, dtype=dtype, fused=fused)
    _require_trainable(chain.root)
    for parameter in chain.root.parameters():
        cast_in_place(parameter, dtype)
    if dtype is torch.float64:  # rotary frequencies stay as they are; batch norm takes no statistics of fewer bits
        norms = (m for m in chain.root.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        for buffer in (buffer for norm in norms for buffer in norm.buffers()):
            cast_in_place(buffer, dtype)
    return chain


def _from_factory(spec: Spec, dtype: torch.dtype) -> Chain:
    """The chain of the blocks, or of the whole module, that the user's factory returns.

    In a language model the first block, or the module, has the attribute `takes`.
    """
    made = isinstance(load_factory(spec, field="model"), nn.Module)
    require(not made, "model", "must be a class or a factory: the seed gives no weights to a module that is", spec.text)
    returned = call_factory(spec, field="model")
    in_a_row = isinstance(returned, nn.ModuleList) or getattr(type(returned), "forward", None) is nn.Sequential.forward
    whole = isinstance(returned, nn.Module) and not in_a_row
    blocks = (returned,) if whole else _listed(returned, spec)
    root = blocks[0] if whole else nn.Sequential(*blocks)
    _require_trainable(root)
    for tensor in (*root.parameters(), *root.buffers()):
        cast_in_place(tensor, dtype)
    tokens = getattr(blocks[0], "takes", None)
    return Chain(
        name=spec.name,
        spec=spec.text,
        blocks=blocks,
        block_names=tuple(f"{index}.{_kind(block)}" for index, block in enumerate(blocks)),
        root=root,
        tokens=tokens if isinstance(tokens, TokenInputs) else None,
        batches=keyword_form(root) if whole else None,
        sharding=None if whole else joined(blocks),
        uncut=whole,
    )


def _listed(returned: Any, spec: Spec) -> tuple[nn.Module, ...]:
    """The modules of a list. Raises InvalidInputError for anything else."""
    rule = f"must be a factory that returns a module or a list of modules, but {spec.target} did not"
    require(isinstance(returned, Iterable), "model", rule, returned)
    blocks = tuple(returned)
    for block in blocks:
        require(isinstance(block, nn.Module), "model", rule, block)
    require(len(blocks) > 0, "model", f"must have at least one block, but {spec.target} returned none", blocks)
    require(len(set(blocks)) == len(blocks), "model", "must not hold the same module as two blocks", spec.target)
    return blocks


def _require_trainable(root: nn.Module) -> None:
    """Raises InvalidInputError for a block that a stage cannot train, exchange or write to a checkpoint."""
    rule = "must have no lazy modules, whose weights have no shape before the first batch: give them their sizes"
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        require(not is_lazy(tensor), "model", rule, name)
    rule = "must have real parameters: hold the parts of a complex one as two numbers (torch.view_as_real)"
    for name, parameter in root.named_parameters():
        require(not parameter.is_complex(), "model", rule, name)
    rule = "must have no buffer of complex128, which a checkpoint cannot hold: register it with persistent=False"
    for name, tensor in root.state_dict(keep_vars=True).items():
        require(not isinstance(tensor, Tensor) or tensor.dtype is not torch.complex128, "model", rule, name)
    for name, parameter in root.named_parameters():
        dense = not parameter.requires_grad or is_dense(parameter)
        require(dense, f"model.{name}", "must be a dense tensor to be trained", kind_of(parameter))
    rule = "must be of parts that a checkpoint can hold; register a buffer with persistent=False"
    for name, tensor in root.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and not is_dense(tensor):
            parts = parts_of(tensor)
            require(parts is not None and all(map(is_dense, parts)), f"model.{name}", rule, kind_of(tensor))
    for name, module in root.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            rule = "must have embeddings with sparse=False: exchanges and updates take no sparse gradients"
            require(not module.sparse, "model", rule, name)
            rule = (
                "must have embeddings without max_norm: their forwards change weights, which copies of them do not see"
            )
            require(module.max_norm is None, "model", rule, name)
    rule = "must have no hooks that run after a gradient is added (register_post_accumulate_grad_hook)"
    for name, parameter in root.named_parameters():
        require(not parameter._post_accumulate_grad_hooks, "model", rule, name)
    _require_own_memory(root)


def _require_own_memory(root: nn.Module) -> None:
    """Raises InvalidInputError for two weights that lie in the same memory: on two stages they would be two."""
    places = sorted(
        (p.untyped_storage().data_ptr(), p.storage_offset() * p.itemsize, name, p)
        for name, p in root.named_parameters()
        if p.layout is torch.strided and p.numel() and p.device.type != "meta" and not isinstance(p, FakeTensor)
    )
    rule = "must be one parameter with {}, in whose memory it lies: assign the parameter itself, not its data"
    for (storage, start, name, weight), (next_storage, next_start, other, _) in pairwise(places):
        stop = start + weight.itemsize * (
            1 + sum((n - 1) * step for n, step in zip(weight.shape, weight.stride(), strict=True))
        )
        apart = storage != next_storage or next_start >= stop
        require(apart, f"model.{other}", rule.format(name), "another parameter")


def _kind(block: nn.Module) -> str:
    """A block's class in lower case, for people to read; of an nn.Sequential the class of its first part."""
    parts = list(block.children())
    return _kind(parts[0]) if isinstance(block, nn.Sequential) and parts else type(block).__name__.lower()
