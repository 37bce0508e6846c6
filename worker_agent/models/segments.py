"""Segments: the blocks of a Hugging Face model that run a part of the model's own forward (`flow`).

Between blocks go (carried ..., given ...): what earlier calls gave and later ones use, then the model's inputs, in the
order of its `BatchForm`. An input that a batch does not have is an empty tensor. So a mask reaches every layer, and
each makes of it what the model makes of it.

A block that has a `quick` way takes it where nothing but one tensor comes: tokens without a mask are the usual case.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from pipeplan.errors import InvalidInputError, require
from worker_agent.models.batches import BatchForm
from worker_agent.models.flow import Flow, Key, Shape, find_flow, mapped, refuse_unless, tensor_in, tensors_in, units_of
from worker_agent.models.layers import ReachedError, replaced

Inputs = dict[str, Tensor]


@dataclass(slots=True, eq=False)
class Flows:
    """A model's flows, by the inputs that a batch has: each is found when it is first needed.

    `make` builds the model on the meta device. `numbers` says which part a block is, `drops` how probable it is that a
    layer is skipped in training.
    """

    root: Any
    make: Callable[[], Any]
    form: BatchForm
    probes: Mapping[str, Tensor]
    drops: Mapping[str, float] = field(default_factory=dict)
    numbers: dict[nn.Module, int] = field(default_factory=dict)
    _found: dict[frozenset[str], Flow] = field(default_factory=dict)

    def of(self, names: frozenset[str]) -> Flow:
        """The flow of batches with these inputs. Raises InvalidInputError if its parts are not the blocks."""
        if names not in self._found:
            # it is found amid a run, in whose modes and random numbers nothing shifts
            with unset_fake_temporarily(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
                empty = all(tensor.is_meta for tensor in self.root.parameters())
                model = self.root if empty else self.make()
                flow = find_flow(model, {name: self.probes[name] for name in self.form.inputs if name in names})
            self._found[names] = flow
            for block, number in self.numbers.items():
                own = set(block.modules())
                for unit in flow.units(number):
                    there = self.root.get_submodule(unit) in own
                    given = ", ".join(sorted(names))
                    refuse_unless(there, f"call the same modules in each part for batches of {given}", unit)
        return self._found[names]


class Holder(nn.Module):
    """Tensors that a module around the layers holds itself: the same dictionaries, but none of its parts."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters = module._parameters
        self._buffers = module._buffers


class Segment(nn.Module):
    """A block: consecutive calls of a model's units.

    `quick` does the same for one tensor, and returns only one tensor. `crossing` are the shapes of what is carried in
    and out, in order: parts that carry other things are not alike.
    """

    def __init__(self, flows: Flows, flow: Flow, number: int, quick: nn.Module | None) -> None:
        super().__init__()
        self.quick = quick
        there = set() if quick is None else set(quick.modules())
        units = [flows.root.get_submodule(name) for name in flow.units(number)]
        self.parts = nn.ModuleList(unit for unit in units if unit not in there)
        self.held = nn.ModuleList(Holder(flows.root.get_submodule(name)) for name in sorted(flow.held[number]))
        self.crossing = tuple(
            tuple(map(flow.shape_of, flow.carried(place))) for place in (flow.starts[number], flow.stops[number])
        )
        self._flows = flows
        self._place = number, tuple(self.parts)  # a device's share of the block has other parts in their places
        flows.numbers[self] = number

    def forward(self, *values: Tensor) -> Any:
        """(carried ..., given ...) -> the same for the next block, or the model's result."""
        if self.quick is not None and len(values) == 1:
            return self.quick(values[0])
        flows, (number, units) = self._flows, self._place
        values = flows.form.completed(values) if number == 0 else values
        given = values[len(values) - len(flows.form.inputs) :]
        inputs = {name: value for name, value in zip(flows.form.inputs, given, strict=True) if value.numel()}
        flow = flows.of(frozenset(inputs))
        start = flow.starts[number]
        keys = flow.carried(start)
        carried = dict(zip(keys, values[: len(keys)], strict=True))
        shares = dict(zip(units, self.parts, strict=False))
        forward = PartialForward(flows, flow, number, carried, inputs, shares)
        result = forward.run()
        if number == len(flow.starts) - 1:
            return result
        return (*(forward.carried[key] for key in flow.carried(flow.stops[number])), *given)


