"""Blocks: a model as blocks that data passes through one after the other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from pipeplan.documents.tied import TiedWeights
from worker_agent.models.batches import BatchForm, TokenInputs
from worker_agent.models.keywords import KeywordForm
from worker_agent.models.materialise import Contents
from worker_agent.models.own import cut
from worker_agent.models.recipe import Construction
from worker_agent.models.sharding import Sharding
from worker_agent.models.values import bytes_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Blocks in order. A block is called with the previous block's result: a tensor, or a tuple of tensors.

    `spec` names the model, without a path where that is possible. `root` names parameters and buffers: the Hugging Face
    model, or an nn.Sequential of the blocks. `tokens` are a language model's inputs, `batches` a model's inputs by
    name. By `sharding` devices can share the blocks. The blocks' tensors are filled from `contents` where they were
    built empty. `uncut`: the only block is a module that is still to be cut. `left_out` are sentences on parts of
    a config that the model does not have, or not in full.
    """

    name: str
    spec: str
    blocks: tuple[nn.Module, ...]
    block_names: tuple[str, ...]
    root: nn.Module
    tokens: TokenInputs | None = None
    batches: BatchForm | KeywordForm | None = None
    sharding: Sharding | None = None
    contents: Contents | Construction | None = None
    uncut: bool = False
    left_out: tuple[str, ...] = ()

    def cut(self, inputs: Sequence[Tensor], names: tuple[str, ...] = ()) -> "Chain":
        """The chain with a module of the user's own as blocks, found with inputs of these shapes, by name or position.

        Raises InvalidInputError for a module that cannot be cut.
        """
        blocks, block_names = cut(self.root, inputs, names)
        form = replace(self.batches, names=names) if isinstance(self.batches, KeywordForm) else self.batches
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
