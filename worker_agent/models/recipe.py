"""Recipe: the operations by which a factory makes its tensors, noted on the meta device, and done later for some.

Building a model runs its constructors, which draw and compute weights. Under a `WeightRecipe` they run without
contents, and every operation that makes or changes a tensor is noted. A rank then does the operations that lead to the
tensors of its stage, and no others:

    noted     w = empty    w.normal_    v = empty    v.normal_    v.mul_(2)
    for v                               v = empty    v.normal_    v.mul_(2)

Random operation number n of the construction always draws from (seed, n). A tensor's contents therefore do not depend
on other operations, nor on the cut. A constructor that reads a tensor, as in `float(x[0])`, has it computed at once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pipeplan.errors import InvalidInputError, require
from worker_agent.models.randomness import seed_of

_LITERALS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.from_numpy})
"""Functions whose arguments are the contents."""

_READERS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu})
"""Methods that read contents past torch's dispatcher."""

_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]

_RULE = "must be built of operations that the meta device has, to be built by stages"


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor without contents: the number of its storage, and where in it the tensor is."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Constant:
    """A tensor with contents that an operation took, as it was then."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Operation:
    """An operation, with a slot for each tensor without contents. `makes` are those of its results with new storages.

    `draw` is its number among the random ones.
    """

    call: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    touches: frozenset[int]
    makes: tuple[tuple[int, _Slot], ...]
    draw: int | None


class ConstructionMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which models are built. It runs no compiled code.

    `_should_skip_dynamo` prevents the import of torch's compiler, which takes a process a second and 72 MiB.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class WeightRecipe(ConstructionMode):  # type: ignore[no-untyped-call]
    """Notes operations while it is `noting`, and repeats them for requested tensors."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._operations: list[_Operation] = []
        self._writers: list[list[int]] = []  # of every storage: the operations that make or change it
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # as long as they are kept, no other one gets their address
        self._draws = 0
        self._failed: str | None = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While it is active, torch makes tensors without contents."""
        with torch.device("meta"), _Contents(self), self:
            yield
        require(self._failed is None, "model", _RULE, self._failed)

    def contents(self, tensor: Tensor) -> Tensor:
        """The tensor with its contents, on the CPU. Raises InvalidInputError for one that cannot be made."""
        slot = self._slot(tensor)
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for number in sorted(self._leading_to(slot.storage)):
                self._do(self._operations[number], storages)
        return _real(slot, storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        kinds = [str(each.type) for each in func._schema.returns]
        reads = bool(kinds) and not any(
            "Tensor" in kind for kind in kinds
        )  # `item`, `equal`: numbers of the code's own
        if reads and any(_is_empty(tensor) for tensor in tensors):
            positional, named = tree_map(self._with_contents, given)
            return func(*positional, **named)
        result = self._without_contents(func, given)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(_is_empty(tensor) for tensor in (*tensors, *made)):
            self._note(func, given, tensors, made)
        return result

    def _note(self, func: Any, given: Any, tensors: list[Tensor], made: list[Tensor]) -> None:
        """Adds the operation, unless it only makes views."""
        fresh = [place for place, tensor in enumerate(made) if tensor.untyped_storage()._cdata not in self._numbers]
        written = [tensor for tensor in changed(func, given) if _is_empty(tensor)]
        if not fresh and not written:
            return
        rule = "must be built with torch's own random numbers, and without a torch.Generator, to be built by stages"
        require(given[1].get("generator") is None, "model", rule, func.name())
        makes = tuple((place, self._slot(made[place])) for place in fresh)
        rule = "must be built of operations whose results have memory of their own, to be built by stages"
        require(len({slot.storage for _, slot in makes}) == len(makes), "model", rule, func.name())
        number = len(self._operations)
        for storage in {self._slot(tensor).storage for tensor in written} | {slot.storage for _, slot in makes}:
            self._writers[storage].append(number)
        random = torch.Tag.nondeterministic_seeded in func.tags
        self._operations.append(
            _Operation(
                call=func,
                arguments=tree_map(self._noted, given),
                touches=frozenset(self._slot(tensor).storage for tensor in tensors if _is_empty(tensor)),
                makes=makes,
                draw=self._draws if random else None,
            )
        )
        self._draws += random

    def _without_contents(self, func: Any, given: Any) -> Any:
        """The operation's result. One that the meta device lacks runs for real, for its result's shape."""
        try:
            return func(*given[0], **given[1])
        except NotImplementedError as error:
            random = torch.Tag.nondeterministic_seeded in func.tags
            if random or changed(func, given):
                self._failed = f"{func.name()} has no form without contents"  # the code may catch the error
                raise InvalidInputError("model", _RULE, self._failed) from error
            positional, named = tree_map(self._with_contents, given)
            return tree_map(_emptied, func(*positional, **named))

    def _with_contents(self, leaf: Any) -> Any:
        return self.contents(leaf) if isinstance(leaf, Tensor) and _is_empty(leaf) else leaf

    def _noted(self, leaf: Any) -> Any:
        """An argument as it is kept."""
        if isinstance(leaf, Tensor):
            return self._slot(leaf) if _is_empty(leaf) else _Constant(leaf, leaf._version)
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    def _slot(self, tensor: Tensor) -> _Slot:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(storage)
            self._writers.append([])
        number = self._numbers[storage._cdata]
        return _Slot(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _leading_to(self, storage: int) -> set[int]:
        """The operations that a storage's contents follow from."""
        found: set[int] = set()
        left = [(storage, len(self._operations))]
        while left:
            wanted, stop = left.pop()
            new = {number for number in self._writers[wanted] if number < stop} - found
            found |= new
            left += [(each, number) for number in new for each in self._operations[number].touches]
        return found

    def _do(self, operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
        """One operation on real tensors; its results' storages are added to `storages`."""

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, _Constant):
                rule = "must not change a tensor after it gave its values to a weight, to be built by stages"
                require(leaf.tensor._version == leaf.version, "model", rule, tuple(leaf.tensor.shape))
                return leaf.tensor
            return _real(leaf, storages) if isinstance(leaf, _Slot) else leaf

        positional, named = tree_map(argument, operation.arguments)
        if operation.draw is not None:
            torch.default_generator.manual_seed(seed_of(self._seed, operation.draw))
        results = [leaf for leaf in tree_leaves(operation.call(*positional, **named)) if isinstance(leaf, Tensor)]
        for place, slot in operation.makes:
            real = results[place]
            if "empty" in operation.call.__name__:  # NaN marks elements that no operation sets
                real.fill_(torch.nan if real.is_floating_point() or real.is_complex() else 0)
            if (tuple(real.shape), real.stride(), real.storage_offset()) != (slot.shape, slot.stride, slot.offset):
                real = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device="cpu").copy_(real)
            storages[slot.storage] = real.untyped_storage()


