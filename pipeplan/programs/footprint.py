"""Footprint: a worker's memory after each instruction of its stream, in counts. Readers turn counts into bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import TypeAlias

import numpy as np

from pipeplan.arrays import BoolArray, IntArray
from pipeplan.programs.instructions import (
    COMPUTE,
    NUMBERS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Checkpoint,
    Instruction,
    StartReduce,
    Update,
    microbatches_of,
    numbered,
    versions_needed,
)

KindArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]

_BACKWARD = (Backward, BackwardInput, BackwardWeight)
_COMPLETING = (Backward, BackwardWeight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The counts after an instruction: microbatches with all activations or only the input, and live weight versions.

    A stage that recomputes by block has activations only during a backward, which frees them. For a backward the counts
    are those while it runs.
    `weight_gradients` are the microbatches between 2BP's p1 and p2, of which only p2's inputs are kept. `gradients`
    says whether a set of gradients accumulates or is exchanged, `early_gradients` whether there are only those that p1
    makes, `further_gradients` counts the sets beyond one.
    """

    activations: int
    inputs: int
    versions: int
    weight_gradients: int = 0
    gradients: int = 0
    early_gradients: int = 0
    further_gradients: int = 0

    @property
    def in_flight(self) -> int:
        """Microbatches between forward and backward."""
        return self.activations + self.inputs


def last_uses(instructions: Sequence[Instruction]) -> dict[int, int]:
    """For every weight version, the index of the last instruction that needs it.

    An update needs the version before its own, a checkpoint the versions that it names. The newest is never released.
    """
    needed = _Needed.by(instructions, _numbered(instructions))
    return dict(zip(needed.versions.tolist(), needed.last.tolist(), strict=True))


def first_versions(instructions: Sequence[Instruction]) -> tuple[int, ...]:
    """The versions that must exist before the stream starts: those it uses and does not make."""
    needed = _Needed.by(instructions, _numbered(instructions))
    return tuple(needed.versions[~needed.made].tolist())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Needed:
    """The weight versions that a stream needs, ascending; the index of the last instruction that needs each of them,
    and whether the stream makes it.
    """

    versions: IntArray
    last: IntArray
    made: BoolArray

    @classmethod
    def by(cls, instructions: Sequence[Instruction], kinds: KindArray) -> "_Needed":
        """By these instructions, whose kinds are known."""
        computes, updates = np.flatnonzero(_COMPUTES[kinds]), np.flatnonzero(_UPDATES[kinds])
        used, made = _versions(instructions, _COMPUTES[kinds]), _versions(instructions, _UPDATES[kinds])
        newest = made.max(initial=0, keepdims=True), np.asarray([len(instructions)])
        needed = [(used, computes), (made - 1, updates), newest]
        for index in np.flatnonzero(kinds == NUMBERS[Checkpoint]).tolist():
            versions = np.asarray(versions_needed(instructions[index]))
            needed.append((versions, np.full_like(versions, index)))
        versions, places = (np.concatenate(each) for each in zip(*needed, strict=True))
        by_version = np.lexsort((places, versions))
        versions = versions[by_version]
        is_last = np.append(np.diff(versions) > 0, True)
        versions = versions[is_last]
        return cls(versions=versions, last=places[by_version][is_last], made=np.isin(versions, made))


def _versions(instructions: Sequence[Instruction], some: BoolArray) -> IntArray:
    """The versions of some of the instructions."""
    return np.fromiter(map(attrgetter("version"), compress(instructions, some.tolist())), dtype=np.int64)


def _numbered(instructions: Sequence[Instruction]) -> KindArray:
    """The kinds of instructions, as numbers."""
    return np.frombuffer(numbered(instructions), dtype=np.uint8)


def footprints(instructions: Sequence[Instruction], *, recompute: bool, by_block: bool = False) -> Iterator[Held]:
    """The counts after each instruction of one worker's stream."""
    counts = held_counts(instructions, recompute=recompute, by_block=by_block)
    for activations, inputs, versions, weight_gradients, gradients, early_gradients, further_gradients in counts:
        yield Held(
            activations=activations,
            inputs=inputs,
            versions=versions,
            weight_gradients=weight_gradients,
            gradients=gradients,
            early_gradients=early_gradients,
            further_gradients=further_gradients,
        )


def held_counts(
    instructions: Sequence[Instruction], *, recompute: bool, by_block: bool = False, settled: bool = False
) -> Iterator[tuple[int, ...]]:
    """The counts of `Held` as plain tuples, in the order of its fields.

    `settled`: for a backward by block, the counts after its end.
    """
    table = held_table(instructions, recompute=recompute, by_block=by_block, settled=settled)
    return zip(*table.tolist(), strict=True)


