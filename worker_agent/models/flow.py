"""Flow: what goes from one part of a Hugging Face model to the next, found by watching one forward.

The forward is a row of calls of units: its layers, and the largest modules without one. Where it is cut, the results
of earlier calls that a later one uses are carried across, over any distance. Autograd says which these are: in the
watched forward every result is a leaf of the graph, and what a later call gets leads back to the leaves that it is
made of.

    calls     [embedding] [rotary] [layer 0] [layer 1] [norm] [head]
    parts     |-------------------||--------||--------||-----------|
    carried                embedding's   0's       1's

A part (`segments`) then runs the model's own forward with what was carried in the place of the earlier calls' results.
So masks, positions, biases and what else the model makes between its calls are made by the model itself, in every part.

A maker is a call whose result depends on no other call's, and that has no parameters, as that of rotary embeddings.
What it makes is not carried: it is called again where it is used.
"""

import re
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.errors import InvalidInputError, require
from worker_agent.models.draws import Draws
from worker_agent.models.equality import EqualCalls
from worker_agent.models.layers import replaced
from worker_agent.models.values import leaves_of

FACTORY = (
    "or be cut by a factory of your own: --model yours:blocks, where `def blocks()` in yours.py returns modules from "
    "tensors to tensors, as [First(model), *(Layer(part) for part in model.layers), Last(model)]"
)

Key = tuple[int, int]
"""A tensor that a call gave: the number of the call, and that of the tensor in its result."""

_SHAPES = re.compile(r"\b(sizes?|shapes?|dims?|dimensions?)\b")
"""The words of errors that a layer raises with contents as well."""

LAYER_DROPS = ("layerdrop", "decoder_layerdrop", "encoder_layerdrop")
"""The names, in modules and configs, of the probability to skip a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCall:
    """A recorded call of a unit: `result` has its tensors' shapes in their places."""

    module: str
    result: Any
    maker: bool
    uses: frozenset[Key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tensor of a watched result: its place, its shape there, and its type."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The calls of a forward with these inputs, and where parts begin: part i has the calls [starts[i], starts[i + 1]).

    `rows` are the names of the layers, a tuple for each row of them. `held` are tensors that modules around the layers
    use themselves, as (module, name), by the part that uses them; `result_uses` is what the result is made of.
    """

    calls: tuple[UnitCall, ...]
    starts: tuple[int, ...]
    rows: tuple[tuple[str, ...], ...]
    inputs: Mapping[str, tuple[int, ...]]
    held: tuple[frozenset[str], ...]
    result_uses: frozenset[Key]

    @property
    def stops(self) -> tuple[int, ...]:
        """The places where parts end."""
        return (*self.starts[1:], len(self.calls))

    def carried(self, start: int) -> tuple[Key, ...]:
        """The tensors that enter the part that begins with this call, in the order in which they were made."""
        later = self.result_uses.union(*(call.uses for call in self.calls[start:]))
        return tuple(sorted(key for key in later if key[0] < start and not self.calls[key[0]].maker))

    def shape_of(self, key: Key) -> tuple[int, ...]:
        """The shape that a tensor had in the watched forward."""
        shapes: dict[int, tuple[int, ...]] = {}
        mapped(self.calls[key[0]].result, lambda shape: shapes.update({shape.number: shape.shape}))
        return shapes[key[1]]

    def used(self, part: int) -> frozenset[Key]:
        """The tensors of which the calls of a part, or the result after the last of them, are made."""
        start, stop = self.starts[part], self.stops[part]
        own = frozenset[Key]().union(*(call.uses for call in self.calls[start:stop]))
        return own | self.result_uses if stop == len(self.calls) else own

    def made_again(self, part: int) -> frozenset[int]:
        """The makers that a part calls."""
        left = {call for call, _ in self.used(part) if self.calls[call].maker}
        found: set[int] = set()
        while left:
            found |= left
            left = {n for call in left for n, _ in self.calls[call].uses if self.calls[n].maker} - found
        return frozenset(found)

    def units(self, part: int) -> tuple[str, ...]:
        """The modules that a part calls, each once."""
        own = [n for n in range(self.starts[part], self.stops[part]) if not self.calls[n].maker]
        return tuple(dict.fromkeys(self.calls[n].module for n in sorted({*own, *self.made_again(part)})))


def rows_of(root: Any) -> tuple[tuple[str, ...], ...]:
    """The names of a model's layers, a tuple for each row: by `_no_split_modules`, else the outermost lists."""
    kinds = set(getattr(root, "_no_split_modules", None) or ())
    lists = {name: row for name, row in root.named_modules() if isinstance(row, nn.ModuleList) and len(row) > 0}

    def outermost(names: Sequence[str]) -> list[str]:
        return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]

    lists = {name: row for name, row in lists.items() if all(map(is_called, row))}
    by_kind = [name for name, row in lists.items() if {type(layer).__name__ for layer in row} <= kinds]
    names = outermost(by_kind) or outermost(list(lists))
    return tuple(tuple(f"{name}.{i}" for i in range(len(lists[name]))) for name in names)


