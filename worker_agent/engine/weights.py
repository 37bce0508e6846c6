"""Weights: a stage's weight versions, which are its weight stash, and the update that makes the next version.

Weight stashing (PipeDream 2018, section 3.3): the backward of a microbatch uses the weights that its forward used, so a
stage keeps the older versions that microbatches in flight still need. PipeDream-2BW (section 3.1, double buffering)
keeps two. A schedule with flushes needs one, which is updated in place.

A version is a set of leaf parameters. A forward runs on the leaves of its version, which `Weights.use` puts into the
modules; its backward finds the same leaves through the graph. A version in use is never written to.

torch's fused optimizers go through memory, not through indices. So a weight fills its memory without gaps, and its
gradient and its states have its strides: a transposed weight and one in channels_last are updated right.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pipeplan.errors import require
from worker_agent.engine.optimizers import SIXTEEN_BITS, Optimizer, in_buckets

MASTER = "master_weight"
"""The name of a float32 copy among the optimizer's states."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One trainable parameter of the stage: its name in the whole model, and every module attribute that holds it."""

    name: str
    places: tuple[tuple[nn.Module, str], ...]
    parameter: nn.Parameter


def find_slots(blocks: Iterable[nn.Module], names: Mapping[Tensor, str]) -> tuple[Slot, ...]:
    """The trainable parameters of some blocks; one that several modules share is one slot with several places."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for block in blocks:
        for module in block.modules():
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter.requires_grad:
                    places.setdefault(parameter, []).append((module, attribute))
    return tuple(Slot(names[parameter], tuple(where), parameter) for parameter, where in places.items())


def _setter(module: nn.Module, name: str) -> Callable[[nn.Parameter], None]:
    """Puts a parameter into a module: directly, unless the module does more with an assignment than `nn.Module`.

    Schedules that keep versions exchange a stage's parameters for every microbatch, and an assignment takes 3 us.
    """
    if type(module).__setattr__ is nn.Module.__setattr__:
        return partial(module._parameters.__setitem__, name)
    return partial(setattr, module, name)


class Weights:
    """The weight stash: the versions of one stage's trainable parameters.

    Gradients gather on the leaves of the version in use. The optimizer's states belong to the weights, not to a
    version.

    With `master_weights` a 16-bit parameter has a float32 copy, its master, which belongs to the weights as well: it
    takes the update, and the version to be made is rounded from it. `master_bytes` are the bytes of these copies. The
    gradients of many microbatches then add up in float32 as well, on leaves of 16 bits; `gradient_bytes` are the bytes
    of one set of gradients.

    `learning_rate` gives the rate with which a version is made, where it is not the optimizer's own all the time.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        optimizer: Optimizer,
        *,
        version: int = 0,
        master_weights: bool = False,
        learning_rate: Callable[[int], float] | None = None,
    ) -> None:
        self.slots = tuple(slots)
        self._setters = tuple(tuple(_setter(module, name) for module, name in slot.places) for slot in slots)
        self.version_bytes = sum(slot.parameter.nbytes for slot in slots)
        self._has_master = tuple(master_weights and slot.parameter.dtype in SIXTEEN_BITS for slot in slots)
        for slot in slots:
            slot.parameter.data = _laid_out_as(torch.empty_like(slot.parameter, device="meta"), slot.parameter.data)
        first = tuple(self._graded_in_float32(slot.parameter, place) for place, slot in enumerate(slots))
        self._stash: dict[int, tuple[nn.Parameter, ...]] = {version: first}
        self._in_place = version
        self._graded: tuple[nn.Parameter, ...] = ()
        self._gathered: list[Tensor | None] | None = None
        self._factor: Tensor | None = None
        self._skips = False
        self._learning_rate = learning_rate
        self._spare: list[tuple[nn.Parameter, ...]] = []
        self._masters = tuple(
            slot.parameter.detach().float() if master else None
            for slot, master in zip(slots, self._has_master, strict=True)
        )
        self.master_bytes = sum(master.nbytes for master in self._masters if master is not None)
        self.gradient_bytes = sum(
            (slot.parameter if master is None else master).nbytes
            for slot, master in zip(slots, self._masters, strict=True)
        )
        self.optimizer = optimizer
        self._optimizer_bytes: int | None = None
        self._states = 0

    @property
    def live_bytes(self) -> int:
        """The bytes of all versions that are allocated, in use or retired and waiting to be used again."""
        return self.version_bytes * (len(self._stash) + len(self._spare))

    @property
    def optimizer_bytes(self) -> int:
        """The bytes of the optimizer's states, cached for the executor. They change when an update creates a state."""
        if self._optimizer_bytes is None:
            states = self.optimizer.states.values()
            self._optimizer_bytes = sum(value.nbytes for state in states for value in state.values())
        return self._optimizer_bytes

    def use(self, version: int) -> None:
        """Puts a version's leaves into the modules, for the forwards that follow."""
        if version == self._in_place:
            return
        for setters, parameter in zip(self._setters, self._stash[version], strict=True):
            for put in setters:
                put(parameter)
        self._in_place = version

    def grade(self, version: int) -> None:
        """Declares that a backward puts its gradients on this version's leaves."""
        self._graded = self._stash[version]

    @property
    def graded(self) -> tuple[nn.Parameter, ...]:
        return self._graded

    def gradients(self) -> list[Tensor | None]:
        """The gradients for the next update, by slot: None if no backward reached a parameter. The leaves lose them."""
        if self._gathered is None:
            leaves, self._graded = self._graded, ()
            self._gathered = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
        return list(self._gathered)

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Sets the gradients for the next update, instead of those on the leaves, which stay there."""
        self._gathered = list(gradients)

    def scale_gradients(self, factor: Tensor) -> None:
        """Has the next update multiply the gathered gradients by a number; float32 copies take it unrounded.

        The number is on the weights' device: where that is a GPU the host does not wait for it.
        """
        self._factor = None if factor.device.type == "cpu" and float(factor) == 1.0 else factor

    def skip_update(self) -> None:
        """Has the next update make a version that equals the one before."""
        self._skips = True

    @torch.no_grad()
    def update(self, version: int, *, keep_base: bool) -> None:
        """Makes `version` from version - 1 with the gathered gradients, which are then gone.

        It is made in place, unless the base is still needed (`keep_base`). Then it goes into the memory of a retired
        version or, while there is none, into new memory: a few parameters at a time, in place of their gradients.
        """
        base, gradients = self._stash[version - 1], self.gradients()
        self._gathered = None

        # The base's own leaves, those of a retired version with its values, or none yet: `_make` makes these.
        target: list[nn.Parameter | None] = [None] * len(base)
        if not keep_base:
            target = [*base]
        elif self._spare:
            target = [*self._copy(base)]

        if self._learning_rate is not None:
            self.optimizer.learning_rate = self._learning_rate(version)

        def new_bytes(place: int) -> int:
            copy_bytes, master = base[place].nbytes if target[place] is None else 0, self._masters[place]
            return copy_bytes + (0 if master is None else master.nbytes)

        for few in in_buckets(range(len(base)), new_bytes):
            self._make(few, base, target, gradients)

        self._stash[version] = tuple(leaf for leaf in target if leaf is not None)
        if not keep_base:
            del self._stash[version - 1]
            self._in_place = version if self._in_place == version - 1 else self._in_place
        self._factor, self._skips = None, False
        states = sum(map(len, self.optimizer.states.values()))
        if states != self._states:  # an optimizer makes a state when it first needs it, and then keeps its size
            self._states, self._optimizer_bytes = states, None

    def _make(
        self,
        few: Sequence[int],
        base: Sequence[nn.Parameter],
        target: list[nn.Parameter | None],
        gradients: list[Tensor | None],
    ) -> None:
        """Steps with some gradients, rounds weights that have a master, and drops the gradients.

        Weights without a gradient stay as they are, and only a few gradients exist in float32 at a time.
        """
        updated: dict[int, Tensor] = {}
        taken: dict[int, Tensor] = {}
        for i in few:
            there = target[i]
            leaf = target[i] = self._clone(base[i], i) if there is None else there
            gradient = gradients[i]
            if gradient is None or self._skips:
                continue
            master = self._masters[i]
            weight = leaf.detach() if master is None else master
            if master is not None:
                gradient = gradient.float()
            if self._factor is not None:
                if gradient.dtype in SIXTEEN_BITS:  # else the factor would be rounded to 16 bits
                    gradient.copy_(gradient.float().mul_(self._factor))
                else:
                    gradient.mul_(self._factor)
            updated[i], taken[i] = weight, _laid_out_as(weight, gradient)

        self.optimizer.step(updated, taken)
        for i in few:
            made, master = target[i], self._masters[i]
            gradients[i] = None
            if i in updated and master is not None and made is not None:
                made.copy_(master)

    def retire(self, version: int, *, keep: bool = True) -> None:
        """Releases a version's memory for the next update, or (without `keep`) for anything else."""
        if version in self._stash:
            leaves = self._stash.pop(version)
            if keep:
                self._spare.append(leaves)
            else:  # by hand: a `Slot` may still refer to the leaves, and must not keep the memory that is theirs alone
                for leaf in leaves:
                    storage = leaf.untyped_storage()
                    if storage.nbytes() == leaf.nbytes and storage.resizable():  # memory of NumPy or of a file is not
                        storage.resize_(0)
            self._in_place = -1 if self._in_place == version else self._in_place

    def version_tensors(self, version: int) -> dict[str, Tensor]:
        """A version's tensors by their names in the whole model."""
        pairs = zip(self.slots, self._stash[version], strict=True)
        return {slot.name: parameter.detach() for slot, parameter in pairs}

    @torch.no_grad()
    def load_version(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Adds a version, from tensors by name."""
        leaves = self._stash.get(version) or self._copy(next(iter(self._stash.values())))
        for slot, parameter in zip(self.slots, leaves, strict=True):
            parameter.copy_(tensors[slot.name])
        self._stash[version] = leaves

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's states as `state/parameter name`; of float32 copies as well."""
        masters = {
            f"{MASTER}/{slot.name}": master
            for slot, master in zip(self.slots, self._masters, strict=True)
            if master is not None
        }
        return masters | {
            f"{key}/{slot.name}": value
            for place, slot in enumerate(self.slots)
            for key, value in self.optimizer.states.get(place, {}).items()
        }

    def load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets the optimizer's states from `optimizer_tensors`. Raises InvalidInputError without masters."""
        for slot, master in zip(self.slots, self._masters, strict=True):
            found = master is None or f"{MASTER}/{slot.name}" in tensors
            require(found, "resume", "must be a checkpoint of a run with master weights", slot.name)
        places = {slot.name: place for place, slot in enumerate(self.slots)}
        for full_key, value in tensors.items():
            key, name = full_key.split("/", 1)
            if key not in (MASTER, *self.optimizer.state_names):  # of the optimizer that the run had before
                continue
            place = places[name]
            master, weight = self._masters[place], self.slots[place].parameter
            if key != MASTER:
                state = _laid_out_as(weight, value) if value.shape == weight.shape else value
                self.optimizer.states[place][key] = state.clone()
            elif master is not None:
                master.copy_(value)
        self._optimizer_bytes = None

    def _clone(self, parameter: nn.Parameter, place: int) -> nn.Parameter:
        rule = "must have no hook (register_hook) where several versions of it are kept: use a schedule that flushes"
        require(not parameter._backward_hooks, f"model.{self.slots[place].name}", rule, "one with a hook")
        return self._graded_in_float32(nn.Parameter(parameter.detach().clone()), place)

    def _graded_in_float32(self, leaf: nn.Parameter, place: int) -> nn.Parameter:
        """The leaf, whose gradients add up in float32 where it has a master."""
        if self._has_master[place]:
            leaf.grad_dtype = torch.float32
        return leaf

    def _copy(self, base: Sequence[nn.Parameter]) -> tuple[nn.Parameter, ...]:
        if not self._spare:
            return tuple(self._clone(parameter, place) for place, parameter in enumerate(base))
        leaves = self._spare.pop()
        if leaves:
            torch._foreach_copy_([leaf.detach() for leaf in leaves], [parameter.detach() for parameter in base])
        return leaves


def _laid_out_as(weight: Tensor, tensor: Tensor) -> Tensor:
    """The tensor with a weight's strides."""
    if tensor.stride() == weight.stride():
        return tensor
    return torch.empty_like(weight, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
