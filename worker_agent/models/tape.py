"""Tape: one forward of a module as steps in a row, and the sections of the parts that it is cut into.

A step is a call of a unit (a module that is not looked into) or of one of torch's functions between the units:

    self.norm(x + self.embed(tokens))      0 unit embed(v0) -> v2    1 add(v1, v2) -> v3    2 unit norm(v3) -> v4

The tape is the forward for all inputs of these shapes. It can be cut between any two steps; the values that later
steps use cross the cut. The steps make the forward's calls, each once and in the same order. A cut forward therefore
gives the outputs and gradients of the whole one to the last bit, and draws the same random numbers.

Constant steps depend on no input and no weight, as those of a causal mask. Every part that uses their results repeats
them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True)
class Ref:
    """A value's number, in its place among a step's arguments."""

    number: int


@dataclass(frozen=True, slots=True)
class Around:
    """torch's modes at a step: whether gradients are recorded, and autocast's type on the device (None: off)."""

    gradients: bool
    autocast: torch.dtype | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A call, its arguments with a `Ref` for each tensor, and the numbers of its results.

    `unit` is the name of the module that is called, or None. `changes` are the storages that the step writes in place,
    `touches` those of all its tensors. It `notes`: the unit changes its own buffers. `view`: it only makes views.
    `random`: it draws numbers. `nested`: some arguments are containers of values.
    """

    call: Callable[..., Any]
    unit: str | None
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    uses: frozenset[int]
    makes: tuple[int, ...]
    changes: frozenset[int]
    touches: frozenset[int]
    around: Around
    notes: bool = False
    view: bool = False
    random: bool = False
    nested: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Section:
    """A part's own work: it takes values, does steps, and gives values. `drops[i]` are not used after step i."""

    takes: tuple[int, ...]
    steps: tuple[Step, ...]
    drops: tuple[tuple[int, ...], ...]
    gives: tuple[int, ...]
    held: Mapping[int, tuple[str, str]]

    @property
    def units(self) -> tuple[str, ...]:
        """The units that it calls, each once."""
        return tuple(dict.fromkeys(step.unit for step in self.steps if step.unit is not None))


@dataclass(frozen=True, kw_only=True, eq=False)
class Tape:
    """A recorded forward. `held` are parameters and buffers by number, as (module, name); `captured` other tensors.

    `result` are the numbers of the returned values, in a tuple or `alone`; `storages` has every value's storage;
    `around` is the gradient mode and autocast at the start.
    """

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    held: Mapping[int, tuple[str, str]]
    captured: Mapping[int, Tensor]
    result: tuple[int, ...]
    alone: bool
    storages: Mapping[int, int]
    around: Around

    @cached_property
    def constant(self) -> tuple[bool, ...]:
        """Which steps are constant: they draw nothing, and touch no storage that follows from inputs or weights."""
        variable = {self.storages[number] for number in (*self.inputs, *self.held)}
        found = [not (step.random or step.unit) for step in self.steps]
        for _ in self.steps:  # a later write into a mask makes the mask's own steps variable as well
            before = list(found)
            for n, step in enumerate(self.steps):
                found[n] = found[n] and not step.touches & variable
                if not found[n]:  # storages that a step only reads do not depend on its others
                    variable |= step.touches & (step.changes | {self.storages[number] for number in step.makes})
            if found == before:
                break
        return tuple(found)

    def calls(self) -> tuple[tuple[int, tuple[str, int]], ...]:
        """The calls of units, as (step, (name, how many calls of the unit come before))."""
        calls: list[tuple[int, tuple[str, int]]] = []
        counts = Counter[str]()
        for n, step in enumerate(self.steps):
            if step.unit is not None:
                calls.append((n, (step.unit, counts[step.unit])))
                counts[step.unit] += 1
        return tuple(calls)

    def start_of(self, step: int) -> int:
        """The start of a part with this first step: the part also makes the views before it, from carried values."""
        while step and self.steps[step - 1].view and not self.constant[step - 1]:
            step -= 1
        return step

    def obstacle(self, start: int) -> str | None:
        """The reason why the tape cannot be cut at this step; None if it can."""
        touched: dict[int, list[int]] = {}
        changed: dict[int, int] = {}
        noted: dict[str, list[int]] = {}
        for n, step in enumerate(self.steps):
            if self.constant[n]:
                continue
            for storage in step.touches:
                touched.setdefault(storage, []).append(n)
            changed |= dict.fromkeys(step.changes, n)
            if step.notes and step.unit is not None:
                noted.setdefault(step.unit, []).append(n)
        given = {self.storages[number] for number in self.inputs}
        held = {self.storages[number] for number in self.held}
        for storage, last in changed.items():
            first = -1 if storage in given else touched[storage][0]
            if first < start <= (touched[storage][-1] if storage in held else last):
                return "a tensor and what changes it in place"
        for unit, places in noted.items():
            if places[0] < start <= places[-1]:
                return f"two calls of {unit}, which changes its buffers"
        return None

    def carried(self, start: int) -> tuple[int, ...]:
        """The values that a part which begins here takes, in the order in which they were made."""
        made = dict.fromkeys(self.inputs, -1)
        used = set(self.result)
        for n, step in enumerate(self.steps):
            if not self.constant[n]:
                made = dict.fromkeys(step.makes, n) | made
                used |= step.uses if n >= start else set()
        return tuple(sorted(number for number in used if made.get(number, start) < start))

    def section(self, start: int, stop: int) -> Section:
        """The section of the part with steps [start, stop)."""
        last = stop == len(self.steps)
        gives = self.result if last else self.carried(stop)
        takes = self.carried(start) if start else self.inputs
        own = [n for n in range(start, stop) if not self.constant[n]]
        used = set[int]().union(gives, *(self.steps[n].uses for n in own))
        wanted = {self.storages[number] for number in used}
        for n in reversed(range(len(self.steps))):
            step = self.steps[n]
            if self.constant[n] and (wanted & step.changes or wanted & {self.storages[m] for m in step.makes}):
                own.append(n)
                wanted |= step.touches
        steps = [self.steps[n] for n in sorted(own)]
        kept, drops = set(gives), list[tuple[int, ...]]()
        for step in reversed(steps):
            ends = (step.uses | set(step.makes)) - kept
            kept |= ends
            drops.append(tuple(ends))
        used = used.union(*(step.uses for step in steps))
        return Section(
            takes=takes,
            steps=tuple(steps),
            drops=tuple(reversed(drops)),
            gives=gives,
            held={number: place for number, place in self.held.items() if number in used},
        )


def refs_in(arguments: Any) -> frozenset[int]:
    return frozenset(leaf.number for leaf in tree_leaves(arguments) if isinstance(leaf, Ref))


def is_nested(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether values stand deeper among the arguments than as arguments themselves."""
    own = [each for each in (*arguments[0], *arguments[1].values()) if isinstance(each, Ref)]
    return len(own) != sum(isinstance(leaf, Ref) for leaf in tree_leaves(arguments))


def starts_of(tape: Tape, begins: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """Where parts begin that begin with these units, each with the n-th call of it (from 0). Raises KeyError."""
    places = {begin: step for step, begin in tape.calls()}
    return (0, *(tape.start_of(places[begin]) for begin in begins[1:]))
