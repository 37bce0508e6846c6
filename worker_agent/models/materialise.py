"""Materialise: gives the tensors of some blocks their contents. A Hugging Face model is built without any.

A model on the meta device has only shapes. A rank materialises the blocks of its stage. Weights are random, or come
from a folder of `save_pretrained`, from which only the stage's tensors are read.

Random weights are those of the library's `_init_weights`. Every draw for a tensor starts from (seed, the tensor's
name): the same seed gives the same weights under every cut. Tensors that `_init_weights` leaves out get the contents of
their constructors, which run again, as those of presets do (`recipe`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipeplan.errors import InvalidInputError, require
from worker_agent.models.randomness import seed_of
from worker_agent.models.recipe import ConstructionMode, Constructors, changed
from worker_agent.models.values import cast_in_place

Place = tuple[dict[str, Tensor], str, str]
"""Where a module holds a tensor: its dictionary, the key in it, and the name in the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """Where the contents of a Hugging Face model come from: `files` with weights, or the seed."""

    root: nn.Module
    seed: int
    dtype: torch.dtype
    files: tuple[Path, ...]
    constructors: Constructors

    def materialise(self, blocks: Iterable[nn.Module]) -> tuple[str, ...]:
        """Gives the blocks' tensors on the meta device their contents, on the CPU. Returns the read tensors' names.

        Raises InvalidInputError for files that do not hold the model's weights.
        """
        wanted = {t for block in blocks for t in (*block.parameters(), *block.buffers()) if t.is_meta}
        every = places_of(self.root)
        places = {tensor: held for tensor, held in every.items() if tensor.is_meta}
        if not wanted:
            return ()
        read: tuple[str, ...] = ()
        if self.files:
            read = _read(self.root, self.files, {name for t in wanted for _, _, name in places[t]}, every)
        fresh = {}
        for tensor, held in places.items():
            real = next((there[key] for there, key, _ in held if not there[key].is_meta), None)
            if real is not None:
                for there, key, name in held:
                    rule = "must be one tensor with those that it is tied to: set tie_word_embeddings=false"
                    same = there[key] is real or there[key].is_meta or torch.equal(there[key], real)
                    require(same, f"model.{name}", rule, "another one")
                real.requires_grad_(tensor.requires_grad)
            elif tensor in wanted:
                real = fresh[held[0][2]] = _without_value(tensor)
            for there, key, _ in held:
                there[key] = tensor if real is None else real
        with torch.random.fork_rng(devices=[]):
            left = _initialise(self.root, self.seed, fresh)
        self.constructors.give({name: fresh[name] for name in left})
        for tensor in fresh.values():
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # the library's mark: it has its value
            if isinstance(tensor, nn.Parameter):
                cast_in_place(tensor, self.dtype)
        return read


def build_empty(make: Callable[[], Any]) -> Any:
    """The Hugging Face model that a function builds, on the meta device; on fake tensors under their mode."""
    from transformers.initialization import meta_device_safe_creation_ops, no_init_weights

    if isinstance(torch.empty(0), FakeTensor):
        return make()
    with no_init_weights(), torch.device("meta"), meta_device_safe_creation_ops():
        root = make()
    real = {p: nn.Parameter(p.to("meta"), requires_grad=p.requires_grad) for p in root.parameters() if not p.is_meta}
    for tensor, held in places_of(root).items():  # `torch.Tensor(sizes)` ignores the default device
        for there, key, _ in held if tensor in real else ():
            there[key] = real[tensor]
    root.tie_weights()
    return root


def places_of(root: nn.Module) -> dict[Tensor, list[Place]]:
    """Where the model holds each of its tensors; of a tied one there are several places."""
    places: dict[Tensor, list[Place]] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    places.setdefault(tensor, []).append((cast(dict[str, Tensor], held), key, name))
    return places


def _without_value(tensor: Tensor) -> Tensor:
    """A real tensor instead of an empty one; NaN marks tensors that nothing initialises.

    Values are drawn in float32.
    """
    if not tensor.is_floating_point():
        real = torch.zeros_like(tensor, device="cpu")
    else:
        dtype = torch.float32 if isinstance(tensor, nn.Parameter) else tensor.dtype
        real = torch.full_like(tensor, torch.nan, device="cpu", dtype=dtype)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    real.__dict__.update(tensor.__dict__)
    return real


