"""Own: a module of one's own as blocks in a row, found by recording its forward (`recording`, `tape`).

Units are the modules that are not looked into: layers. A module is looked into where it is a container (nn.Sequential,
nn.ModuleList, nn.ModuleDict) or holds one of layers that have parts themselves; so a transformer's layer is a unit, and
the four groups of layers of an image model are not. A block begins with the call of a unit that has a weight of two or
more dimensions; norms, activations and pooling belong to the block before. An attribute `cuts` of the module, a list of
its modules' names, says where blocks begin instead.

    calls     [embed] [drop] [layers.0] [layers.1] [norm] [head]
    blocks    |------------||---------||---------------||------|

Between blocks go the values that later blocks use, then an empty tensor for each of the forward's inputs: its shape
says which shape and type the input has. So every block knows which tape is meant, and reads no number for it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeplan.errors import InvalidInputError, require
from worker_agent.models.flow import FACTORY
from worker_agent.models.recording import RefusedError, around, record
from worker_agent.models.tape import Around, Ref, Section, Step, Tape, starts_of

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)

Begin = tuple[str, int]
"""Where a block begins: with the n-th call of a unit, counted from 0."""

Form = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""The shapes and types of a forward's inputs."""


def cut(
    root: nn.Module, inputs: Sequence[Tensor], names: tuple[str, ...] = ()
) -> tuple[tuple["OwnPart", ...], tuple[str, ...]]:
    """The blocks of a module and their names, found with inputs of these shapes. The module is as it was afterwards.

    With `names` the forward takes its inputs as keyword arguments.
    Raises InvalidInputError for a module that cannot be cut, with the place and the reason.
    """
    opaque: set[nn.Module] = set()
    tape, units = None, dict[nn.Module, str]()
    while tape is None:
        units = units_of(root, opaque)
        try:
            tape = record(root, units, inputs, inputs[0].device, names)
        except RefusedError as error:
            require(error.module is not root, "model", f"must {error.rule}, {FACTORY}", error.place)
            opaque.add(error.module)  # as a whole it may do so
    begins = _begins(root, tape)
    tapes = Tapes(root, units, tuple(begins), len(inputs), names)
    sections = tapes.add(tape, form_of(inputs), inputs[0].device)
    parts = tuple(OwnPart(tapes, number, section) for number, section in enumerate(sections))
    _adopt(root, parts)
    return parts, tuple(name if call == 0 else f"{name}:{call + 1}" for name, call in begins)


def units_of(root: nn.Module, opaque: Iterable[nn.Module] = ()) -> dict[nn.Module, str]:
    """The modules whose inside is not watched, by name; `opaque` modules are among them wherever they are."""
    found: dict[nn.Module, str] = {}
    whole = set(opaque)

    def layers_in(module: nn.Module) -> bool:
        """Whether a container in the module holds a layer that has parts of its own."""
        if module in whole:
            return False
        parts = list(module.children())
        layers = [
            part for part in parts if not isinstance(part, CONTAINERS) and next(part.children(), None) is not None
        ]
        own = isinstance(module, CONTAINERS) and any(next(part.parameters(), None) is not None for part in layers)
        return own or any(layers_in(part) for part in parts)

    def visit(name: str, module: nn.Module) -> None:
        plain = isinstance(module, CONTAINERS) and module not in whole
        if module is root or plain or layers_in(module):
            for key, part in module.named_children():
                visit(f"{name}.{key}" if name else key, part)
        else:
            found.setdefault(module, name)

    visit("", root)
    return found


def _begins(root: nn.Module, tape: Tape) -> list[Begin]:
    """Where blocks begin: as `cuts` says, or with every unit that has a weight. Raises InvalidInputError."""
    calls, asked = tape.calls(), getattr(root, "cuts", None)
    if asked is not None:
        return _asked(asked, tape, calls)
    wide = [
        (step, begin)
        for step, begin in calls
        if any(parameter.dim() > 1 for parameter in root.get_submodule(begin[0]).parameters())
    ]
    begins = [begin for n, (step, begin) in enumerate(wide) if n == 0 or tape.obstacle(tape.start_of(step)) is None]
    rule = f"must call at least two modules with weights, one after the other, {FACTORY}"
    if len(begins) < 2:
        reasons = (tape.obstacle(tape.start_of(step)) for step, _ in wide[1:])
        reason = next((f": nothing may come between {each}" for each in reasons if each), "")
        raise InvalidInputError("model", f"{rule}{reason}", f"{type(root).__name__} with {len(wide)}")
    return begins


