"""Footprint: what a worker holds after each instruction of its stream, in counts. Readers turn counts into bytes."""

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
    """What is held after an instruction: microbatches with all activations or only the input, and live weight versions.

    A stage that recomputes by block has activations only during a backward, which frees them. For a backward the counts
    are those while it runs.
    `weight_gradients` are the microbatches between 2BP's p1 and p2, of which only what p2 needs is kept. `gradients`
    are the sets of gradients beyond the one that every stage has: the sets that are exchanged while another gathers.
    """

    activations: int
    inputs: int
    versions: int
    weight_gradients: int = 0
    gradients: int = 0

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
    """What is held after each instruction of one worker's stream."""
    counts = held_counts(instructions, recompute=recompute, by_block=by_block)
    for activations, inputs, versions, weight_gradients, gradients in counts:
        yield Held(
            activations=activations,
            inputs=inputs,
            versions=versions,
            weight_gradients=weight_gradients,
            gradients=gradients,
        )


def held_counts(
    instructions: Sequence[Instruction], *, recompute: bool, by_block: bool = False, settled: bool = False
) -> Iterator[tuple[int, int, int, int, int]]:
    """The counts of `Held` as plain tuples (activations, inputs, versions, weight gradients, gradients).

    `settled`: for a backward by block, what is held after its end.
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
    made = _MADE[kinds] - np.bincount(needed.last[needed.last < len(kinds)], minlength=len(kinds))
    deferred = _DEFERRED[kinds]
    for index in np.flatnonzero(kinds == NUMBERS[BackwardWeight]).tolist():
        deferred[index] = -len(microbatches_of(instructions[index]))
    return np.stack(
        [
            np.cumsum(whole[kinds]) + spikes,
            np.cumsum(inputs[kinds]),
            # A version that a backward is the last to use is there while it runs.
            np.count_nonzero(~needed.made) + np.cumsum(made) - np.where(spikes, made, 0),
            np.cumsum(deferred),
            _further_gradients(instructions, kinds),
        ]
    )


def _further_gradients(instructions: Sequence[Instruction], kinds: KindArray) -> IntArray:
    """Sets of gradients beyond the one that is always there, after each instruction.

    A set counts while it is exchanged: from the backward that completes it to its update. Another worker's set counts
    from the start of its exchange. One more set counts while it gathers: from the backward after that.
    """
    if not _EXCHANGES[kinds].any():
        return np.zeros(len(kinds), dtype=np.int64)
    places = np.flatnonzero(_EXCHANGES[kinds] | _UPDATES[kinds])
    backwards = np.flatnonzero(_BACKWARDS[kinds])
    after = np.searchsorted(backwards, places)
    nexts = [backwards[(after + step)[after + step < len(backwards)]] for step in (0, 1)]  # others change nothing
    exchanged: set[int] = set()
    gathers, own = False, None
    further, changes = [0], np.unique(np.concatenate([places, backwards[:1], *nexts]))
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
        further.append(max(len(exchanged) + gathers - 1, 0))
    return np.repeat(further, np.diff(changes, prepend=0, append=len(kinds)))


def _changes(**changes: int) -> IntArray:
    """By how much instructions of each kind, by number, change a count."""
    return np.asarray([changes.get(kind.__name__, 0) for kind in NUMBERS], dtype=np.int64)


def _are(*kinds: type[Instruction]) -> BoolArray:
    """Which numbers are of these kinds."""
    return np.asarray([kind in kinds for kind in NUMBERS])


_COMPUTES, _BACKWARDS, _EXCHANGES, _UPDATES = _are(*COMPUTE), _are(*_BACKWARD), _are(StartReduce), _are(Update)

_ALL_KEPT = _changes(Forward=1, Backward=-1, BackwardInput=-1), _changes()
_INPUT_KEPT = _changes(Recompute=1, Backward=-1, BackwardInput=-1), _changes(Forward=1, Recompute=-1)
_INPUTS_KEPT = _changes(), _changes(Forward=1, Backward=-1)
_DEFERRED = _changes(BackwardInput=1)
_MADE = _changes(Update=1)
"""By how much each kind of instruction changes a count: of microbatches kept whole, of those whose input is kept, of
those that wait for p2, and of weight versions."""