class _Contents(TorchFunctionMode):
    """Keeps the contents that are written in the code, and finds those that the code reads."""

    def __init__(self, recipe: WeightRecipe) -> None:
        super().__init__()
        self._recipe = recipe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        first = args[0] if args else None
        if func == _IS_META:  # torch.nn.init leaves tensors on the meta device alone
            return False
        if func in _READERS and isinstance(first, Tensor) and _is_empty(first):
            return func(self._recipe.contents(first), *args[1:], **named)
        if func in _LITERALS and named.get("device") is None and not (isinstance(first, Tensor) and _is_empty(first)):
            where = {} if func is torch.from_numpy else {"device": "cpu"}
            real = func(*args, **(named | where))
            empty = torch.empty_like(real, device="meta").detach()
            empty.copy_(real.detach().clone())
            return empty.requires_grad_(real.requires_grad)
        return func(*args, **named)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Construction:
    """A model that a factory built without contents, and how its tensors get them."""

    root: nn.Module
    recipe: WeightRecipe

    def materialise(self, blocks: Iterable[nn.Module]) -> tuple[str, ...]:
        """Gives the blocks' tensors on the meta device their contents, on the CPU. Nothing is read from files.

        Raises InvalidInputError for a tensor that nothing gives a value.
        """
        parts = tuple(blocks)
        real: dict[Tensor, Tensor] = {}
        for tensor, name in _empty_tensors(parts).items():
            found = self.recipe.contents(tensor)
            require(not found.isnan().any(), "model", "must be a factory that gives every tensor a value", name)
            if isinstance(tensor, nn.Parameter):
                found = nn.Parameter(found, requires_grad=tensor.requires_grad)
            found.__dict__.update(tensor.__dict__)
            real[tensor] = found
        if real:
            for module in {module for root in (self.root, *parts) for module in root.modules()}:
                _replace(module, real)
        return ()


