"""Sharding: how tensor-parallel devices share a model's modules, and the modules of one device.

Hugging Face's models get their plan from their modules (`tensor_plan`), others from an attribute `sharding` of their
blocks. It gives modules a style, by name (`Sharding`).

Modules without a style are whole on every device. With context parallelism devices meet in torch's
scaled_dot_product_attention: a model in which other modules see the whole sequence has no context degree.
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
from worker_agent.models.layers import causal_mask
from worker_agent.models.parallel import (
    BalancedExperts,
    ColumnShare,
    Peers,
    Region,
    RoutedExperts,
    RowEmbedding,
    RowShare,
    ShareOfPositions,
    WholePositions,
    gated,
)

EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
"""The weights of experts: two of these, the last one included."""

_COLUMNS = ("colwise", "packed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A plan: styles by names of modules, in which * is a number, and sizes that the tensor degree must divide.

        colwise          a share of the output features of a linear layer, or of a depthwise convolution; `packed 3`: of
                         three equal layers in one weight; `packed 4+2+2`: of layers with 4, 2 and 2 features
        rowwise          a share of its input features; `reduced`: its output is whole on every device, and stays there
        vocabulary       a share of the rows of an embedding or of an output layer; for an indivisible vocabulary it is
                         rounded up, as Megatron-LM pads it
        positions        an embedding of positions: whole, for the share of the sequence
        rotary           a rotary embedding: for the whole sequence
        divided NAMES    a module whose attributes NAMES count shared features, or are parameters of shared features;
                         `config` is a config that counts heads
        experts          experts as weights of three dimensions, EXPERTS: a share of them, and of the features of each;
                         every expert gets equally many tokens
        routed           experts with their router, whose experts would compute all tokens: they get the chosen ones

    `experts` are those of a layer; 0 in a model without. `unknown` is a large layer that the plan does not share: the
    model then has no tensor degree. `sequential` is a module other than torch's attention that sees the whole sequence:
    the model then has no context degree.
    """

    styles: Mapping[str, str]
    divided: Mapping[str, int]
    experts: int = 0
    unknown: str | None = None
    sequential: str | None = None


class BareLinear(nn.Linear):
    """A linear layer that leaves its bias to its caller, who adds it in one kernel with the next operation."""

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
    sequential = next((plan.sequential for plan in plans.values() if plan.sequential), None)
    return Sharding(styles=styles, divided=divided, experts=experts, sequential=sequential) if plans else None


def require_possible(sharding: Sharding | None, form: Form, *, name: str, sequence_length: int) -> None:
    """Raises InvalidInputError for a form that the model or the sequence cannot have, by the degree."""
    experts = 0 if sharding is None else sharding.experts
    rule = f"must divide the {experts} experts of a layer" if experts else "must be 1 for a model without experts"
    require((experts or 1) % form.expert == 0, "expert", rule, form.expert)
    rule = "must be left out for a model without experts"
    require(experts > 0 or form.expert_tensor is None, "expert_tensor", rule, form.expert_tensor)
    rule = "is needed for a model with experts and tensor parallelism"
    require(form.tensor == 1 or form.sequence_parallel or not experts, "sequence_parallel", rule, False)
    whole = sharding is not None and not {"experts", "routed"} & set(sharding.styles.values())
    rule = f"needs a sharding plan, and none is known for {sharding.unknown if sharding else ''} of {name}"
    require(form.expert == 1 or not whole, "expert", rule, form.expert)
    if form.devices == 1:
        return
    field = "tensor" if form.tensor > 1 else "context"
    rule = f"needs a sharding plan, which {name} does not bring for these options"
    if sharding is None:
        raise InvalidInputError(field, rule, getattr(form, field))
    rule = f"needs a sharding plan, and none is known for {sharding.unknown} of {name}"
    require(form.tensor == 1 or sharding.unknown is None, "tensor", rule, form.tensor)
    rule = f"must be 1: {sharding.sequential} of {name} sees the whole sequence, and has no shared form here"
    require(form.context == 1 or sharding.sequential is None, "context", rule, form.context)
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
    numbered = re.compile(r"(?<![^.])\d+(?![^.])")
    named = ((module, {name, numbered.sub("*", name)}) for name, module in root.named_modules())
    found = ((module, next((name for name in names if name in sharding.styles), None)) for module, names in named)
    return {module: sharding.styles[name] for module, name in found if name is not None}


