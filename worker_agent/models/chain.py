"""Chain: a model as the blocks that data passes one after the other."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner_service.core.errors import require
from worker_agent.models.hugging_face import TokenInputs, build_family
from worker_agent.models.spec import Spec, call_factory, parse_spec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Blocks in order. A block is called with the tensors that the block before returned: one, or a tuple of several.

    `root` is the module that names parameters and buffers: the Hugging Face model, or an nn.Sequential of the blocks.
    `tokens` says what a language model takes, None for other models.
    """

    name: str
    spec: str
    blocks: tuple[nn.Module, ...]
    block_names: tuple[str, ...]
    root: nn.Module
    tokens: TokenInputs | None = None

    def names(self) -> dict[Tensor, str]:
        """Every parameter's and persistent buffer's name in the whole model; a shared one has its first name."""
        named = self.root.state_dict(keep_vars=True).items()
        return {tensor: name for name, tensor in reversed(list(named)) if isinstance(tensor, Tensor)}

    def weight_bytes(self) -> tuple[int, ...]:
        """Every block's bytes of parameters; one that several blocks share counts in the first."""
        seen: set[nn.Parameter] = set()
        sizes = []
        for block in self.blocks:
            own = set(block.parameters()) - seen
            seen |= own
            sizes.append(sum(parameter.nbytes for parameter in own))
        return tuple(sizes)


def build_model(spec: str, *, seed: int, dtype: torch.dtype = torch.float32) -> Chain:
    """The chain that a SPEC names, on the CPU; the same weights from the same seed, in every process.

    torch's random state is set from the seed while the model is built, and is afterwards as it was before. Raises
    InvalidInputError if the SPEC, its options or what its factory returns break a rule.
    """
    parsed = parse_spec(spec, field="model")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _from_family(parsed, dtype) if parsed.is_hugging_face else _from_factory(parsed, dtype)


def _from_family(spec: Spec, dtype: torch.dtype) -> Chain:
    family = build_family(spec)
    _cast(family.root.parameters(), dtype)
    return Chain(
        name=family.name,
        spec=spec.text,
        blocks=family.blocks,
        block_names=family.block_names,
        root=family.root,
        tokens=family.tokens,
    )


def _from_factory(spec: Spec, dtype: torch.dtype) -> Chain:
    blocks = _checked_blocks(call_factory(spec, field="model"), spec)
    root = nn.Sequential(*blocks)
    _cast((*root.parameters(), *root.buffers()), dtype)
    names = tuple(f"{index}.{_kind(block)}" for index, block in enumerate(blocks))
    return Chain(name=spec.name, spec=spec.text, blocks=blocks, block_names=names, root=root)


def _cast(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Gives floating-point tensors their type. They stay the same objects: fake ones cannot be replaced in a module."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def _checked_blocks(returned: Any, spec: Spec) -> tuple[nn.Module, ...]:
    rule = f"must be a factory that returns a list of modules, but {spec.target} did not"
    require(isinstance(returned, Iterable), "model", rule, returned)
    blocks = tuple(returned)
    for block in blocks:
        require(isinstance(block, nn.Module), "model", rule, block)
    require(len(blocks) > 0, "model", f"must have at least one block, but {spec.target} returned none", blocks)
    require(len(set(blocks)) == len(blocks), "model", "must not hold the same module as two blocks", spec.target)
    return blocks


def _kind(block: nn.Module) -> str:
    """What a block is, for people: its class, or its first part's where it is only a container."""
    parts = list(block.children())
    return _kind(parts[0]) if isinstance(block, nn.Sequential) and parts else type(block).__name__.lower()
