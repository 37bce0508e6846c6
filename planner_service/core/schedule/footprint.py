"""Footprint: what a worker holds after each instruction of its stream, in counts. Bytes are the reader's business."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner_service.core.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Checkpoint,
    Forward,
    Instruction,
    Recompute,
    Update,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """After one instruction: microbatches with all activations kept, with the input only, live weight versions."""

    activations: int
    inputs: int
    versions: int

    @property
    def in_flight(self) -> int:
        """Microbatches between forward and backward."""
        return self.activations + self.inputs


def last_uses(instructions: Sequence[Instruction]) -> dict[int, int]:
    """For every weight version, the index of the last instruction that needs it.

    An update needs the version before it, a checkpoint those it names; the newest version of all is never released.
    """
    last: dict[int, int] = {}
    newest = 0
    for index, instruction in enumerate(instructions):
        match instruction:
            case Forward() | Recompute() | Backward() | BackwardInput() | BackwardWeight():
                last[instruction.version] = index
            case Checkpoint(version=version, oldest=oldest):
                last.update(dict.fromkeys(range(oldest, version + 1), index))
            case Update(version=version):
                last[version - 1] = index
                newest = max(newest, version)
            case _:
                pass
    last[newest] = len(instructions)
    return last


def first_versions(instructions: Sequence[Instruction]) -> tuple[int, ...]:
    """The versions that must exist before the stream starts: those it uses and does not make."""
    made = {i.version for i in instructions if isinstance(i, Update)}
    return tuple(sorted(v for v in last_uses(instructions) if v not in made))


def footprints(instructions: Sequence[Instruction], *, recompute: bool) -> Iterator[Held]:
    """What is held after each instruction of one worker's stream."""
    last = last_uses(instructions)
    live = set(first_versions(instructions))
    full: set[int] = set()
    inputs: set[int] = set()
    for index, instruction in enumerate(instructions):
        match instruction:
            case Forward(microbatch=k):
                (inputs if recompute else full).add(k)
            case Recompute(microbatch=k):
                inputs.discard(k)
                full.add(k)
            case Backward(microbatch=k):
                full.discard(k)
            case BackwardWeight(microbatches=numbers):
                full.difference_update(numbers)
            case Update(version=version):
                live.add(version)
            case _:
                pass
        live = {v for v in live if last[v] > index}
        yield Held(activations=len(full), inputs=len(inputs), versions=len(live))