def shard(
    block: nn.Module, styles: Mapping[nn.Module, str], region: Region[Peers], *, entered: bool = False
) -> nn.Module:
    """A block of the shares that the region's device holds. Parameters that are not shared are the block's own.

    The first argument of a module that holds column-parallel layers enters with the call of the module. Raises
    InvalidInputError for a style that does not fit its module, or a degree that does not divide it.
    """
    if region.form.tensor == 1:
        styles = {part: style for part, style in styles.items() if style in ("experts", "routed")}
        if not styles.keys() & set(block.modules()):
            return block
    style, _, detail = styles.get(block, "").partition(" ")
    if style == "experts":
        return _experts(block, region.of_experts)
    if isinstance(block, nn.Linear) or type(block).__name__ == "Conv1D":  # Hugging Face's GPT-2: a transposed weight
        return _linear(block, style, detail, region, entered=entered) if style else block
    if (style and isinstance(block, nn.Conv1d | nn.Embedding)) or style == "rotary":
        return _alone(block, style, detail, region)
    clone = copy.copy(block)
    enters = not entered and any(styles.get(child, "").partition(" ")[0] in _COLUMNS for child in block.children())
    clone._modules = {
        name: child and shard(child, styles, region, entered=entered or enters)
        for name, child in block._modules.items()
    }
    if style == "routed":
        return RoutedExperts(clone)
    if style:
        _divide(clone, style, detail.split(), region)
    if enters:
        clone._forward_pre_hooks = OrderedDict(block._forward_pre_hooks)
        clone._forward_pre_hooks_with_kwargs = OrderedDict(block._forward_pre_hooks_with_kwargs)
        clone.register_forward_pre_hook(partial(_enter_first, region), with_kwargs=True)
    return clone