class Constructors:
    """The contents that a model's constructors give its tensors: they run when the first tensor needs it."""

    def __init__(self, make: Callable[[], nn.Module], seed: int) -> None:
        self._make = make
        self._recipe = WeightRecipe(seed)
        self._built: dict[str, Tensor] = {}

    def give(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives tensors of the model, by name, their values. Raises InvalidInputError for one that gets none."""
        if tensors and not self._built:
            with self._recipe.noting():
                root = self._make()
            self._built = dict((*root.named_parameters(), *root.named_buffers()))
        rule = "must be a model whose constructors, or _init_weights, give every tensor a value"
        for name, tensor in tensors.items():
            empty = self._built.get(name, tensor)
            require(_is_empty(empty), "model", rule, name)
            found = self._recipe.contents(empty)
            require(found.shape == tensor.shape and not found.isnan().any(), "model", rule, name)
            with torch.no_grad():
                tensor.copy_(found)


def require_stages(root: nn.Module) -> None:
    """Raises InvalidInputError for a model whose tensors cannot be filled one by one."""
    owners: dict[int, str] = {}
    for tensor, name in _empty_tensors((root,)).items():
        plain = type(tensor) in (Tensor, nn.Parameter)
        require(plain, "model", "must have plain parameters to be built by stages", f"{name}: {type(tensor).__name__}")
        rule = "must have no hooks on weights (register_hook) to be built by stages, which makes others in their place"
        require(not tensor._backward_hooks, "model", rule, name)
        other = owners.setdefault(tensor.untyped_storage()._cdata, name)
        rule = "must have tensors with memory of their own to be built by stages"
        require(other == name, "model", rule, f"{other} and {name}")


def _empty_tensors(roots: Iterable[nn.Module]) -> dict[Tensor, str]:
    """The tensors on the meta device that modules refer to, each with a name."""
    found: dict[Tensor, str] = {}
    for root in roots:
        for prefix, module in root.named_modules():
            for held in (module._parameters, module._buffers, _others(module)):
                for key, value in held.items():
                    for leaf in tree_leaves(value):
                        if isinstance(leaf, Tensor) and _is_empty(leaf):
                            found.setdefault(leaf, f"{prefix}.{key}".lstrip("."))
    return found


def _replace(module: nn.Module, real: Mapping[Tensor, Tensor]) -> None:
    """Has the module itself hold these tensors in the place of those."""

    def replaced(leaf: Any) -> Any:
        return real.get(leaf, leaf) if isinstance(leaf, Tensor) else leaf

    held: Any
    for held in (module._parameters, module._buffers):
        for key, tensor in held.items():
            held[key] = replaced(tensor)
    for key, value in _others(module).items():
        if any(isinstance(leaf, Tensor) and leaf in real for leaf in tree_leaves(value)):
            vars(module)[key] = tree_map(replaced, value)


def _others(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}


def _is_empty(tensor: Tensor) -> bool:
    """Whether a tensor has no contents; to the factory's code it says that it has."""
    return tensor.device.type == "meta"


def _real(slot: _Slot, storages: Mapping[int, torch.UntypedStorage]) -> Tensor:
    """The tensor in its storage."""
    empty = torch.empty(0, dtype=slot.dtype, device="cpu")
    return empty.set_(storages[slot.storage], slot.offset, slot.shape, slot.stride)


def _emptied(leaf: Any) -> Any:
    """A tensor's shape and type on the meta device."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def changed(func: Any, given: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
    """The tensors among an operation's arguments that it writes."""
    positional, named = given
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = positional[place] if place < len(positional) else named.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found