def _asked(asked: Any, tape: Tape, calls: Sequence[tuple[int, Begin]]) -> list[Begin]:
    """Where the blocks begin that `cuts` names: each with the next call of the named module, or of a module in it."""
    fits = isinstance(asked, list | tuple) and len(asked) > 1 and all(isinstance(name, str) for name in asked)
    require(fits, "model.cuts", "must be a list of at least two names of modules", asked)
    begins: list[Begin] = []
    place = 0
    for number, name in enumerate(asked):
        module, _, number_of_call = name.partition(":")  # `name:2` is the second call of a unit
        meant = (
            n
            for n, (_, (unit, earlier)) in enumerate(calls)
            if f"{unit}.".startswith(f"{module}.") and number_of_call in ("", str(earlier + 1))
        )
        at = next((n for n in meant if n >= place), None)
        rule = f"must name modules in the order in which the forward calls them: {', '.join(u for _, (u, _) in calls)}"
        if at is None:
            raise InvalidInputError("model.cuts", rule, name)
        obstacle = tape.obstacle(tape.start_of(calls[at][0])) if number else None
        require(obstacle is None, "model.cuts", f"must not begin a block between {obstacle}", name)
        begins.append(calls[at][1])
        place = at + 1
    return begins


def _adopt(root: nn.Module, parts: Sequence["OwnPart"]) -> None:
    """Gives the last block the unused tensors: a checkpoint contains them, and no update changes them."""
    owned = {tensor for part in parts for tensor in (*part.parameters(), *part.buffers())}
    for name, module in root.named_modules():
        own: list[Any] = [*module._parameters.values(), *module._buffers.values()]
        left = {tensor for tensor in own if tensor is not None} - owned
        if left:
            parts[-1].held.append(
                HeldTensors(module, name, {key for key, p in module._parameters.items() if p in left})
            )
            for tensor in left:
                tensor.requires_grad_(False)


def form_of(inputs: Sequence[Tensor]) -> Form:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)


@dataclass(slots=True, eq=False)
class Tapes:
    """A module's tapes and its blocks' sections, by their inputs' form and torch's modes. Each is made on first use."""

    root: nn.Module
    units: dict[nn.Module, str]
    begins: tuple[Begin, ...]
    inputs: int
    names: tuple[str, ...]
    parts: dict[int, "OwnPart"] = field(default_factory=dict)
    found: dict[tuple[Form, torch.device, Around, bool], tuple[Tape, tuple[Section, ...]]] = field(default_factory=dict)

    def of(self, form: Form, device: torch.device) -> tuple[Tape, tuple[Section, ...]]:
        """For inputs of these shapes and types. Raises InvalidInputError where the blocks would be others."""
        key = self._found_by(form, device)
        if key not in self.found:
            empty = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in form]
            rule = f"must be cut alike for inputs of {', '.join(str(shape) for shape, _ in form)}"
            try:
                tape = record(self.root, self.units, empty, device, self.names)
            except RefusedError as error:
                raise InvalidInputError("model", f"{rule}: it must {error.rule}", error.place) from error
            self.add(tape, form, device)
            for number, part in self.parts.items():
                part.require_fit(self.found[key][1][number], rule)
        return self.found[key]

    def add(self, tape: Tape, form: Form, device: torch.device) -> tuple[Section, ...]:
        """The sections of a new tape. Raises InvalidInputError where it does not begin its blocks as others do."""
        place = ", ".join(str(shape) for shape, _ in form)
        try:
            starts = starts_of(tape, self.begins)
        except KeyError as error:
            raise InvalidInputError("model", f"must call {error.args[0][0]} for inputs of all shapes", place) from error
        fits = sorted(set(starts)) == list(starts) and not any(map(tape.obstacle, starts[1:]))
        require(fits, "model", "must be cut alike for inputs of all shapes", place)
        stops = (*starts[1:], len(tape.steps))
        sections = tuple(tape.section(start, stop) for start, stop in zip(starts, stops, strict=True))
        self.found[self._found_by(form, device)] = tape, sections
        return sections

    def _found_by(self, form: Form, device: torch.device) -> tuple[Form, torch.device, Around, bool]:
        return form, device, around(device), self.root.training


class HeldTensors(nn.Module):
    """Some of the parameters that a module holds, and its buffers, but none of its parts."""

    def __init__(self, module: nn.Module, name: str, parameters: Iterable[str]) -> None:
        super().__init__()
        self.name = name
        self._parameters = {key: module._parameters[key] for key in sorted(parameters)}
        self._buffers = module._buffers


