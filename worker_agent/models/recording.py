"""Recording: the tape of a module's forward, found by running it once on tensors without contents.

A `ForwardRecorder` gets the calls of units and torch's functions (`watching`), notes them and hands out fake tensors.
A tensor's contents are known only where they follow from no input and no weight, as those of a mask made of sizes. A
forward that looks into another one is refused: its steps depend on it. The error names the innermost module around the
place. Taken as a unit, that module may look where it likes: units that need contents run as a copy with random weights.
"""

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from worker_agent.models.places import place_of
from worker_agent.models.tape import Around, Ref, Step, Tape, is_nested, refs_in
from worker_agent.models.watching import Applied, Watch, call_module

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""A call's arguments, by position and by name."""

_log = logging.getLogger("torch._subclasses.fake_tensor")

_HOOKS = frozenset({"backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
_OWN = ("_parameters", "_buffers", "_modules")


class RefusedError(Exception):
    """A forward that cannot have a tape: the rule, the module whose forward breaks it, and the line of code."""

    def __init__(self, rule: str, module: nn.Module, place: str) -> None:
        super().__init__(rule)
        self.rule = rule
        self.module = module
        self.place = place


def record(
    root: nn.Module,
    units: Mapping[nn.Module, str],
    inputs: Sequence[Tensor],
    device: torch.device,
    names: Sequence[str] = (),
) -> Tape:
    """The tape of a module's forward for inputs of these shapes and types on a device. Nothing is computed or changed.

    With `names` the forward takes its inputs as keyword arguments.

    Raises RefusedError for a forward that has none.
    """
    now = around(device)
    cached, silent = torch.is_autocast_cache_enabled(), _log.disabled
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saved_tensors_hooks(_same, _same))  # code that watches saved tensors sees no fakes
        stack.callback(torch.set_autocast_cache_enabled, cached)
        stack.callback(setattr, _log, "disabled", silent)
        torch.set_autocast_cache_enabled(False)
        _log.disabled = True  # calls that fail on fake tensors are tried in other ways, or refused in our words
        return ForwardRecorder(root, units, device).run(inputs, now, names)


def around(device: torch.device) -> Around:
    """The present settings."""
    on = torch.is_autocast_enabled(device.type)
    return Around(torch.is_grad_enabled(), torch.get_autocast_dtype(device.type) if on else None)


class ForwardRecorder:
    """Runs a forward on fake tensors, and records its steps."""

    def __init__(self, root: nn.Module, units: Mapping[nn.Module, str], device: torch.device) -> None:
        self._root = root
        self._units = units
        self._device = device
        self._watch = Watch(root, units, self.unit, self.function)
        self._steps: list[Step] = []
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._numbers: dict[int, int] = {}  # of tensors by their ids
        self._kept: list[Tensor] = []  # as long as it is kept, no other tensor gets a tensor's id
        self._storages: dict[int, int] = {}
        self._held: dict[int, tuple[str, str]] = {}
        self._captured: dict[int, Tensor] = {}
        self._fakes: dict[int, Tensor] = {}  # of captured tensors by their ids
        self._contents: dict[int, Tensor] = {}  # by number, for as long as the storage is not among the unknown
        self._unknown: set[int] = set()
        self._originals: dict[int, Tensor] = {}  # of parameters and buffers by their fakes' ids

    def run(self, inputs: Sequence[Tensor], now: Around, names: Sequence[str] = ()) -> Tape:
        """The tape. Raises RefusedError."""
        with self._emptied():
            given = [self._fake_like(tensor.detach(), self._device) for tensor in inputs]
            numbers = [self._known(tensor, contents=False) for tensor in given]
            drawn = random.getstate()
            try:
                with self._watch.active():
                    found = self._root(**dict(zip(names, given, strict=True))) if names else self._root(*given)
            except RefusedError:
                raise
            except Exception as error:  # the forward is the user's
                self._refuse(f"run on tensors without contents, and raises {_told(error)}", error)
            if random.getstate() != drawn:
                random.setstate(drawn)
                self._refuse("draw random numbers with torch alone outside of its layers")
            leaves = found if isinstance(found, tuple | list) else (found,)
            fits = bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves)
            kinds = ", ".join(type(leaf).__name__ for leaf in leaves) or "nothing"
            if not fits:
                self._refuse(f"return a tensor or a tuple of tensors, and returns {kinds}")
            result = tuple(self._numbers[id(self._own(leaf))] for leaf in leaves)
        return Tape(
            steps=tuple(self._steps),
            inputs=tuple(numbers),
            held=self._held,
            captured=self._captured,
            result=result,
            alone=isinstance(found, Tensor),
            storages=self._storages,
            around=now,
        )

    def function(self, call: Callable[..., Any], positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A call of one of torch's functions between the units."""
        if call is Tensor.__iter__:
            return iter(self.function(Tensor.unbind, positional, named))
        name = getattr(call, "__name__", str(call))
        if name in _HOOKS:
            self._refuse(f"not call {name} outside of its layers")
        if isinstance(call, Applied) and any(map(callable, (*positional, *named.values()))):
            self._refuse(f"hand no function to {name}: it may call layers, which nobody sees")
        given: Given = tree_map_only(Tensor, self._own, (positional, named))
        self._require_seen(given, name)
        tensors = _tensors_in(given)
        versions = {id(tensor): tensor._version for tensor in tensors}
        constant = all(self._content(tensor) is not None for tensor in tensors)
        real, drawn, failed = self._computed(call, given) if constant else (None, False, None)
        known = constant and not drawn and failed is None
        try:
            with self._mode:
                result = call(*given[0], **given[1])
        except Exception as error:  # the function may raise anything on tensors without contents
            if not known:
                self._refuse(_why(name, failed or error), error)
            result = tree_map_only(Tensor, self._fake_like, real)
        changed = name == "__set__" or any(t._version != versions[id(t)] for t in tensors)
        if not _tensors_in(result) and not changed:
            return real if known else result
        self._note(call, given, result, versions, known=known, draws=drawn)
        if known:
            pairs = zip(tree_leaves(result), tree_leaves(real), strict=True)
            self._contents |= {self._numbers[id(fake)]: each for fake, each in pairs if isinstance(each, Tensor)}
        return tree_map_only(Tensor, self._handed_out, result)

    def unit(self, module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A call of a unit, whose inside is not watched."""
        name = self._units[module]
        given: Given = tree_map_only(Tensor, self._own, (positional, named))
        self._require_seen(given, name)
        if not all(self._numbers.get(id(parameter)) in self._held for parameter in module.parameters()):
            self._refuse(f"call {name} with its own parameters")
        drawn = random.getstate()
        buffers = [(id(buffer), buffer._version) for buffer in module.buffers()]
        versions = {id(tensor): tensor._version for tensor in _tensors_in(given)}
        try:
            with self._mode:
                result = call_module(module, *given[0], **given[1])
        except Exception:  # it may read its tensors, or use tensors without a fake
            result = self._by_a_copy(module, given)
        random.setstate(drawn)
        result = tree_map_only(Tensor, self._apart, result)
        self._require_seen(result, name)
        notes = buffers != [(id(buffer), buffer._version) for buffer in module.buffers()]
        self._note(module, given, result, versions, unit=name, notes=notes)
        return tree_map_only(Tensor, self._handed_out, result)

    def _by_a_copy(self, module: nn.Module, given: Given) -> Any:
        """A unit's result, found by a copy of it with random weights and random inputs."""
        made: dict[int, Any] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            real = _random_like(tensor)
            real = nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real
            made |= {id(tensor): real, id(self._originals.get(id(tensor))): real}
        try:
            with torch.no_grad():
                positional, named = tree_map_only(Tensor, _random_like, given)
                result = call_module(deepcopy(module, made), *positional, **named)
        except Exception as error:  # the module is the user's
            rule = f"call {self._units[module]} with what it takes: it raises {_told(error)}"
            self._refuse(rule, error, within=self._root)  # it would not be possible in a larger unit either
        trained = any(tensor.requires_grad for tensor in (*module.parameters(), *_tensors_in(given)))

        def fake(tensor: Tensor) -> Tensor:
            graded = trained and (tensor.is_floating_point() or tensor.is_complex())
            return self._fake_like(tensor.detach()).requires_grad_(graded)

        return tree_map_only(Tensor, fake, result)

    def _note(
        self,
        call: Callable[..., Any],
        given: Given,
        result: Any,
        versions: Mapping[int, int],
        *,
        known: bool = False,
        unit: str | None = None,
        notes: bool = False,
        draws: bool = False,
    ) -> None:
        """Adds a step. Its results and changes have `known` contents, or unknown ones from here on."""
        tensors, made = _tensors_in(given), _tensors_in(result)
        changed = [tensor for tensor in tensors if tensor._version != versions[id(tensor)]]
        if getattr(call, "__name__", "") == "__set__":
            changed.append(tensors[0])
        if any(self._numbers[id(tensor)] in self._captured for tensor in changed):
            self._refuse("change tensors in place only if it made them, or holds them as parameters or buffers")
        new = all(id(tensor) not in self._numbers for tensor in made)
        views = {_storage(tensor) for tensor in made} <= {_storage(tensor) for tensor in tensors}
        makes = tuple(self._known(tensor, contents=known) for tensor in made)
        if not known:
            self._unknown |= {_storage(tensor) for tensor in changed}
        arguments: Given = tree_map_only(Tensor, lambda tensor: Ref(self._numbers[id(tensor)]), given)
        self._steps.append(
            Step(
                call=call,
                unit=unit,
                arguments=arguments,
                uses=refs_in(arguments),
                nested=is_nested(arguments),
                makes=makes,
                changes=frozenset(map(_storage, changed)),
                touches=frozenset(map(_storage, (*tensors, *made))),
                around=around(self._device),
                notes=notes,
                view=unit is None and bool(made) and new and views and not changed,
                random=draws,
            )
        )

    def _computed(self, call: Callable[..., Any], given: Given) -> tuple[Any, bool, Exception | None]:
        """The result of a call whose tensors have contents, whether it drew random numbers, and its error."""
        positional, named = tree_map_only(Tensor, self._content, given)
        generators = [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_available() else ())]
        states = [generator.get_state() for generator in generators]
        result, failed, drawn = None, None, False
        try:
            result = call(*positional, **named)
        except Exception as error:  # the function may raise anything
            failed = error
        for generator, state in zip(generators, states, strict=True):
            if not torch.equal(generator.get_state(), state):
                generator.set_state(state)
                drawn = True
        return result, drawn, failed

    def _own(self, tensor: Tensor) -> Tensor:
        """The fake tensor for one that the forward uses. One that comes from outside is captured."""
        if id(tensor) in self._numbers:
            return tensor
        if id(tensor) not in self._fakes:
            if isinstance(tensor, FakeTensor):
                self._refuse("use no tensor of another forward")
            fake = self._fakes[id(tensor)] = self._fake_like(tensor)
            number = self._known(fake, contents=True)
            self._captured[number] = self._contents[number] = tensor
        return self._fakes[id(tensor)]

    def _apart(self, tensor: Tensor) -> Tensor:
        """A unit's result. A parameter that it returns is another value than the parameter."""
        if not isinstance(tensor, FakeTensor):
            return self._fake_like(tensor)
        with self._mode:
            return tensor.view_as(tensor) if self._numbers.get(id(tensor)) in self._held else tensor

    def _handed_out(self, tensor: Tensor) -> Tensor:
        """The value for the forward: a captured tensor that a call returns is that tensor."""
        return self._captured.get(self._numbers[id(tensor)], tensor)

    def _known(self, tensor: Tensor, *, contents: bool) -> int:
        """A tensor's number."""
        if id(tensor) not in self._numbers:
            number = self._numbers[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
            self._storages[number] = _storage(tensor)
            if not contents:
                self._unknown.add(_storage(tensor))
        return self._numbers[id(tensor)]

    def _content(self, tensor: Tensor) -> Tensor | None:
        return None if _storage(tensor) in self._unknown else self._contents.get(self._numbers[id(tensor)])

    def _fake_like(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        with self._mode:
            device = device or tensor.device
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, tensor.requires_grad)
            return fake.requires_grad_(tensor.requires_grad)

    def _require_seen(self, value: Any, name: str) -> None:
        """Refuses tensors inside of objects, because they would pass unseen."""
        for leaf in tree_leaves(value):
            if any(isinstance(each, Tensor) for each in tree_leaves(_inside_of(leaf))):
                self._refuse(f"hand tensors to and from {name} themselves, and not in a {type(leaf).__name__}")

    def _refuse(self, rule: str, cause: Exception | None = None, within: nn.Module | None = None) -> NoReturn:
        module = within or (self._watch.around or [self._root])[-1]
        raise RefusedError(rule, module, place_of(module, "ForwardRecorder.run")) from cause

    @contextmanager
    def _emptied(self) -> Iterator[None]:
        """While it is active, parameters and buffers are fake. Afterwards modules have their previous tensors."""
        fakes: dict[Tensor, Tensor] = {}
        inside = {part for unit in self._units for part in unit.modules()}
        with ExitStack() as stack:
            for prefix, module in self._root.named_modules():
                stack.callback(partial(_restore, vars(module), dict(vars(module)), _OWN))
                held: Any
                for held in (module._parameters, module._buffers):
                    stack.callback(partial(_restore, held, dict(held)))
                    for name, tensor in held.items():
                        if tensor is not None:
                            fake = fakes.setdefault(tensor, self._fake_like(tensor, self._device))
                            self._held.setdefault(self._known(fake, contents=False), (prefix, name))
                            self._originals[id(fake)] = tensor
                            held[name] = fake
            yield
            for module in set(self._root.modules()) - inside:
                for name, value in vars(module).items():
                    if name not in _OWN and _fakes_in(value):
                        rule = f"keep no tensor from one forward to the next, as in its attribute {name}"
                        self._refuse(rule, within=module)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _restore(held: dict[str, Any], before: Mapping[str, Any], but: Sequence[str] = ()) -> None:
    """Restores the tensors that a forward replaced by fake ones; other entries of a module's dictionary stay."""
    for name in list(held):
        if name not in but and (not but or _fakes_in(held[name])):
            del held[name]
    held.update({name: value for name, value in before.items() if name not in held})


def _inside_of(leaf: Any) -> list[Any]:
    """The content of an argument that is not a tensor."""
    if isinstance(leaf, slice):
        return [leaf.start, leaf.stop, leaf.step]
    plain = isinstance(leaf, Tensor | type) or callable(leaf) or not hasattr(leaf, "__dict__")
    return [] if plain else list(vars(leaf).values())


def _why(name: str, error: Exception) -> str:
    looks = type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException")
    if looks or name in ("numpy", "tolist", "item", "__array__"):
        return f"not look into tensors outside of its layers, as {name} does here"
    return f"run on tensors without contents, and {name} raises {_told(error)}"


def _told(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _fakes_in(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _random_like(tensor: Tensor) -> Tensor:
    """Of the same shape and type: small normal numbers, or zeros of whole ones."""
    real = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return real.normal_(std=0.02) if tensor.is_floating_point() or tensor.is_complex() else real
