"""Footprint: what a worker holds after each instruction of its stream, in counts. Readers turn counts into bytes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from operator import add
from typing import get_args

from pipeplan.programs.instructions import (
    COMPUTE,
    Backward,
    BackwardInput,
    BackwardWeight,
    Checkpoint,
    Forward,
    Instruction,
    Recompute,
    StartReduce,
    Update,
    is_transfer,
)

_BACKWARD = (Backward, BackwardInput, BackwardWeight)


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
    last: dict[int, int] = {}
    newest = 0
    for index, instruction in enumerate(instructions):
        if type(instruction) in COMPUTE:
            last[instruction.version] = index  # type: ignore[union-attr]  # compute is on a version
        elif isinstance(instruction, Update):
            last[instruction.version - 1] = index
            newest = max(newest, instruction.version)
        elif isinstance(instruction, Checkpoint):
            last.update(dict.fromkeys(range(instruction.oldest, instruction.version + 1), index))
    last[newest] = len(instructions)
    return last


def versions_needed(instruction: Instruction) -> Sequence[int]:
    """The weight versions that must be there for an instruction."""
    if is_transfer(instruction):
        return ()
    match instruction:
        case Forward() | Recompute() | Backward() | BackwardInput() | BackwardWeight():
            return (instruction.version,)
        case Update():
            return (instruction.version - 1,)
        case Checkpoint():
            return range(instruction.oldest, instruction.version + 1)
        case _:
            return ()


def first_versions(instructions: Sequence[Instruction]) -> tuple[int, ...]:
    """The versions that must exist before the stream starts: those it uses and does not make."""
    return _not_made(instructions, last_uses(instructions))


def _not_made(instructions: Sequence[Instruction], used: Iterable[int]) -> tuple[int, ...]:
    made = {i.version for i in instructions if type(i) is Update}
    return tuple(sorted(v for v in used if v not in made))


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

    Plain tuples are faster on long streams.     `settled`: for a backward by block, what is held after its end.
    """
    kinds = [type(instruction) for instruction in instructions]
    whole, inputs = _INPUTS_KEPT if by_block else _INPUT_KEPT if recompute else _ALL_KEPT
    spikes = by_block and not settled
    running = [kind is Backward for kind in kinds] if spikes else repeat(0, len(kinds))
    deferred_changes = [_DEFERRED[kind] for kind in kinds]
    for index, instruction in enumerate(instructions):
        if isinstance(instruction, BackwardWeight):
            deferred_changes[index] = -len(instruction.microbatches)
    last = last_uses(instructions)
    version_changes = [_MADE[kind] for kind in kinds]
    for index in last.values():
        if index < len(kinds):
            version_changes[index] -= 1
    versions: Iterator[int] = accumulate(version_changes, initial=len(_not_made(instructions, last)))
    next(versions)
    if spikes:  # a version that a backward is the last to use is there while it runs
        freed = (-change if runs else 0 for change, runs in zip(version_changes, running, strict=True))
        versions = map(add, versions, freed)
    return zip(
        map(add, accumulate([whole[kind] for kind in kinds]), running),
        accumulate([inputs[kind] for kind in kinds]),
        versions,
        accumulate(deferred_changes),
        _further_gradients(instructions) if StartReduce in kinds else repeat(0, len(kinds)),
        strict=True,
    )


def _further_gradients(instructions: Sequence[Instruction]) -> Iterator[int]:
    """Sets of gradients beyond the one that is always there, after each instruction.

    A set counts while it is exchanged: from the backward that completes it to its update. Another worker's set counts
    from the start of its exchange. One more set counts while it gathers.
    """
    exchanged: set[int] = set()
    gathers, own = False, None
    further = 0
    for instruction, following in pairwise((*instructions, None)):
        if isinstance(instruction, _BACKWARD):  # most are: the others are few
            gathers = own is None
            if own is not None:
                exchanged.add(own)
                own = None
        elif isinstance(instruction, StartReduce):
            own = instruction.version if isinstance(following, Backward | BackwardWeight) else None
            exchanged |= {instruction.version} if own is None else set()
        elif isinstance(instruction, Update):
            gathers = gathers and instruction.version in exchanged
            exchanged.discard(instruction.version)
        else:
            yield further
            continue
        further = max(len(exchanged) + gathers - 1, 0)
        yield further


def _changes(**changes: int) -> dict[type[Instruction], int]:
    """By how much instructions of each kind change a number."""
    return {kind: changes.get(kind.__name__, 0) for kind in get_args(Instruction)}


_ALL_KEPT = _changes(Forward=1, Backward=-1, BackwardInput=-1), _changes()
_INPUT_KEPT = _changes(Recompute=1, Backward=-1, BackwardInput=-1), _changes(Forward=1, Recompute=-1)
_INPUTS_KEPT = _changes(), _changes(Forward=1, Backward=-1)
_DEFERRED = _changes(BackwardInput=1)
_MADE = _changes(Update=1)
"""By how much each kind of instruction changes a count: of microbatches kept whole, of those whose input is kept, of
those that wait for p2, and of weight versions."""