def find_flow(root: Any, inputs: Mapping[str, Tensor]) -> Flow:
    """The flow through a model on the meta device, for inputs on the CPU.

    Raises InvalidInputError for a model that cannot be cut so, with the place and the reason.
    """
    rows = rows_of(root)
    place = type(root).__name__
    refuse_unless(len(rows) > 0, "have its layers in a ModuleList", place)
    layers = [name for row in rows for name in row]
    watch = _Watch(root, units_of(root, layers), frozenset(layers))
    result = watch.run(inputs)
    names = [call.module for call in watch.calls]
    at = [number for number, name in enumerate(names) if name in set(layers)]
    order = [names[number] for number in at]
    twice = next((name for name in layers if order.count(name) != 1), None)
    refuse_unless(twice is None, "call every layer once", str(twice))
    rows = tuple(sorted(rows, key=lambda row: order.index(row[0])))
    if order != [name for row in rows for name in row]:  # rows take turns: they are one, without norms and the like
        at = [n for n in at if any(p.dim() > 1 for p in root.get_submodule(names[n]).parameters())]
        refuse_unless(len(at) > 0, "have layers with weights", place)
        rows = (tuple(names[n] for n in at),)

    starts = [0] if at[0] > 0 else []
    position = 0
    for row in rows:
        numbers = at[position : position + len(row)]
        position += len(row)
        starts += numbers
        if numbers[-1] + 1 < len(names):
            starts.append(numbers[-1] + 1)
    starts = sorted(set(starts))
    result_uses, held_by_result = watch.made_of(result, "its result")
    flow = Flow(
        calls=tuple(watch.calls),
        starts=tuple(starts),
        rows=rows,
        inputs={name: tuple(tensor.shape) for name, tensor in inputs.items()},
        held=watch.held_by_part(tuple(starts), held_by_result),
        result_uses=result_uses,
    )
    for start in flow.starts[1:]:
        refuse_unless(bool(flow.carried(start)), "hand a tensor from layer to layer", names[start])
    watch.require_same_in_parts(flow)
    return flow


