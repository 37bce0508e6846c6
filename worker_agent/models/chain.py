"""Chain: a model as blocks that data passes through one after the other."""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from pipeplan.documents.tied import TiedWeights
from pipeplan.errors import require
from worker_agent.models.batches import BatchForm
from worker_agent.models.hugging_face import TokenInputs, build_family
from worker_agent.models.keywords import KeywordForm, keyword_form
from worker_agent.models.materialise import Contents
from worker_agent.models.own import cut
from worker_agent.models.randomness import seed_all
from worker_agent.models.recipe import Construction, Constructors, WeightRecipe, require_stages
from worker_agent.models.sharding import Sharding, joined
from worker_agent.models.spec import Spec, call_factory, load_factory, parse_spec
from worker_agent.models.values import bytes_of, cast_in_place, is_dense, kind_of, parts_of

BY_STAGE = "by_stage"
"""The attribute of a factory whose model may be built on the meta device, and filled a stage at a time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Blocks in order. A block is called with what the block before it returned: a tensor, or a tuple of tensors."""

    name: str
    spec: str
    """Names the model, without a path where that is possible."""

    blocks: tuple[nn.Module, ...]
    block_names: tuple[str, ...]
    root: nn.Module
    """The module that names parameters and buffers: the Hugging Face model, or an nn.Sequential of the blocks."""

    tokens: TokenInputs | None = None
    """What a language model takes; None for other models."""

    batches: BatchForm | KeywordForm | None = None
    """What the model takes by name, if it does."""

    sharding: Sharding | None = None
    """How devices can share the blocks; None for a model that does not."""

    contents: Contents | Construction | None = None
    """What the blocks' tensors are filled from where they were built empty; None where all have contents."""

    uncut: bool = False

    left_out: tuple[str, ...] = ()
    """Sentences on what a config describes and the model has not, or not in full."""

    def cut(self, inputs: Sequence[Tensor], names: tuple[str, ...] = ()) -> "Chain":
        """The chain with a module of the user's own as blocks, found with inputs of these shapes, by name or position.

        Raises InvalidInputError for a module that cannot be cut.
        """
        blocks, block_names = cut(self.root, inputs, names)
        form = self.batches.fixed(names) if isinstance(self.batches, KeywordForm) else self.batches
        return replace(self, blocks=blocks, block_names=block_names, uncut=False, batches=form)

    def materialise(self, start: int = 0, stop: int | None = None) -> tuple[str, ...]:
        """Gives blocks [start, stop) their contents, on the CPU. Returns the names of tensors that files gave.

        Tensors with contents keep them. Parameters are new objects afterwards: callers must fetch them again.
        """
        return self.contents.materialise(self.blocks[start:stop]) if self.contents else ()

    def names(self) -> dict[Tensor, str]:
        """The name of every parameter and persistent buffer in the whole model; a shared one has its first name."""
        named = self.root.state_dict(keep_vars=True).items()
        return {tensor: name for name, tensor in reversed(list(named)) if isinstance(tensor, Tensor)}

    def weight_bytes(self) -> tuple[int, ...]:
        """Every block's bytes of parameters; one that several blocks share counts in the first."""
        return _own_bytes(block.parameters() for block in self.blocks)

    def frozen_bytes(self) -> tuple[int, ...]:
        """Of `weight_bytes`, those of parameters that are not trained."""
        return _own_bytes((p for p in block.parameters() if not p.requires_grad) for block in self.blocks)

    def buffer_bytes(self) -> tuple[int, ...]:
        """Every block's bytes of buffers, counted as `weight_bytes`."""
        return _own_bytes(block.buffers() for block in self.blocks)

    def tied_weights(self, *, trained: bool = True) -> tuple[TiedWeights, ...]:
        """The trained parameters, or the frozen ones, that several blocks share, those of the same blocks together."""
        users: dict[nn.Parameter, list[int]] = {}
        for number, block in enumerate(self.blocks):
            for parameter in block.parameters():
                if parameter.requires_grad is trained:
                    users.setdefault(parameter, []).append(number)
        sizes_bytes: dict[tuple[int, ...], int] = {}
        for parameter, blocks in users.items():
            if len(blocks) > 1:
                sizes_bytes[tuple(blocks)] = sizes_bytes.get(tuple(blocks), 0) + bytes_of(parameter)
        return tuple(
            TiedWeights(block=first, also=tuple(others), weight_bytes=size_bytes)
            for (first, *others), size_bytes in sorted(sizes_bytes.items())
        )


def _own_bytes(tensors_of_blocks: Iterable[Iterable[Tensor]]) -> tuple[int, ...]:
    """The bytes of every block's tensors; one that several blocks share counts in the first."""
    seen: set[Tensor] = set()
    sizes = []
    for tensors in tensors_of_blocks:
        own = set(tensors) - seen
        seen |= own
        sizes.append(sum(map(bytes_of, own)))
    return tuple(sizes)


def build_model(
    spec: str, *, seed: int, dtype: torch.dtype = torch.float32, empty: bool = False, fused: bool = False
) -> Chain:
    """The chain that a SPEC names, on the CPU. The same seed gives the same weights in every process.

    With `empty` a model of Hugging Face, a preset or a factory with an attribute `by_stage` has only shapes until its
    blocks are materialised; other models are as their factory returns them. With `fused` attention of a Hugging Face
    model is in one kernel, whatever its masks, for counting. The random states of torch, NumPy and
    Python are set from the seed while the model is built, and restored afterwards. Raises InvalidInputError if the
    SPEC, its options or what its factory returns break a rule.
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
            chain = _by_stages(parsed, seed, dtype) if by_stage else _from_factory(parsed, dtype)
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
    family = build_family(spec, fused=fused)
    _require_trainable(family.root)
    for parameter in family.root.parameters():
        cast_in_place(parameter, dtype)
    if dtype is torch.float64:  # rotary frequencies stay as they are; batch norm takes no statistics of fewer bits
        norms = (m for m in family.root.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        for buffer in (buffer for norm in norms for buffer in norm.buffers()):
            cast_in_place(buffer, dtype)
    return Chain(
        name=family.name,
        spec=family.spec,
        blocks=family.blocks,
        block_names=family.block_names,
        root=family.root,
        tokens=family.tokens,
        batches=family.batches,
        sharding=family.sharding,
        left_out=family.left_out,
        contents=Contents(
            root=family.root, seed=seed, dtype=dtype, files=family.files, constructors=Constructors(family.make, seed)
        ),
    )


def _by_stages(spec: Spec, seed: int, dtype: torch.dtype) -> Chain:
    """The chain of a factory's blocks, without contents."""
    recipe = WeightRecipe(seed)
    with recipe.noting():
        chain = _from_factory(spec, dtype)
    require_stages(chain.root)
    return replace(chain, contents=Construction(root=chain.root, recipe=recipe))


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