def _initialise(root: Any, seed: int, fresh: Mapping[str, Tensor]) -> list[str]:
    """Gives fresh tensors the values that the library initialises them to. Tensors with its mark keep theirs.

    Returns the names of those to which it gives none.
    """
    from transformers.initialization import guard_torch_init_functions

    own = set(fresh.values())
    with _DrawsByName(seed, fresh) as draws, torch.no_grad(), guard_torch_init_functions():

        def visit(name: str, module: Any, model: Any) -> bool:
            """Initialises the module after its parts, by the model's `_init_weights`, if a tensor of it is fresh."""
            model = module if hasattr(module, "_init_weights") else model
            parts = [visit(f"{name}.{key}", part, model) for key, part in module.named_children()]
            touched = any(parts) or any(t in own for t in (*module._parameters.values(), *module._buffers.values()))
            if touched:
                draws.begin(name)
                model._init_weights(module)
            return touched

        visit("", root, root)
    return [name for name, tensor in fresh.items() if tensor.isnan().any() or tensor not in draws.written]


class _DrawsByName(ConstructionMode):  # type: ignore[no-untyped-call]
    """Seeds every random operation from the name of the tensor that it fills; of others from the module's name."""

    def __init__(self, seed: int, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._seed = seed
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
        self._tensors = {tensor.untyped_storage()._cdata: tensor for tensor in tensors.values()}
        self.written: set[Tensor] = set()
        self._module = ""
        self._draws: Counter[str] = Counter()

    def begin(self, module: str) -> None:
        """The next draws belong to this module."""
        self._module = module
        self._draws.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            filled = args[0].untyped_storage()._cdata if args and isinstance(args[0], Tensor) else None
            key = self._names.get(filled, f"{self._module}:")
            torch.default_generator.manual_seed(seed_of(self._seed, key, self._draws[key]))
            self._draws[key] += 1
        for tensor in changed(func, (args, kwargs or {})):
            if tensor.untyped_storage()._cdata in self._tensors:
                self.written.add(self._tensors[tensor.untyped_storage()._cdata])
        return func(*args, **(kwargs or {}))


class _Stored:
    """A tensor in a file, as the library's loader takes it. It is read only where it goes to a real device."""

    def __init__(self, name: str, stored: Any, read: list[str]) -> None:
        self._name = name
        self._stored = stored
        self._read = read

    def __getitem__(self, _: Any) -> "_Stored":
        return self

    def to(self, device: Any, dtype: torch.dtype | None) -> Tensor:
        """The tensor on a device, in a type. Its memory is its own: the file's, which is mapped, cannot be released."""
        if torch.device(device).type == "meta":
            return torch.empty(self._stored.get_shape(), device="meta", dtype=dtype)
        self._read.append(self._name)
        return cast(Tensor, self._stored[...]).to(device=device, dtype=dtype, copy=True)


def _read(
    root: Any, files: Sequence[Path], names: set[str], places: Mapping[Tensor, Sequence[Place]]
) -> tuple[str, ...]:
    """Has the library load the tensors of these names into the model, by its own rules of names and forms."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    read: list[str] = []
    load = LoadStateDictConfig(
        device_map={name: "cpu" if name in names else "meta" for name in root.state_dict()},
        weight_mapping=get_model_conversion_mapping(root),
    )
    folder = str(files[0].parent)
    try:
        with ExitStack() as stack:
            stored: dict[str, Any] = {}
            for path in files:
                file = stack.enter_context(safe_open(path, framework="pt"))
                stored |= {key: _Stored(key, file.get_slice(key), read) for key in file.keys()}  # noqa: SIM118
            found, _ = convert_and_load_state_dict_in_model(root, stored, load)
    except (OSError, SafetensorError) as error:
        raise InvalidInputError("model", f"must have readable weights ({error})", folder) from error
    for held in places.values():  # one name of a tied tensor is enough
        tied = {name for _, _, name in held}
        found.missing_keys -= tied if tied - found.missing_keys else set()
    root._adjust_missing_and_unexpected_keys(found)
    for name, stored_shape, expected in sorted(found.mismatched_keys):
        rule = f"must have the weights of its config, of shape {tuple(expected)}"
        raise InvalidInputError(f"model.{name}", rule, tuple(stored_shape))
    rule = "must have the weights of its config: this tensor"
    for name in sorted(found.conversion_errors):
        raise InvalidInputError("model", f"{rule} cannot be converted ({found.conversion_errors[name]})", name)
    for name in sorted(found.missing_keys):
        raise InvalidInputError("model", f"{rule} is missing", name)
    for name in sorted(found.unexpected_keys):
        raise InvalidInputError("model", f"{rule} has no place in {type(root).__name__}", name)
    for tensor, held in places.items():  # the loader empties all tensors that it does not read
        for there, key, _ in held if not tensor.is_meta else ():
            there[key] = tensor
    return tuple(sorted(read))
