"""Sharding: how a model's modules are shared out among tensor-parallel devices, and the modules that one device holds.

A model brings its plan: Hugging Face's models in their config, others in an attribute `sharding` of their blocks. It
gives modules a style, by name:

    colwise          a share of a linear layer's output features; `packed 3` of three layers' features in one weight
    rowwise          a share of its input features
    vocabulary       a share of the rows of an embedding or of an output layer; of a vocabulary that is not divisible it
                     is rounded up, as Megatron-LM pads it
    positions        an embedding of positions: whole, asked for the share of the sequence
    rotary           a rotary embedding: asked for the whole sequence
    divided NAME     a module whose attribute NAME counts features that are shared
    experts          experts as weights of three dimensions, gate_up_proj and down_proj: a share of them, and of the
                     features of each; in any form as many tokens for every expert

Modules without a style are whole on every device. A plan is for models whose attention is torch's
scaled_dot_product_attention alone: with context parallelism that is where the devices meet.
"""

import copy
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.documents.forms import Form
from pipeplan.errors import InvalidInputError, require
from worker_agent.models.parallel import (
    BalancedExperts,
    ColumnShare,
    Peers,
    Region,
    RowEmbedding,
    RowShare,
    ShareOfPositions,
    WholePositions,
)

NOT_SHARED = frozenset({"replicated_with_grad_allreduce"})
"""Styles of Hugging Face's plans that leave a module whole."""

_COLUMNS = ("colwise", "packed")

_SAME = {"colwise_gather_output": "vocabulary", "embedding_rowwise": "vocabulary", "moe_tp_experts": "experts"}
"""Styles of Hugging Face's plans that have another name here. Megatron-LM does not gather the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A plan: styles by names of modules, in which * is a number, and what the tensor degree must divide, by name.

    `experts` are those of a layer; 0 in a model without.
    """

    styles: Mapping[str, str]
    divided: Mapping[str, int]
    experts: int = 0