def held_table(
    instructions: Sequence[Instruction],
    *,
    recompute: bool,
    by_block: bool = False,
    settled: bool = False,
    numbers: bytes | None = None,
) -> IntArray:
    """[count, instruction]: the counts of `held_counts` in an array, which is faster on long streams.

    `numbers` are the instructions' kinds (`instructions.numbered`), where they are known.
    """
    kinds = _numbered(instructions) if numbers is None else np.frombuffer(numbers, dtype=np.uint8)
    whole, inputs = _INPUTS_KEPT if by_block else _INPUT_KEPT if recompute else _ALL_KEPT
    spikes = kinds == NUMBERS[Backward] if by_block and not settled else np.zeros(len(kinds), dtype=bool)
    needed = _Needed.by(instructions, kinds)
    made = _MADE[kinds] - np.bincount(_released(needed, kinds), minlength=len(kinds))
    deferred = _DEFERRED[kinds]
    sets = _gradient_sets(instructions, kinds)
    updated = _newest(kinds, _UPDATES)
    only_by_p1 = (_newest(kinds, _INPUT_ALONE) > updated) & (_newest(kinds, _COMPLETE) <= updated)
    early = only_by_p1.astype(np.int64)
    for index in np.flatnonzero(kinds == NUMBERS[BackwardWeight]).tolist():
        deferred[index] = -len(microbatches_of(instructions[index]))
    return np.stack(
        [
            np.cumsum(whole[kinds]) + spikes,
            np.cumsum(inputs[kinds]),
            # A version whose last use is a backward exists while it runs.
            np.count_nonzero(~needed.made) + np.cumsum(made) - np.where(spikes, made, 0),
            np.cumsum(deferred),
            np.minimum(sets, 1) - early,
            early,
            np.maximum(sets - 1, 0),
        ]
    )


def _released(needed: _Needed, kinds: KindArray) -> IntArray:
    """The index where each version is released: after its last use. If that is a backward, the version stays until the
    next update, which reuses its memory, unless gradients are exchanged in between.
    """
    last = needed.last[needed.last < len(kinds)]
    if _EXCHANGES[kinds].any():
        return last
    updates = np.append(np.flatnonzero(_UPDATES[kinds]), len(kinds))
    following = updates[np.searchsorted(updates, last)]
    return np.where(_BACKWARDS[kinds[last]] & (following < len(kinds)), following, last)


def _gradient_sets(instructions: Sequence[Instruction], kinds: KindArray) -> IntArray:
    """Sets of gradients after each instruction.

    A set counts while it accumulates: from a batch's first backward to the update, or to the start of its exchange. It
    then counts as exchanged: from the backward that completes it to its update. Another worker's set counts from the
    start of its exchange.
    """
    if not _EXCHANGES[kinds].any():
        newest = _newest(kinds, _BACKWARDS | _UPDATES)
        return np.where(newest >= 0, _BACKWARDS[kinds[newest]], False).astype(np.int64)
    places = np.flatnonzero(_EXCHANGES[kinds] | _UPDATES[kinds])
    backwards = np.flatnonzero(_BACKWARDS[kinds])
    after = np.searchsorted(backwards, places)
    nexts = [backwards[(after + step)[after + step < len(backwards)]] for step in (0, 1)]  # others change nothing
    exchanged: set[int] = set()
    gathers, own = False, None
    sets, changes = [0], np.unique(np.concatenate([places, backwards[:1], *nexts]))
    for index in changes.tolist():
        match instructions[index]:
            case StartReduce(version=version):
                completed = index + 1 < len(instructions) and isinstance(instructions[index + 1], _COMPLETING)
                own = version if completed else None
                exchanged |= set() if completed else {version}
            case Update(version=version):
                gathers = gathers and version in exchanged
                exchanged.discard(version)
            case _:
                gathers = own is None
                exchanged |= set() if own is None else {own}
                own = None
        sets.append(len(exchanged) + gathers)
    return np.repeat(sets, np.diff(changes, prepend=0, append=len(kinds)))


def _newest(kinds: KindArray, some: BoolArray) -> IntArray:
    """After each instruction, the index of the newest one of some kinds; -1 if there was none."""
    return np.maximum.accumulate(np.where(some[kinds], np.arange(len(kinds)), -1))


def _changes(**changes: int) -> IntArray:
    """The change of a count by instructions of each kind, by number."""
    return np.asarray([changes.get(kind.__name__, 0) for kind in NUMBERS], dtype=np.int64)


def _are(*kinds: type[Instruction]) -> BoolArray:
    """By number, whether it is of these kinds."""
    return np.asarray([kind in kinds for kind in NUMBERS])


_COMPUTES, _BACKWARDS, _EXCHANGES, _UPDATES = _are(*COMPUTE), _are(*_BACKWARD), _are(StartReduce), _are(Update)
_INPUT_ALONE, _COMPLETE = _are(BackwardInput), _are(*_COMPLETING)

_ALL_KEPT = _changes(Forward=1, Backward=-1, BackwardInput=-1), _changes()
_INPUT_KEPT = _changes(Recompute=1, Backward=-1, BackwardInput=-1), _changes(Forward=1, Recompute=-1)
_INPUTS_KEPT = _changes(), _changes(Forward=1, Backward=-1)
_DEFERRED = _changes(BackwardInput=1)
_MADE = _changes(Update=1)
"""The change by each kind of instruction of a count: of microbatches kept whole, of those whose input is kept, of those
that wait for p2, and of weight versions."""