class PartialForward:
    """One forward of a model, of which only one part's calls compute.

    `carried` are the results that are known, by their keys; those of the part's own calls are added. `shares` compute
    in the place of the model's modules.
    """

    def __init__(
        self,
        flows: Flows,
        flow: Flow,
        number: int,
        carried: dict[Key, Tensor],
        inputs: Inputs,
        shares: Mapping[nn.Module, nn.Module],
    ) -> None:
        self.carried = carried
        self._shares = shares
        self._flows = flows
        self._flow = flow
        self._start, self._stop = flow.starts[number], flow.stops[number]
        self._made_again = flow.made_again(number)
        self._inputs = inputs
        self._at = 0
        self._sizes = {
            probe: size
            for name, value in inputs.items()
            for probe, size in zip(flow.inputs[name], value.shape, strict=True)
        }
        floating = [tensor for tensor in carried.values() if tensor.is_floating_point()]
        self._like = floating[0] if floating else next(iter(inputs.values()))

    def run(self) -> Tensor | None:
        """The model's result, or None where the part is not the last one."""
        root, flow = self._flows.root, self._flow
        modules = {root.get_submodule(call.module): call.module for call in flow.calls}
        try:
            with replaced({module: partial(self._call, module, name) for module, name in modules.items()}):
                result = tensor_in(root(**self._inputs))
        except ReachedError:
            return None
        self._require(self._at == len(flow.calls), "its end")
        return result

    def _call(self, module: nn.Module, name: str, *positional: Any, **named: Any) -> Any:
        number = self._at
        if number == self._stop:
            raise ReachedError
        self._require(number < len(self._flow.calls) and self._flow.calls[number].module == name, name)
        self._at += 1
        call = self._flow.calls[number]
        if number not in self._made_again and (number < self._start or call.maker):
            return mapped(call.result, partial(self._stand_in, number))
        rule = "must hold the tensors that it uses beside its modules in parameters and buffers"
        there = self._like.is_meta or not any(t.is_meta for t in tensors_in((positional, named)))
        require(there, "model", rule, name)
        drop = self._flows.drops.get(name, 0.0) if module.training else 0.0
        if drop and float(torch.rand((), device=self._like.device)) < drop:
            passed = next(t for t in tensors_in((positional, named)) if t.is_floating_point())
            found = mapped(call.result, lambda shape: passed if shape.number == 0 else self._empty(shape))
        else:
            stand_in = module.__dict__.pop("forward")
            try:
                found = self._shares.get(module, module).forward(*positional, **named)
            finally:
                module.__dict__["forward"] = stand_in
        if not call.maker:
            self.carried |= {(number, i): tensor for i, tensor in enumerate(tensors_in(found))}
        return found

    def _stand_in(self, call: int, shape: Shape) -> Tensor:
        known = self.carried.get((call, shape.number))
        return self._empty(shape) if known is None else known

    def _empty(self, shape: Shape) -> Tensor:
        """Zeros in the place of a result that no later call of the part uses."""
        sizes = [self._sizes.get(size, size) for size in shape.shape]
        like = self._like
        own = shape.dtype.is_floating_point and like.is_floating_point()
        return torch.zeros(sizes, dtype=like.dtype if own else shape.dtype, device=like.device)

    def _require(self, same: bool, place: str) -> None:
        rule = "must call its modules in the same order in every forward"
        if not same:
            raise InvalidInputError("model", rule, place)


def segments(flows: Flows, quick: Sequence[nn.Module] | None) -> tuple[nn.Module, ...]:
    """The blocks of a model, those with a quick way as well; they are found with the inputs that every batch has.

    Modules that the forward does not call are the last block's, and are not trained.
    """
    flow = flows.of(frozenset(flows.form.required))
    parts = range(len(flow.starts))
    if quick is not None and len(quick) != len(parts):  # it counts other modules as layers
        quick = None
    blocks = tuple(Segment(flows, flow, number, quick[number] if quick else None) for number in parts)
    owned = {tensor for block in blocks for tensor in (*block.parameters(), *block.buffers())}
    for name, unit in units_of(flows.root, [layer for row in flow.rows for layer in row]).items():
        unused = {*unit.parameters(), *unit.buffers()} - owned
        if unused and all(call.module != name for call in flow.calls):  # a checkpoint holds it, no update changes it
            blocks[-1].parts.append(unit)
            for tensor in unused:
                tensor.requires_grad_(False)
    return blocks


def part_names(flow: Flow) -> tuple[str, ...]:
    """embedding, layer.0, ..., head; of two rows encoder.embedding, encoder.layer.0, ..., decoder.embedding, ..."""
    several = len(flow.rows) > 1
    kinds = ("encoder", "decoder") if len(flow.rows) == 2 else tuple(f"row{i}" for i in range(len(flow.rows)))
    places = {name: (kind, i) for kind, row in zip(kinds, flow.rows, strict=True) for i, name in enumerate(row)}
    names, kind = [], kinds[0]
    for number, start in enumerate(flow.starts):
        module = flow.calls[start].module
        if module in places:
            kind, i = places[module]
            names.append(f"{kind}.layer.{i}" if several else f"layer.{i}")
        elif number == len(flow.starts) - 1:
            names.append("head")
        else:
            following = kinds[min(kinds.index(kind) + (number > 0), len(kinds) - 1)]
            names.append(f"{following}.embedding" if several else "embedding")
    return tuple(names)