class BareLinear(nn.Linear):
    """A linear layer that leaves its bias to its caller, who adds it in one kernel with what comes next."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        return functional.linear(input, self.weight)


def joined(blocks: Sequence[nn.Module]) -> Sharding | None:
    """The plan that blocks bring together, of names in the sequence of them; None if none brings one."""
    plans: dict[int, Sharding] = {}
    for number, block in enumerate(blocks):
        plan: Any = getattr(block, "sharding", None)
        require(plan is None or isinstance(plan, Sharding), "model.sharding", "must be a Sharding", plan)
        plans |= {} if plan is None else {number: plan}
    styles = {f"{number}.{name}": style for number, plan in plans.items() for name, style in plan.styles.items()}
    divided = {name: count for plan in plans.values() for name, count in plan.divided.items()}
    experts = max((plan.experts for plan in plans.values()), default=0)
    return Sharding(styles=styles, divided=divided, experts=experts) if plans else None


def require_possible(sharding: Sharding | None, form: Form, *, name: str, sequence_length: int) -> None:
    """Raises InvalidInputError for a form that the model or the sequence cannot have, by the degree."""
    experts = 0 if sharding is None else sharding.experts
    rule = f"must divide the {experts} experts of a layer" if experts else "must be 1 for a model without experts"
    require((experts or 1) % form.expert == 0, "expert", rule, form.expert)
    rule = "is needed for a model with experts and tensor parallelism"
    require(form.tensor == 1 or form.sequence_parallel or not experts, "sequence_parallel", rule, False)
    if form.devices == 1:
        return
    field = "tensor" if form.tensor > 1 else "context"
    rule = f"needs a sharding plan, which {name} does not bring for these options"
    if sharding is None:
        raise InvalidInputError(field, rule, getattr(form, field))
    for what, count in sharding.divided.items():
        require(count % form.tensor == 0, "tensor", f"must divide {what}, which is {count}", form.tensor)
    rule = f"must divide the {sequence_length} tokens of a sequence"
    require(sequence_length % form.context == 0, "context", rule, form.context)
    if form.sequence_parallel:
        share = sequence_length // form.context
        rule = f"must divide the {share} tokens that a device has of a sequence, for sequence parallelism"
        require(share % form.tensor == 0, "tensor", rule, form.tensor)


def module_styles(sharding: Sharding | None, root: nn.Module) -> dict[nn.Module, str]:
    """The style of every module that has one. `root` gives the modules their names.

    Raises InvalidInputError for a style that is not known, or that does not fit a module.
    """
    if sharding is None:
        return {}
    styles = {}
    for pattern, style in sharding.styles.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name, module in root.named_modules():
            if expression.fullmatch(name) and style not in NOT_SHARED:
                styles[module] = _SAME.get(style, style)
    return styles


def shard(
    block: nn.Module, styles: Mapping[nn.Module, str], region: Region[Peers], *, entered: bool = False
) -> nn.Module:
    """A block of the shares that the region's device holds. Parameters that are not shared are the block's own.

    The first argument of a module that holds column-parallel layers enters with the call of the module. Raises
    InvalidInputError for a style that does not fit its module, or a degree that does not divide it.
    """
    if region.form.tensor == 1:
        styles = {part: style for part, style in styles.items() if style == "experts"}
        if not styles.keys() & set(block.modules()):
            return block
    style, _, detail = styles.get(block, "").partition(" ")
    if style == "experts":
        return _experts(block, region)
    if isinstance(block, nn.Linear) or type(block).__name__ == "Conv1D":  # Hugging Face's GPT-2: a transposed weight
        return _linear(block, style, int(detail or 1), region, entered=entered) if style else block
    if isinstance(block, nn.Embedding) and style:
        weight: Any = block.weight
        require(style in ("vocabulary", "positions"), "model.sharding", "must name a style that fits Embedding", style)
        rows = style == "vocabulary"
        return RowEmbedding(_padded_share(weight, region), region) if rows else ShareOfPositions(weight, region)
    if style == "rotary":
        return WholePositions(block, region)
    clone = copy.copy(block)
    enters = any(styles.get(child, "").partition(" ")[0] in _COLUMNS for child in block.children())
    clone._modules = {
        name: child and shard(child, styles, region, entered=enters) for name, child in block._modules.items()
    }
    if style:
        fits = style == "divided" and isinstance(getattr(block, detail, None), int)
        require(fits, "model.sharding", f"must name a style that fits {type(block).__name__}", f"{style} {detail}")
        setattr(clone, detail, getattr(block, detail) // region.form.tensor)
    if enters:
        clone._forward_pre_hooks = OrderedDict(block._forward_pre_hooks)
        clone._forward_pre_hooks_with_kwargs = OrderedDict(block._forward_pre_hooks_with_kwargs)
        clone.register_forward_pre_hook(partial(_enter_first, region), with_kwargs=True)
    return clone


def _experts(layer: Any, region: Region[Peers]) -> nn.Module:
    """The first of the devices' experts: all have as many tokens."""
    weights: list[Any] = [getattr(layer, name, None) for name in ("gate_up_proj", "down_proj")]
    known = all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)
    require(known, "model.sharding", f"must name a style that fits {type(layer).__name__}", "experts")
    first = [nn.Parameter(weight.detach()[: len(weight) // region.form.expert].clone()) for weight in weights]
    gate_up, down = _share(first[0], 1, 2, region), _share(first[1], 2, 1, region)
    return BalancedExperts(gate_up, down, layer.act_fn, region)


def _enter_first(
    region: Region[Peers], module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, of which the first has entered: Hugging Face's attention gets it by name."""
    if args:
        return (region.enter(args[0]), *args[1:]), options
    name = next(iter(options))
    return args, options | {name: region.enter(options[name])}


def _linear(layer: Any, style: str, parts: int, region: Region[Peers], *, entered: bool) -> nn.Module:
    weight, bias = layer.weight, layer.bias
    adds_bias = not isinstance(layer, BareLinear)
    if not isinstance(layer, nn.Linear):
        weight = nn.Parameter(weight.detach().t().contiguous(), requires_grad=weight.requires_grad)
    if style == "rowwise":
        return RowShare(_share(weight, 1, 1, region), bias, region, adds_bias=adds_bias)
    vocabulary = style == "vocabulary"
    require(
        vocabulary or style in _COLUMNS, "model.sharding", f"must name a style that fits {type(layer).__name__}", style
    )
    share = partial(_padded_share, region=region) if vocabulary else partial(_share, dim=0, parts=parts, region=region)
    weight, bias = share(weight), None if bias is None else share(bias)
    enters = vocabulary or not entered
    return ColumnShare(weight, bias, region, adds_bias=adds_bias, enters=enters)


def _share(whole: nn.Parameter, dim: int, parts: int, region: Region[Peers]) -> nn.Parameter:
    """The device's share of each part of a dimension."""
    features = whole.shape[dim] // parts
    fits = whole.shape[dim] % parts == 0 and features % region.form.tensor == 0
    require(fits, "tensor", f"must divide the {features} features of a layer", region.form.tensor)
    shares = [part.chunk(region.form.tensor, dim)[region.rank] for part in whole.detach().chunk(parts, dim)]
    return nn.Parameter(torch.cat(shares, dim), requires_grad=whole.requires_grad)


def _padded_share(whole: nn.Parameter, region: Region[Peers]) -> nn.Parameter:
    """The device's share of the rows, rounded up; rows that do not exist are zero."""
    rows = -(-len(whole) // region.form.tensor)
    missing = rows * region.form.tensor - len(whole)
    padded = functional.pad(whole.detach(), (*(0, 0) * (whole.dim() - 1), 0, missing))
    return nn.Parameter(padded[region.rank * rows :][:rows].clone(), requires_grad=whole.requires_grad)
