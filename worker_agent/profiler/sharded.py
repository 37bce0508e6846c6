"""Sharded: one device's work in every kind of block of a model, in every form, on tensors without contents.

The blocks are given the shapes of one device's share (worker_agent.models.sharding) and run as counts.count_blocks runs
whole ones, with a GPU's kernels. Equal blocks are one kind. In the form of one device the counts are those of
count_blocks.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeplan.documents.forms import Form
from pipeplan.errors import require, require_count, require_unique
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.data import default_feed, in_blocks
from worker_agent.models.losses import Loss, default_loss
from worker_agent.models.parallel import BalancedExperts, Region, VocabularyLoss
from worker_agent.models.sharding import module_styles, require_possible, shard
from worker_agent.models.values import first_trained
from worker_agent.profiler.counts import BlockCounts, BlockRun, recorded_region, signature
from worker_agent.profiler.operations import foreign_code
from worker_agent.profiler.peers import RecordedPeers
from worker_agent.profiler.scaled import scaled

ATTENTION = ("flash", "unfused")
"""Attention in one kernel, as torch prefers it, or in four, as Megatron-LM had it in 2021."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCounts:
    """Blocks that do the same: the name of the first, what one device holds, and its counts by microbatch size.

    A parameter that several blocks share counts in the first of them. `tied_parameters` are an earlier block's. Of each
    of the three, the `frozen` ones are not trained.
    """

    name: str
    parameters: int
    expert_parameters: int
    tied_parameters: int
    frozen_parameters: int
    frozen_expert_parameters: int
    frozen_tied_parameters: int
    by_size: dict[int, BlockCounts]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormCounts:
    """A model in one form: its kinds of blocks, and by `blocks` the kind of each block in the order of the data."""

    form: Form
    kinds: tuple[KindCounts, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedModel:
    """A language model whose parameters have shapes alone, and the mode in which it was built.

    `alike[i]` is the first block that is equal to block i. `later_names[i]` are block i's parameters that a block
    before it has.
    """

    chain: Chain
    fake: FakeTensorMode
    dtype: torch.dtype
    styles: Mapping[nn.Module, str]
    alike: tuple[int, ...]
    later_names: tuple[frozenset[str], ...]


@contextmanager
def local_default(dtype: torch.dtype) -> Iterator[None]:
    """Has tensors that name no type made in this one: buffers, as the library loads models."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def shape_model(spec: str, dtype: str) -> ShapedModel:
    """The model that a SPEC names. Raises InvalidInputError for one that is not possible, or no language model."""
    fake = FakeTensorMode()
    rule = "must be a model that can be built of tensors without contents to be estimated"
    with foreign_code("model", rule, spec), fake, local_default(getattr(torch, dtype)):
        chain = build_model(spec, seed=0, dtype=getattr(torch, dtype), fused=True)
    require(chain.tokens is not None, "model", "must be a language model to be shared among devices", spec)
    if chain.uncut:
        floating = getattr(torch, dtype)
        chain = in_blocks(chain, default_feed(chain).data, microbatch_size=1, seed=0, dtype=floating)
    last = len(chain.blocks) - 1
    firsts: dict[Hashable, int] = {}
    alike = tuple(
        firsts.setdefault((signature(block), number in (0, last) and number), number)
        for number, block in enumerate(chain.blocks)
    )
    seen: set[nn.Parameter] = set()
    later_names = []
    for block in chain.blocks:
        later_names.append(frozenset(name for name, parameter in block.named_parameters() if parameter in seen))
        seen |= set(block.parameters())
    return ShapedModel(
        chain=chain,
        fake=fake,
        dtype=getattr(torch, dtype),
        styles=module_styles(chain.sharding, chain.root),
        alike=alike,
        later_names=tuple(later_names),
    )


def count_form(
    model: ShapedModel,
    form: Form,
    *,
    microbatch_sizes: Sequence[int],
    sequence_length: int,
    attention: str = "flash",
    fused: bool = False,
    loss: Loss = default_loss,
) -> FormCounts:
    """What one device does in this form; `fused`, in the kernels of `fusion`.

    Raises InvalidInputError for a degree that does not divide what it shares, a model without a sharding plan, a loss
    of one's own with tensor parallelism, or a block that needs its tensors' contents.
    """
    require_count("sequence_length", sequence_length)
    require(len(microbatch_sizes) > 0, "microbatch_sizes", "must hold at least one size", microbatch_sizes)
    require_unique("microbatch_sizes", "must not hold a size twice", microbatch_sizes)
    require(attention in ATTENTION, "attention", f"must be one of {', '.join(ATTENTION)}", attention)
    require_possible(model.chain.sharding, form, name=model.chain.name, sequence_length=sequence_length)
    own = loss is not default_loss and form.tensor > 1
    require(not own, "loss", "must be cross entropy where the vocabulary is shared", getattr(loss, "__name__", loss))
    with model.fake:
        region = recorded_region(form)
        shares = {number: shard(model.chain.blocks[number], model.styles, region) for number in set(model.alike)}
        walk = _Walk(
            model=model,
            shares=shares,
            region=region,
            unfused=attention == "unfused",
            fused=fused,
            loss=loss if form.tensor == 1 else VocabularyLoss(region),
        )
        found = walk.at(sorted(microbatch_sizes), sequence_length // form.context)
    numbers = next(blocks for _, blocks in found.values())
    kinds = [numbers.index(kind) for kind in range(max(numbers) + 1)]
    held = [_parameters(shares[model.alike[number]], model.later_names[number]) for number in kinds]
    return FormCounts(
        form=form,
        kinds=tuple(
            KindCounts(
                name=model.chain.block_names[number],
                **held[kind],
                by_size={size: counts[kind] for size, (counts, _) in found.items()},
            )
            for kind, number in enumerate(kinds)
        ),
        blocks=numbers,
    )


def _parameters(block: nn.Module, later_names: frozenset[str]) -> dict[str, int]:
    """By field of `KindCounts`, the parameters that are no expert's and no earlier block's, those of the experts, and
    an earlier block's; of each also the frozen ones.
    """
    experts = {p for part in block.modules() if isinstance(part, BalancedExperts) for p in part.parameters()}
    tied = {p for name, p in block.named_parameters() if name in later_names}
    others = set(block.parameters()) - experts - tied
    groups = {"parameters": others, "expert_parameters": experts, "tied_parameters": tied}
    every = {name: sum(p.numel() for p in group) for name, group in groups.items()}
    frozen = {name: sum(p.numel() for p in group if not p.requires_grad) for name, group in groups.items()}
    return every | {f"frozen_{name}": count for name, count in frozen.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """The pass of a microbatch through the chain: equal blocks with equal inputs run once."""

    model: ShapedModel
    shares: Mapping[int, nn.Module]
    region: Region[RecordedPeers]
    unfused: bool
    fused: bool
    loss: Loss

    def at(self, sizes: Sequence[int], length: int) -> dict[int, tuple[tuple[BlockCounts, ...], tuple[int, ...]]]:
        """The counts of every kind and the kind of every block, by size: of sizes between counted ones `scaled`."""
        found = {size: self.count(size, length) for size in (*sizes[:2], *sizes[2:][-1:])}
        counted = sorted(found)
        for size in sizes:
            if size not in found:
                between = scaled([(each, found[each][0]) for each in counted[-3:]], size)
                found[size] = self.count(size, length) if between is None else (between, found[sizes[0]][1])
                counted = sorted({*counted, size}) if between is None else counted
        return found

    def count(self, microbatch_size: int, length: int) -> tuple[tuple[BlockCounts, ...], tuple[int, ...]]:
        """The counts of every kind in the order in which they come, and the kind of every block."""
        require_count("microbatch_size", microbatch_size)
        tokens = torch.empty((microbatch_size, length), dtype=torch.int64)
        known: dict[Hashable, tuple[int, tuple[Tensor, ...]]] = {}
        first = first_trained(self.model.chain.blocks)
        values: tuple[Tensor, ...] = (tokens,)
        found: list[BlockCounts] = []
        numbers = []
        for number, alike in enumerate(self.model.alike):
            key = (alike, number > first, tuple((tuple(t.shape), t.dtype) for t in values))
            if key not in known:
                block = self.shares[alike]
                run = BlockRun(
                    block=block,
                    inputs=values,
                    graded=number > first,
                    end=(self.loss, (tokens,)) if number == len(self.model.alike) - 1 else None,
                    gpu=True,
                    region=self.region,
                    unfused=self.unfused,
                    fused=self.fused,
                )
                rule = f"must have blocks that run on tensors without contents to be estimated; block {number} does not"
                with foreign_code("model", rule, type(block).__name__):
                    counts, outputs = run.count()
                known[key] = len(found), outputs
                found.append(counts)
            kind, values = known[key]
            numbers.append(kind)
        return tuple(found), tuple(numbers)