def _divide(clone: Any, style: str, names: Sequence[str], region: Region[Peers]) -> None:
    """Gives a module the device's share of the features that its attributes count, or of the parameters they are."""
    clone._parameters = dict(clone._parameters)
    for name in names or ("",):
        value: Any = getattr(clone, name, None)
        fits = (style == "divided" and isinstance(value, int | nn.Parameter)) or name == "config"
        require(fits, "model.sharding", f"must name a style that fits {type(clone).__name__}", f"{style} {name}")
        if isinstance(value, nn.Parameter):  # one value a head, with any further dimensions of 1
            heads = next((dim for dim, size in enumerate(value.shape) if size > 1), 0)
            clone._parameters[name] = _share(value, heads, "1", region)
        elif name == "config":
            clone.config = copy.copy(value)
            for key in ("num_attention_heads", "num_key_value_heads"):
                setattr(clone.config, key, getattr(value, key) // region.form.tensor)
        else:
            setattr(clone, name, value // region.form.tensor)


def _alone(block: Any, style: str, detail: str, region: Region[Peers]) -> nn.Module:
    """The share of a module without parts: an embedding, or a depthwise convolution."""
    if style == "rotary":
        return WholePositions(block, region)
    if isinstance(block, nn.Embedding) and style == "positions":
        return ShareOfPositions(block.weight, region)  # type: ignore[arg-type]
    if isinstance(block, nn.Embedding) and style == "vocabulary":
        weight: Any = block.weight
        return RowEmbedding(_padded_share(weight, region), region, scale=getattr(block, "embed_scale", None))
    fits = isinstance(block, nn.Conv1d) and block.groups == block.out_channels and style == "packed"
    require(fits, "model.sharding", f"must name a style that fits {type(block).__name__}", style)
    clone = copy.copy(block)
    clone._parameters = {
        key: None if whole is None else _share(whole, 0, detail, region) for key, whole in block._parameters.items()
    }
    clone.groups = clone.in_channels = clone.out_channels = len(clone.weight)
    return clone  # type: ignore[no-any-return]


def experts_of(layer: Any) -> dict[str, nn.Parameter]:
    """The weights of experts by EXPERTS; DBRX's are rows of three matrices."""
    rows = [getattr(getattr(layer, "mlp", None), key, None) for key in ("w1", "v1", "w2")]
    if all(isinstance(each, nn.Parameter) and each.dim() == 2 for each in rows):
        gate, up, down = (each.detach().view(layer.num_experts, -1, each.shape[1]) for each in rows)  # type: ignore[union-attr]
        trained = rows[0].requires_grad  # type: ignore[union-attr]
        weights = {"gate_up_proj": torch.cat((gate, up), 1), "down_proj": down.transpose(1, 2).contiguous()}
        return {key: nn.Parameter(weight, requires_grad=trained) for key, weight in weights.items()}
    return {key: weight for key in EXPERTS if isinstance(weight := getattr(layer, key, None), nn.Parameter)}


def _experts(layer: Any, region: Region[Peers]) -> nn.Module:
    """The first of the devices' experts: all get equally many tokens."""
    held = experts_of(layer)
    known = len(held) == 2 and "down_proj" in held and all(weight.dim() == 3 for weight in held.values())
    require(known, "model.sharding", f"must name a style that fits {type(layer).__name__}", "experts")
    up = next(key for key in held if key != "down_proj")
    transposed = held[up].shape[1] == held["down_proj"].shape[2] and held[up].shape[1] != held["down_proj"].shape[1]
    transposed = bool(getattr(layer, "is_transposed", transposed))
    halves = "2" if up == "gate_up_proj" and getattr(layer, "is_concatenated", True) else "1"
    held |= {k: b for k in (f"{up}_bias", "down_proj_bias") if isinstance(b := getattr(layer, k, None), nn.Parameter)}
    first = {
        key: nn.Parameter(weight.detach()[: len(weight) // region.form.expert].clone()) for key, weight in held.items()
    }
    shared = {
        up: (2 if transposed else 1, halves),
        f"{up}_bias": (1, halves),
        "down_proj": (1 if transposed else 2, "1"),
    }
    shares = {key: _share(first[key], *shared[key], region) if key in shared else first[key] for key in first}
    gate = getattr(layer, "_apply_gate", None) if up == "gate_up_proj" else layer.act_fn
    gate = gate or partial(gated, layer.act_fn if hasattr(layer, "act_fn") else layer.mlp.activation_fn)
    return BalancedExperts(shares, gate, region, transposed=transposed)


def _enter_first(
    region: Region[Peers], module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, of which the first has entered: Hugging Face's attention gets it by name.

    Positions and a mask that the module gets are those of the whole sequence.
    """
    if args:
        return (region.enter(args[0]), *args[1:]), options
    name = next(key for key, value in options.items() if isinstance(value, Tensor) and value.is_floating_point())
    entered = region.enter(options[name])
    made = {key: region.positions(options[key]) for key in ("position_ids",) if options.get(key) is not None}
    mask = options.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 4:
        made["attention_mask"] = causal_mask(entered).expand(len(entered), -1, -1, -1)
    return args, options | made | {name: entered}


def _linear(layer: Any, style: str, parts: str, region: Region[Peers], *, entered: bool) -> nn.Module:
    weight, bias = layer.weight, layer.bias
    adds_bias = not isinstance(layer, BareLinear)
    if not isinstance(layer, nn.Linear):
        weight = nn.Parameter(weight.detach().t().contiguous(), requires_grad=weight.requires_grad)
    if style in ("rowwise", "reduced"):
        return RowShare(_share(weight, 1, "1", region), bias, region, adds_bias=adds_bias, stays=style == "reduced")
    vocabulary = style == "vocabulary"
    require(
        vocabulary or style in _COLUMNS, "model.sharding", f"must name a style that fits {type(layer).__name__}", style
    )
    share = (
        partial(_padded_share, region=region)
        if vocabulary
        else partial(_share, dim=0, parts=parts or "1", region=region)
    )
    weight, bias = share(weight), None if bias is None else share(bias)
    enters = vocabulary or not entered
    return ColumnShare(weight, bias, region, adds_bias=adds_bias, enters=enters)


def _share(whole: nn.Parameter, dim: int, parts: str, region: Region[Peers]) -> nn.Parameter:
    """The device's share of each part of a dimension. `parts`: the number of equal parts, or their sizes as 4+2+2."""
    features = whole.shape[dim]
    given = [int(part) for part in parts.split("+")]
    sizes = given if len(given) > 1 else [features // given[0]] * given[0]
    fits = sum(sizes) == features and all(size % region.form.tensor == 0 for size in sizes)
    require(fits, "tensor", f"must divide the {' + '.join(map(str, sizes))} features of a layer", region.form.tensor)
    shares = [part.chunk(region.form.tensor, dim)[region.rank] for part in torch.split(whole.detach(), sizes, dim)]
    return nn.Parameter(torch.cat(shares, dim), requires_grad=whole.requires_grad)


def _padded_share(whole: nn.Parameter, region: Region[Peers]) -> nn.Parameter:
    """The device's share of the rows, rounded up; rows that do not exist are zero."""
    rows = -(-len(whole) // region.form.tensor)
    missing = rows * region.form.tensor - len(whole)
    padded = functional.pad(whole.detach(), (*(0, 0) * (whole.dim() - 1), 0, missing))
    return nn.Parameter(padded[region.rank * rows :][:rows].clone(), requires_grad=whole.requires_grad)