class OwnPart(nn.Module):
    """A block: the steps of a module's forward from one cut to the next."""

    def __init__(self, tapes: Tapes, number: int, section: Section) -> None:
        super().__init__()
        self.units = nn.ModuleDict({_key(name): tapes.root.get_submodule(name) for name in section.units})
        places: dict[str, set[str]] = {}
        for name, key in section.held.values():
            places.setdefault(name, set()).add(key)
        modules = ((name, tapes.root.get_submodule(name), keys) for name, keys in sorted(places.items()))
        self.held = nn.ModuleList(
            HeldTensors(module, name, keys & module._parameters.keys()) for name, module, keys in modules
        )
        self._tapes = tapes
        self._number = number
        tapes.parts[number] = self

    def forward(self, *values: Tensor) -> Any:
        """(carried ..., one for each input) -> the same for the next block, or the module's result."""
        tapes, number = self._tapes, self._number
        if len(values) < tapes.inputs or (number == 0 and len(values) > tapes.inputs):
            raise TypeError(f"the model was cut for {tapes.inputs} inputs, and was given {len(values)}")
        given = values[len(values) - tapes.inputs :]
        described = ((tuple(tensor.shape[2:]), _DTYPES[tensor.shape[1]]) for tensor in given)
        form = form_of(given) if number == 0 else tuple(described)
        tape, sections = tapes.of(form, values[0].device)
        section = sections[number]
        carried = given if number == 0 else values[: -tapes.inputs]
        result = self._run(tape, section, dict(zip(section.takes, carried, strict=True)))
        if number == len(sections) - 1:
            return result[0] if tape.alone else result
        return (*result, *(map(_description, given) if number == 0 else given))

    def require_fit(self, section: Section, rule: str) -> None:
        """Raises InvalidInputError for a section of other modules or tensors than the block's own."""
        for name in section.units:
            require(_key(name) in self.units, "model", f"{rule}: block {self._number} calls it", name)
        own = {(held.name, key) for held in self._held() for key in (*held._parameters, *held._buffers)}
        for place in section.held.values():
            require(place in own, "model", f"{rule}: block {self._number} uses it", ".".join(filter(None, place)))

    def _held(self) -> Iterable[HeldTensors]:
        return (held for held in self.held if isinstance(held, HeldTensors))

    def _run(self, tape: Tape, section: Section, values: dict[int, Tensor]) -> tuple[Tensor, ...]:
        """The values of the section. Values that no later step uses are released."""
        held: dict[tuple[str, str], Any] = {}
        for each in self._held():
            tensors = (*each._parameters.items(), *each._buffers.items())
            held |= {(each.name, key): tensor for key, tensor in tensors}
        values |= dict(tape.captured) | {number: held[place] for number, place in section.held.items()}
        for step, drops in zip(section.steps, section.drops, strict=True):
            self._do(step, values, tape.around)
            for number in drops:
                values.pop(number, None)
        return tuple(values[number] for number in section.gives)

    def _do(self, step: Step, values: dict[int, Tensor], usual: Around) -> None:
        """One step, on the values by their numbers."""
        positional, named = step.arguments
        if step.nested:
            positional, named = tree_map_only(Ref, lambda ref: values[ref.number], step.arguments)
        else:
            positional = tuple(values[each.number] if type(each) is Ref else each for each in positional)
            named = {key: values[each.number] if type(each) is Ref else each for key, each in named.items()}
        call = step.call if step.unit is None else self.units[_key(step.unit)]
        if step.around == usual:
            found = call(*positional, **named)
        else:
            with _set_to(step.around, usual, next(iter(values.values())).device):
                found = call(*positional, **named)
        made = [found] if isinstance(found, Tensor) else [t for t in tree_leaves(found) if isinstance(t, Tensor)]
        if len(made) != len(step.makes):
            rule = "must give as many tensors in every forward"
            raise InvalidInputError("model", rule, step.unit or getattr(step.call, "__name__", str(step.call)))
        values.update(zip(step.makes, made, strict=True))


@contextmanager
def _set_to(wanted: Around, usual: Around, device: torch.device) -> Iterator[None]:
    """While it is active, the settings of the forward around a step hold, if the forward itself had changed them."""
    with ExitStack() as stack:
        if not wanted.gradients:
            stack.enter_context(torch.no_grad())
        if wanted.autocast != usual.autocast:
            on = wanted.autocast is not None
            stack.enter_context(torch.autocast(device.type, dtype=wanted.autocast, enabled=on))
        yield


def _key(unit: str) -> str:
    """Of a unit in a ModuleDict, which takes no dots, and no names of its own methods."""
    return f"/{unit.replace('.', '/')}"


def _description(tensor: Tensor) -> Tensor:
    """An empty tensor whose shape encodes a tensor's shape and type."""
    return tensor.new_empty((0, _DTYPES.index(tensor.dtype), *tensor.shape), dtype=torch.int8)
