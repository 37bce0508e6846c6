"""Layers: the blocks of a Hugging Face model that was cut (`cut`). They call the model's own modules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.errors import InvalidInputError


class Made(Enum):
    """An argument that a layer's block has or makes: the hidden tensor, positions, a causal mask, rotary embeddings."""

    HIDDEN = "hidden"
    POSITIONS = "positions"
    MASK = "mask"
    ROTARY = "rotary"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """How a module is called: constants, and `Made` arguments."""

    module: str
    positional: tuple[Any, ...]
    named: Mapping[str, Any]
    rotary: "LayerCall | None" = None

    def uses(self, made: Made) -> bool:
        """Whether this is among the arguments."""
        return any(value is made for value in (*self.positional, *self.named.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """The modules of a model by name. `plain_before` and `plain_after`: they are called in a row, and nothing else is.

    `inputs` are the name of the model's input and its shape without the first dimension; `hidden` dimensions follow it.
    """

    layers: tuple[LayerCall, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    plain_before: bool
    plain_after: bool
    inputs: tuple[str, tuple[int, ...]]

    def blocks(self, root: nn.Module) -> tuple[nn.Module, ...]:
        """The blocks of a model like the one that was watched."""
        first = _in_a_row(root, self.before) if self.plain_before else BeforeLayers(root, self)
        last = _in_a_row(root, self.after) if self.plain_after else AfterLayers(root, self)
        hows: list[LayerCall] = []
        for call in self.layers:  # layers that are called alike share the object: they are known to be equal by it
            how = replace(call, module="")
            hows.append(next((known for known in hows if known == how), how))
        layers = (Layer(root, call.module, how) for call, how in zip(self.layers, hows, strict=True))
        return (first, *layers, last)


class Layer(nn.Module):
    """One layer, which makes its other arguments itself."""

    def __init__(self, root: nn.Module, name: str, call: LayerCall) -> None:
        super().__init__()
        self.layer = root.get_submodule(name)
        self.rotary = root.get_submodule(call.rotary.module) if call.rotary else None
        self._call = call

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, S, ...) -> (B, S, ...)."""
        call, made = self._call, {Made.HIDDEN: hidden}
        if call.uses(Made.POSITIONS) or (call.rotary and call.rotary.uses(Made.POSITIONS)):
            made[Made.POSITIONS] = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        if call.uses(Made.MASK):
            made[Made.MASK] = causal_mask(hidden).expand(len(hidden), -1, -1, -1)  # some families look at its size
        if call.rotary and self.rotary is not None:
            made[Made.ROTARY] = _called(self.rotary, call.rotary, made)
        result = _called(self.layer, call, made)
        return tensor_of(result)


class BeforeLayers(nn.Module):
    """The part of a model before its first layer."""

    def __init__(self, root: nn.Module, cuts: Cuts) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(root.get_submodule, cuts.before))
        self._root = (root,)  # in a tuple it is no part of the block
        self._cuts = cuts

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's inputs -> (B, S, ...)."""
        root = self._root[0]
        first = self._cuts.layers[0]
        own = _shares(root, self._cuts.before, self.parts)
        reached: list[Tensor] = []

        def stop(*positional: Any, **named: Any) -> None:
            pairs = (
                *zip(first.positional, positional, strict=False),
                *((first.named.get(key), named[key]) for key in named),
            )
            reached.append(next(value for kind, value in pairs if kind is Made.HIDDEN))
            raise ReachedError

        def unused(*_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return inputs, inputs  # each layer's block makes its own, and this block may have no contents for them

        rotary = {call.rotary.module for call in self._cuts.layers if call.rotary}
        stand_ins: dict[nn.Module, Callable[..., Any]] = {root.get_submodule(first.module): stop}
        try:
            with replaced(own | stand_ins | {root.get_submodule(part): unused for part in rotary}):
                root(**{self._cuts.inputs[0]: inputs})
        except ReachedError:
            return reached[0]
        raise InvalidInputError("model", "must call its first layer in every forward", type(root).__name__)


class AfterLayers(nn.Module):
    """The part of a model after its last layer. Earlier parts are called, but do nothing."""

    def __init__(self, root: nn.Module, cuts: Cuts) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(root.get_submodule, cuts.after))
        self._root = (root,)
        self._cuts = cuts

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, S, ...) -> the model's outputs."""
        root, (name, shape) = self._root[0], self._cuts.inputs
        whole = name == "input_ids"
        size = hidden.shape[:2] if whole else (hidden.shape[0], *shape)
        inputs = torch.zeros(size, dtype=torch.int64 if whole else hidden.dtype, device=hidden.device)
        names = {call.module for call in self._cuts.layers} | set(self._cuts.before)
        own = _shares(root, self._cuts.after, self.parts)
        rotary = {call.rotary.module for call in self._cuts.layers if call.rotary}

        def passing(*_: Any, **__: Any) -> Tensor:
            return hidden

        def pair(*_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return hidden, hidden

        stand_ins: dict[nn.Module, Callable[..., Any]] = {root.get_submodule(part): passing for part in names}
        with replaced(own | stand_ins | {root.get_submodule(part): pair for part in rotary}):
            outputs: Tensor = root(**{name: inputs})[0]
        return outputs


class ReachedError(Exception):
    """A forward has reached its intended end."""


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """While it is active, these modules have other forwards."""
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.__dict__["forward"]


def _shares(root: nn.Module, names: Sequence[str], parts: nn.ModuleList) -> dict[nn.Module, Callable[..., Any]]:
    """The parts that stand in the places of the model's own modules, where they are a device's shares of them."""
    own = [root.get_submodule(name) for name in names]
    return {module: part for module, part in zip(own, parts, strict=True) if part is not module}


def causal_mask(hidden: Tensor) -> Tensor:
    """(1, 1, S, S): 0 where a position may look, the lowest number where not.

    It is a function of its own to free the temporary below before the layer runs.
    """
    length = hidden.shape[1]
    lowest = torch.finfo(hidden.dtype).min
    return torch.full((1, 1, length, length), lowest, dtype=hidden.dtype, device=hidden.device).triu(diagonal=1)


def _in_a_row(root: nn.Module, names: Sequence[str]) -> nn.Module:
    parts = [root.get_submodule(name) for name in names]
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)


def _called(module: nn.Module, call: LayerCall, made: Mapping[Made, Any]) -> Any:
    positional = (made[value] if isinstance(value, Made) else value for value in call.positional)
    named = {key: made[value] if isinstance(value, Made) else value for key, value in call.named.items()}
    return module(*positional, **named)


def tensor_of(output: Any) -> Tensor:
    """The hidden tensor that a layer gives."""
    found: Tensor = output[0] if isinstance(output, tuple | list) else output
    return found
