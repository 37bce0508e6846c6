"""Sharded: one device's work in every kind of block of a model, in every form, on tensors without contents.

The blocks are given the shapes of one device's share (worker_agent.models.sharding) and run as counts.count_blocks runs
whole ones, with a GPU's kernels. Equal blocks are one kind. In the form of one device the counts are those of
count_blocks.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from pipeplan.documents.forms import Form
from pipeplan.errors import require, require_count, require_unique
from worker_agent.models.chain import Chain
from worker_agent.models.data import default_feed, in_blocks
from worker_agent.models.equality import signature
from worker_agent.models.losses import Loss, default_loss
from worker_agent.models.parallel import BalancedExperts, Region, VocabularyLoss
from worker_agent.models.sharding import module_styles, require_possible, shard
from worker_agent.models.values import first_trained
from worker_agent.profiler.counts import BlockCounts, BlockRun, build_shapes, recorded_region
from worker_agent.profiler.operations import foreign_code
from worker_agent.profiler.peers import RecordedPeers
from worker_agent.profiler.scaled import Counted, laid_out, layout_of, scaled, scaled_between

ATTENTION = ("flash", "unfused")
"""Attention in one kernel, as torch prefers it, or in four, as Megatron-LM had it in 2021."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCounts:
    """Equal blocks: the name of the first, one device's share of it, and its counts by microbatch size.

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
    """A language model whose parameters have shapes alone, and the mode in which its blocks run.

    `alike[i]` is the first block that is equal to block i. `later_names[i]` are block i's parameters that an earlier
    block has. `known` caches blocks' counts by what they depend on and by the degree of their experts.
    """

    chain: Chain
    mode: AbstractContextManager[object]
    dtype: torch.dtype
    styles: Mapping[nn.Module, str]
    alike: tuple[int, ...]
    later_names: tuple[frozenset[str], ...]
    known: dict[Hashable, dict[int, Counted]] = field(default_factory=dict)


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
    floating = getattr(torch, dtype)
    with local_default(floating):
        chain, mode = build_shapes(spec, floating, gpu=True, fused=True)
    require(chain.tokens is not None, "model", "must be a language model to be shared among devices", spec)
    if chain.uncut:
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
        mode=mode,
        dtype=floating,
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
    fusion: str = "none",
    loss: Loss = default_loss,
) -> FormCounts:
    """One device's counts in this form, with the `fusion` of all blocks, of the last one with its loss, or of none.

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
    with model.mode:
        config = getattr(model.chain.root, "config", None)
        groups = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
        region = recorded_region(form, groups=groups)
        shares = {number: shard(model.chain.blocks[number], model.styles, region) for number in set(model.alike)}
        walk = _Walk(
            model=model,
            shares=shares,
            region=region,
            unfused=attention == "unfused",
            fusion=fusion,
            loss=loss,
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
                by_size={size: counted[kind][0] for size, (counted, _) in found.items()},
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
    fusion: str
    loss: Loss

    def at(self, sizes: Sequence[int], length: int) -> dict[int, tuple[tuple[Counted, ...], tuple[int, ...]]]:
        """Every kind and the kind of every block, by size. Kinds are `scaled` to sizes between, where they can be."""
        found = {size: self.count(size, length) for size in (*sizes[:2], *sizes[2:][-1:])}
        kinds = min(len(each) for each, _ in found.values())
        counted = [sorted(found)] * kinds
        for size in sizes:
            if size not in found:
                lines = [
                    scaled([(each, found[each][0][kind]) for each in own[-3:]], size)
                    for kind, own in enumerate(counted)
                ]
                found[size] = self.count(size, length, lines)
                counted = [
                    sorted({*own, size}) if line is None else own for own, line in zip(counted, lines, strict=True)
                ]
        return found

    def count(
        self, microbatch_size: int, length: int, lines: Sequence[Counted | None] = ()
    ) -> tuple[tuple[Counted, ...], tuple[int, ...]]:
        """Every kind in the order in which they come, and the kind of every block. Kinds on `lines` are not counted."""
        require_count("microbatch_size", microbatch_size)
        tokens = torch.empty((microbatch_size, length), dtype=torch.int64)
        known, kinds = self.model.known, dict[Hashable, int]()
        found: list[Counted] = []
        graded = first_trained(self.model.chain.blocks)
        values: tuple[Tensor, ...] = (tokens,)
        numbers = []
        for number, alike in enumerate(self.model.alike):
            shapes = tuple((tuple(t.shape), t.dtype) for t in values)
            mixed = any(isinstance(part, BalancedExperts) for part in self.shares[alike].modules())
            degree, form = self.region.form.expert if mixed else 1, replace(self.region.form, expert=1)
            form = form if mixed else replace(form, expert_tensor=None)  # the inputs of a block's counts
            key = (alike, number > graded, shapes, (form, self.unfused, self.fusion, self.loss))
            if key not in kinds:
                line = lines[len(found)] if len(found) < len(lines) else None
                own = known.setdefault(key, {})
                if line is None and degree not in own:
                    end = tokens if number == len(self.model.alike) - 1 else None
                    experts = self.model.chain.sharding.experts if self.model.chain.sharding else 1
                    traded = {experts // each: counted for each, counted in own.items() if each > 1}
                    between = scaled_between(traded, experts // degree)
                    own[degree] = between or self._run(number, values, graded=number > graded, end=end)
                kinds[key] = len(found)
                found.append(line or own[degree])
            numbers.append(kinds[key])
            values = tuple(map(laid_out, found[kinds[key]][1]))
        return tuple(found), tuple(numbers)

    def _run(self, number: int, values: tuple[Tensor, ...], *, graded: bool, end: Tensor | None) -> Counted:
        """The counts of a block; the last one's loss is that of the tokens at its `end`."""
        block = self.shares[self.model.alike[number]]
        loss = self.loss if self.region.form.tensor == 1 else VocabularyLoss(self.region)
        run = BlockRun(
            block=block,
            inputs=values,
            graded=graded,
            end=None if end is None else (loss, (end,)),
            gpu=True,
            region=self.region,
            unfused=self.unfused,
            fused=self.fusion == "all" or (self.fusion == "loss" and end is not None),
        )
        rule = f"must have blocks that run on tensors without contents to be estimated; block {number} does not"
        with foreign_code("model", rule, type(block).__name__):
            counts, outputs = run.count()
        weights = (p for part in block.modules() if isinstance(part, BalancedExperts) for p in part.parameters())
        matrices = tuple(tuple(weight.shape) for weight in weights if weight.dim() == 3)
        return replace(counts, expert_matrices=matrices), tuple(map(layout_of, outputs))