class _Watch:
    """One forward, whose units run on the meta device."""

    def __init__(self, root: Any, units: Mapping[str, nn.Module], layers: frozenset[str]) -> None:
        self.calls: list[UnitCall] = []
        self._root = root
        self._units = units
        self._layers = layers
        self._leaves: dict[int, Key] = {}
        self._kept: list[Tensor] = []  # the leaves are known by their ids
        self._held: dict[int, str] = {}
        self._held_by_call: list[frozenset[str]] = []
        self._whole_numbers: set[str] = set()
        self._results: list[tuple[Key, Tensor, int]] = []  # with their versions
        self._draws = Draws()
        self._drawn: dict[int, set[int]] = {}  # of every draw: the calls that use it
        self._failed: tuple[str, Exception] | None = None
        self._equal = EqualCalls()

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The model's result."""
        forwards = {module: self._forward(name, module) for name, module in self._units.items()}
        try:
            with torch.enable_grad(), self._own_tensors(), replaced(forwards), self._draws:
                found: Any = self._root(**inputs)
                result: Tensor = tensor_in(found)
        except InvalidInputError:
            raise
        except Exception as error:  # the library's code may raise anything
            after = f"after {self.calls[-1].module if self.calls else 'its start'}"
            where, cause = (f"in {self._failed[0]}", self._failed[1]) if self._failed else (after, error)
            reason = f"run without weights, and fails {where} ({type(cause).__name__}: {cause})"
            raise InvalidInputError("model", f"must {reason}, {FACTORY}", type(self._root).__name__) from error
        return result

    def made_of(self, value: Any, place: str) -> tuple[frozenset[Key], frozenset[str]]:
        """The calls' results that tensors are made of, and the tensors that modules around the layers hold."""
        found: set[int] = set()
        for tensor in tensors_in(value):
            leaves = leaves_of([tensor])
            hidden = tensor.is_floating_point() and not leaves and bool(tensor.isnan().any())
            refuse_unless(not hidden, "use what its modules give in ways that autograd follows", place)
            found |= {id(leaf) for leaf in leaves} or {id(tensor)}
        for draw in found & self._draws.leaves.keys():
            self._drawn.setdefault(draw, set()).add(len(self.calls))
        keys = frozenset(self._leaves[leaf] for leaf in found if leaf in self._leaves)
        return keys, frozenset(self._held[leaf] for leaf in found if leaf in self._held)

    def held_by_part(self, starts: tuple[int, ...], last: frozenset[str]) -> tuple[frozenset[str], ...]:
        """Which tensors of the modules around the layers each part uses."""
        stops = (*starts[1:], len(self.calls))
        followed = [frozenset[str]().union(*self._held_by_call[a:b]) for a, b in zip(starts, stops, strict=True)]
        parts = [part | self._whole_numbers for part in followed]
        return (*parts[:-1], parts[-1] | last)

    def require_same_in_parts(self, flow: Flow) -> None:
        """Raises InvalidInputError where parts, which all run what is between the calls, would not do the same."""
        calls = len(flow.calls)
        for users in self._drawn.values():
            parts = {bisect(flow.starts, min(user, calls - 1)) for user in users}
            place = flow.calls[min(users)].module if min(users) < calls else "its result"
            refuse_unless(len(parts) == 1, "use what it draws at random between its modules in one block", place)
        for key, result, version in self._results:
            users = {n for n, call in enumerate(flow.calls) if key in call.uses}
            users |= {calls - 1} if key in flow.result_uses else set()
            parts = {bisect(flow.starts, n) for n in (key[0], *users)}
            same = result._version == version or len(parts) == 1
            refuse_unless(same, "not change in place what crosses a cut", flow.calls[key[0]].module)

    @contextmanager
    def _own_tensors(self) -> Iterator[None]:
        """While it is active, tensors of the modules around the units are on the CPU, and leaves."""
        inside = {part for unit in self._units.values() for part in unit.modules()}
        with ExitStack() as stack:
            for prefix, module in self._root.named_modules():
                for held in (module._parameters, module._buffers) if module not in inside else ():
                    for name, tensor in held.items():
                        if tensor is None or not tensor.is_meta:
                            continue
                        leaf: Tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
                        leaf = nn.Parameter(leaf, requires_grad=leaf.is_floating_point())
                        self._held[id(leaf)] = prefix
                        if not leaf.is_floating_point():  # autograd does not follow it: any part may use it
                            self._whole_numbers.add(prefix)
                        stack.callback(held.__setitem__, name, tensor)
                        held[name] = leaf
            yield

    def _forward(self, name: str, module: nn.Module) -> Callable[..., Any]:
        own = module.forward

        def forward(*positional: Any, **named: Any) -> Any:
            given = (positional, named)
            uses, held = self.made_of(given, name)
            stand_in = module.__dict__.pop("forward")
            try:
                on_meta = mapped(given, _to_meta)

                def run() -> tuple[Any, Sequence[object]]:
                    """What the unit gives, and the random operations that it does."""
                    with self._draws.aside() as drawn:
                        return own(*on_meta[0], **on_meta[1]), drawn

                found, drawn = self._equal.result(module, on_meta, run)
            except Exception as error:  # the library's code may raise anything
                self._failed = self._failed or (name, error)
                if name not in self._layers or _SHAPES.search(str(error)):
                    raise  # any other error of a layer may be for want of contents: its result is still known
                found = _to_meta(next(t for t in tensors_in(given) if t.is_floating_point()))
            finally:
                module.__dict__["forward"] = stand_in
            given_gradient = any(t.requires_grad for t in tensors_in(found))
            maker = not given_gradient and not drawn and next(module.parameters(), None) is None
            number = len(self.calls)

            def leaf(tensor: Tensor) -> Tensor:
                value = 0.0 if maker or not tensor.is_floating_point() else torch.nan
                made = torch.full(tensor.shape, value, dtype=tensor.dtype)
                key = (number, len(shapes))
                self._leaves[id(made)] = key
                shapes.append(Shape(number=len(shapes), shape=tuple(tensor.shape), dtype=tensor.dtype))
                self._kept.append(made)
                if made.is_floating_point():  # the model may change a result in place, but not a leaf
                    made = made.requires_grad_().clone()
                if not maker:
                    self._results.append((key, made, made._version))
                return made

            shapes: list[Shape] = []
            output = mapped(found, leaf)
            shape = iter(shapes)
            result = mapped(found, lambda _: next(shape))
            self.calls.append(UnitCall(module=name, result=result, maker=maker, uses=uses))
            self._held_by_call.append(held)
            return output

        return forward


def units_of(root: nn.Module, layers: Sequence[str]) -> dict[str, nn.Module]:
    """The layers and the largest modules that hold none of them, by name; a module with several names has its first."""
    found: dict[nn.Module, str] = {}

    def visit(prefix: str, module: nn.Module) -> None:
        for key, part in module.named_children():
            name = f"{prefix}{key}"
            if is_called(part) and not any(layer.startswith(f"{name}.") for layer in layers):
                found.setdefault(part, name)
            else:
                visit(f"{name}.", part)

    visit("", root)
    return {name: module for module, name in found.items()}


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward; a ModuleList or ModuleDict has none: the model calls its parts."""
    return getattr(type(module), "forward", None) is not nn.Module.forward


def tensor_in(found: Any) -> Tensor:
    """The first tensor of a model's result: its logits."""
    value: Tensor = found if isinstance(found, Tensor) else found[0]
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value whose tensors, or the shapes in their places, are changed, also inside tuples, lists and mappings."""
    if isinstance(value, Tensor | Shape):
        return change(value)
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(mapped(part, change) for part in value)
    if isinstance(value, dict):  # the library's results are dictionaries too, which take their items by name
        items = {key: mapped(part, change) for key, part in value.items()}
        return items if type(value) is dict else type(value)(**items)
    return value


def refuse_unless(condition: bool, rule: str, place: str) -> None:
    """Raises InvalidInputError with the place, and with what to write instead."""
    require(condition, "model", f"must {rule}, {FACTORY}", place)


def _to_meta(tensor: Tensor) -> Tensor:
    made = tensor.detach().to("meta")
    return made.requires_grad_().clone() if made.is_floating_point() else made  # a leaf may not change in place
