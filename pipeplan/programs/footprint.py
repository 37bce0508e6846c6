"""Footprint: what a worker holds after each instruction of its stream, in counts. Readers turn counts into bytes."""

from collections.abc import Iterable, Iterator, Sequence
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
    return _last_uses(instructions, _numbered(instructions))


def _last_uses(instructions: Sequence[Instruction], kinds: KindArray) -> dict[int, int]:
    computes = np.flatnonzero(_COMPUTES[kinds]).tolist()
    versions = map(attrgetter("version"), compress(instructions, _COMPUTES[kinds].tolist()))
    last: dict[int, int] = dict(zip(versions, computes, strict=True))
    updates = _UPDATES[kinds]
    made = list(map(attrgetter("version"), compress(instructions, updates.tolist())))
    needed = [(version - 1, index) for version, index in zip(made, np.flatnonzero(updates).tolist(), strict=True)]
    for index in np.flatnonzero(kinds == NUMBERS[Checkpoint]).tolist():
        needed += [(version, index) for version in versions_needed(instructions[index])]
    for version, index in needed:
        if last.get(version, -1) < index:
            last[version] = index
    newest = max(made, default=0)
    last[newest] = len(instructions)
    return last


def first_versions(instructions: Sequence[Instruction]) -> tuple[int, ...]:
    """The versions that must exist before the stream starts: those it uses and does not make."""
    kinds = _numbered(instructions)
    return _not_made(instructions, kinds, _last_uses(instructions, kinds))


def _not_made(instructions: Sequence[Instruction], kinds: KindArray, used: Iterable[int]) -> tuple[int, ...]:
    updates = compress(instructions, _UPDATES[kinds].tolist())
    made = {update.version for update in updates if isinstance(update, Update)}
    return tuple(sorted(v for v in used if v not in made))


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
    last = _last_uses(instructions, kinds)
    ends = np.asarray(sorted(last.values()), dtype=np.int64)
    made = _MADE[kinds] - np.bincount(ends[ends < len(kinds)], minlength=len(kinds))
    deferred = _DEFERRED[kinds]
    for index in np.flatnonzero(kinds == NUMBERS[BackwardWeight]).tolist():
        deferred[index] = -len(microbatches_of(instructions[index]))
    return np.stack(
        [
            np.cumsum(whole[kinds]) + spikes,
            np.cumsum(inputs[kinds]),
            # A version that a backward is the last to use is there while it runs.
            len(_not_made(instructions, kinds, last)) + np.cumsum(made) - np.where(spikes, made, 0),
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
