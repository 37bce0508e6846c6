"""Cut: a Hugging Face model as blocks in a row, found by watching one forward, whatever its family.

The model names the classes of its layers (`_no_split_modules`). A forward without weights shows with which arguments
the model calls each layer, and what it does before the first and after the last:

    tokens -> [before] -> hidden -> [layer 0] -> hidden -> ... -> [layer n - 1] -> hidden -> [after] -> logits

Where modules in a row are all that is before or after, they are the block. Elsewhere the block is `BeforeLayers` or
`AfterLayers`, which run the model's own forward as far as the first layer, or from the last one on. A layer's block
makes the other arguments anew: positions, a causal mask, rotary embeddings. So nothing but `hidden` crosses a cut.

While the forward is watched, modules run on the meta device: what the model computes beside them, such as positions
and masks, has its values. What a module gives is NaN up to the last layer, and zeros from there on: NaN in what comes
after shows that more than the last layer's result is used.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.errors import InvalidInputError, require
from worker_agent.models.equality import EqualCalls
from worker_agent.models.flow import FACTORY, is_called
from worker_agent.models.layers import Cuts, LayerCall, Made, causal_mask, replaced, tensor_of

_MADE = "have arguments that its layers' blocks can make"


@dataclass(frozen=True, slots=True)
class _Seen:
    """A recorded call of a module."""

    module: str
    positional: tuple[Any, ...]
    named: Mapping[str, Any]
    output: Any


def find_cuts(root: Any, inputs: Mapping[str, Tensor]) -> Cuts:
    """Where a model on the meta device can be cut, found with these inputs (one tensor, on the CPU).

    Raises InvalidInputError where it cannot be, with the place and the reason.
    """
    kinds = set(root._no_split_modules or ())
    lists = {name: row for name, row in root.named_modules() if isinstance(row, nn.ModuleList) and len(row) > 0}
    rows = [name for name, row in lists.items() if {type(layer).__name__ for layer in row} <= kinds]
    rows = rows or [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    what = f"have its layers in one ModuleList of {', '.join(sorted(kinds)) or 'layers'}, and has {len(rows)}"
    _require(len(rows) == 1, what, type(root).__name__)
    names = [f"{rows[0]}.{i}" for i in range(len(lists[rows[0]]))]
    equal = EqualCalls()
    seen, result = _watched(root, names, inputs, equal)
    at = [number for number, call in enumerate(seen) if call.module in names]
    _require([seen[n].module for n in at] == names, "call its layers one after the other, each once", names[0])
    _require(at == [*range(at[0], at[0] + len(at))], "call nothing between its layers", seen[at[0] + 1].module)

    rule = "have layers that give a tensor, or a tensor first"
    _require(all(isinstance(tensor_of(seen[n].output), Tensor) for n in at), rule, names[0])
    plain = _plain(root, seen[at[-1] + 1 :], tensor_of(seen[at[-1]].output), result)
    later = [value for call in seen[at[-1] + 1 :] for value in (*call.positional, *call.named.values())]
    alone = not any(t.isnan().any() for t in (*later, result) if isinstance(t, Tensor) and t.is_floating_point())
    _require(plain or alone, "use nothing but the last layer's result after it", type(root).__name__)
    one = all(isinstance(seen[n].output, Tensor) for n in at)
    _require(plain or one, "have layers that give one tensor each", type(root).__name__)
    for key in ("layerdrop", "decoder_layerdrop", "encoder_layerdrop"):
        _require(not getattr(root.config, key, 0), f"have no {key}, which skips layers", type(root).__name__)

    layers: list[LayerCall] = []
    hidden = _first_tensor(seen[at[0]])
    before = seen[: at[0]]
    for number in at:
        layers.append(_understood(seen[number], hidden, before, root.get_submodule(seen[number].module), equal))
        hidden = tensor_of(seen[number].output)
    rotary = {call.rotary.module for call in layers if call.rotary}
    own = [call for call in before if call.module not in rotary]
    after = seen[at[-1] + 1 :]
    again = next((call.module for call in after if call.module in {earlier.module for earlier in own}), None)
    _require(plain or again is None, "call other modules after its layers than before them", str(again))
    (name, given), first = next(iter(inputs.items())), _first_tensor(seen[at[0]])
    return Cuts(
        layers=tuple(layers),
        before=tuple(dict.fromkeys(call.module for call in own)),
        after=tuple(dict.fromkeys(call.module for call in after)),
        plain_before=_plain(root, own, given, first),
        plain_after=plain,
        inputs=(name, tuple(given.shape[1:])),
    )


def _watched(
    root: Any, layers: Sequence[str], inputs: Mapping[str, Tensor], equal: EqualCalls
) -> tuple[list[_Seen], Tensor]:
    """The calls of the layers, and of the largest modules that have none of them, in one forward; and its result."""
    seen: list[_Seen] = []

    def watch(name: str, module: nn.Module) -> Callable[..., Any]:
        own = module.forward

        def forward(*positional: Any, **named: Any) -> Any:
            given = _mapped((positional, named), _to_meta)
            stand_in = module.__dict__.pop("forward")
            try:
                output = equal.result(module, given, lambda: own(*given[0], **given[1]))
            except Exception:  # the library's code may raise anything; a layer's result is still known
                if name not in layers:
                    raise
                output = _first_tensor(_Seen(name, positional, named, None)).to("meta")
            finally:
                module.__dict__["forward"] = stand_in
            ended = name == layers[-1] or any(call.module == layers[-1] for call in seen)
            output = _mapped(output, partial(_filled, value=0.0 if ended else torch.nan))
            seen.append(_Seen(name, positional, named, output))
            return output

        return forward

    def largest(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for key, part in module.named_children():
            name = f"{prefix}{key}"
            if is_called(part) and not any(layer.startswith(f"{name}.") for layer in layers):
                yield name, part
            else:
                yield from largest(f"{name}.", part)

    found = dict(largest("", root))
    try:
        with torch.no_grad(), replaced({part: watch(name, part) for name, part in found.items()}):
            result: Tensor = root(**inputs)[0]
    except InvalidInputError:
        raise
    except Exception as error:  # the library's code may raise anything
        last = seen[-1].module if seen else "its start"
        reason = f"run without weights, and fails after {last} ({type(error).__name__}: {error})"
        raise InvalidInputError("model", f"must {reason}, {FACTORY}", type(root).__name__) from error
    return seen, result


def _understood(seen: _Seen, hidden: Tensor, before: Sequence[_Seen], layer: nn.Module, equal: EqualCalls) -> LayerCall:
    """A layer's call, with what its block makes in the place of tensors.

    Positions that a layer only hands on, and does without, are for other ways to compute attention.
    """
    takes = inspect.signature(layer.forward).parameters
    rotary = None
    named: dict[str, Any] = {}
    for key, value in seen.named.items():
        several = isinstance(value, tuple) and all(isinstance(part, Tensor) for part in value) and value
        if several or (isinstance(value, Tensor) and value.is_complex()):
            first = value[0] if several else value
            sources = [
                call for call in before if first is (call.output[0] if isinstance(call.output, tuple) else call.output)
            ]
            _require(bool(sources), f"{_MADE}, and {key} is not one", seen.module)
            source = sources[0]
            rotary = LayerCall(
                module=source.module,
                positional=tuple(
                    _argument(v, _like(v, hidden), source.module, "an argument") for v in source.positional
                ),
                named={k: _argument(v, _like(v, hidden), source.module, k) for k, v in source.named.items()},
            )
            named[key] = Made.ROTARY
        else:
            named[key] = _argument(value, hidden, seen.module, key)
    positional = tuple(_argument(value, hidden, seen.module, "an argument") for value in seen.positional)
    call = LayerCall(module=seen.module, positional=positional, named=named, rotary=rotary)
    _require(call.uses(Made.HIDDEN), "hand the hidden tensor from layer to layer", seen.module)
    handed_on = {key for key, made in named.items() if made is Made.POSITIONS and (rotary or key not in takes)}
    kept = {key: made for key, made in named.items() if key not in handed_on}
    if handed_on:
        given = _mapped((seen.positional, {key: seen.named[key] for key in kept}), _to_meta)
        try:  # without contents
            with torch.no_grad():
                equal.result(layer, given, lambda: layer(*given[0], **given[1]))
        except Exception:  # the library's code may raise anything: the layer needs what it hands on
            kept = named
    return LayerCall(module=seen.module, positional=positional, named=kept, rotary=rotary)


def _like(value: Any, hidden: Tensor) -> Tensor:
    """The hidden tensor of an earlier place: rotary embeddings look at its type alone."""
    same = isinstance(value, Tensor) and value.is_floating_point() and value.shape == hidden.shape
    return value if same else hidden


def _argument(value: Any, hidden: Tensor, module: str, key: str) -> Any:
    """The representation of an argument. Raises InvalidInputError for a tensor that a block cannot make."""
    if not isinstance(value, Tensor):
        return value
    if _same(value, hidden):
        return Made.HIDDEN
    length = hidden.shape[1] if hidden.dim() > 1 else 0
    if value.dtype == torch.int64 and value.shape[-1:] == (length,):
        positions = torch.arange(length).expand(value.shape)
        if torch.equal(value, positions):
            return Made.POSITIONS
    if value.is_floating_point() and value.shape[-2:] == (length, length):
        mask = causal_mask(hidden)
        if torch.equal(value, mask.expand(value.shape)):
            return Made.MASK
    _require(False, f"{_MADE}, and {key}, a tensor of shape {tuple(value.shape)}, is not one", module)
    return None


def _plain(root: nn.Module, calls: Sequence[_Seen], value: Tensor, result: Tensor) -> bool:
    """Whether calls are of modules in a row, from a value to a result, each with the tensor before it alone."""
    for call in calls:
        parameters = inspect.signature(root.get_submodule(call.module).forward).parameters
        arguments = dict(zip(parameters, call.positional, strict=False)) | dict(call.named)
        given = arguments.pop(next(iter(parameters)), None)
        usual = (v is None or (key in parameters and v is parameters[key].default) for key, v in arguments.items())
        passes = isinstance(given, Tensor) and _same(given, value) and isinstance(call.output, Tensor)
        if not (passes and all(usual)):
            return False
        value = call.output
    return _same(value, result)


def _require(condition: bool, rule: str, place: str) -> None:
    """Raises InvalidInputError with the place, and with what to write instead."""
    require(condition, "model", f"must {rule}, {FACTORY}", place)


def _first_tensor(call: _Seen) -> Tensor:
    for value in (*call.positional, *call.named.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise InvalidInputError("model", f"must hand a tensor from layer to layer, {FACTORY}", call.module)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same memory: a view of a whole tensor is the tensor."""
    return (one.shape, one.stride(), one.data_ptr()) == (other.shape, other.stride(), other.data_ptr())


def _to_meta(value: Tensor) -> Tensor:
    return value.to("meta")


def _filled(tensor: Tensor, value: float) -> Tensor:
    """A tensor on the CPU for one on the meta device; whole numbers are zeros."""
    return torch.full_like(tensor, value if tensor.is_floating_point() else 0, device="cpu")


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A value with its tensors changed, in tuples, lists and mappings as well."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_mapped(part, change) for part in value)
    if isinstance(value, list | dict) and type(value) in (list, dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        changed = {key: _mapped(part, change) for key, part in items}
        return changed if isinstance(value, dict) else list(changed.values())
    return value
