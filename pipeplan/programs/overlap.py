"""Overlap: gradient exchanges among replicas that run while their workers compute. A pass over any streams.

An exchange begins (S) with the backward that completes the gradients. The worker waits for it (G) before the update.
The update comes as late as its schedule allows: before the first instruction that names the new version. With a flush
the update stays where it was. Under PipeDream-2BW it is almost a batch later, as the paper's cost model (2021, appendix
A.1.1) assumes.

1f1b            F1 F3 B1 S1 B3 G1 U1 F5@1 F7@1 ...
pipedream-2bw   F1 B1 F3 S1 B3 F5 B5 F7 S2 B7 G1 U1 F9@1 B9@1 F11@1 S3 B11@1 G2 U2 F13@2 ...
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Checkpoint,
    Forward,
    Instruction,
    Recompute,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    StartReduce,
    Update,
)
from pipeplan.programs.program import Program

_ON_A_VERSION = (Forward, Recompute, Backward, BackwardInput, BackwardWeight)
_BACKWARD = (Backward, BackwardInput, BackwardWeight)
_BEFORE_WORK = (RecvActivation, RecvGradient, Recompute, ReduceGradients, Update, Checkpoint)
"""The instructions that prepare a computation: an update goes before them."""


def overlap_exchanges(program: Program) -> Program:
    """The program with every exchange begun as early, and every update made as late, as its schedule allows.

    The weights stay the same bit for bit. At most two sets of gradients are held on a stage: one that is exchanged and
    one that gathers. A checkpoint goes with its update. An update for which stages meet (`exchange_among_stages`) stays
    where it is. If separate instructions compute the weights' gradients (2BP's p2, ZB-H1), the last of them completes
    the gradients.
    """
    streams = (replace(s, instructions=_overlapping(s.rank, s.instructions)) for s in program.streams)
    return replace(program, streams=tuple(streams))


def _overlapping(rank: int, instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """One worker's stream, built from its last exchange to its first: the next update limits the place of each."""
    if ReduceGradients not in map(type, instructions):
        return tuple(instructions)
    starts: dict[int, list[Instruction]] = defaultdict(list)
    updates: dict[int, list[Instruction]] = defaultdict(list)
    moved: set[int] = set()
    following: dict[int, tuple[int, int]] = {}  # by chunk, where the next version's exchange stood and where it stands
    places = [index for index, kind in enumerate(map(type, instructions)) if kind is ReduceGradients]
    exchanges = [(index, one) for index in places if isinstance(one := instructions[index], ReduceGradients)]
    for index, exchange in reversed(exchanges):
        # A worker's own gradients begin with the backward that completes them. Those of others are expected from its
        # own last update on: at that point none of theirs are in transit.
        before = ((i, instructions[i]) for i in range(index - 1, -1, -1))
        if exchange.source in (None, rank):
            beginning = next(i for i, one in before if isinstance(one, _BACKWARD) and one.chunk == exchange.chunk)
        else:
            own = (i for i, one in before if isinstance(one, ReduceGradients) and one.source == rank)
            beginning = next((_end(instructions, i) for i in own), 0)
        starts[beginning].insert(0, StartReduce(exchange.version, exchange.chunk, exchange.source))

        end = _end(instructions, index)
        place = end
        if exchange.source is None and end > index + 1:
            stood, stands = following.get(exchange.chunk, (len(instructions), len(instructions)))
            place = _latest(instructions, end, exchange, stood, stands)
        following[exchange.chunk] = index, index if place == end else place
        if place > end:
            updates[place][:0] = instructions[index:end]
            moved.update(range(index, end))

    merged: list[Instruction] = []
    done = 0
    for index in sorted({*updates, *starts, *moved}):
        merged += (*instructions[done:index], *updates.get(index, ()), *starts.get(index, ()))
        done = index + (index in moved)
    return (*merged, *instructions[done:])


def _latest(instructions: Sequence[Instruction], end: int, exchange: ReduceGradients, stood: int, stands: int) -> int:
    """The latest place for the exchange and its update: the instruction before which they stand, or `end` to stay.

    Three things limit the place: the first instruction that names the version; the exchange for the next version, which
    has been moved to the place `stands`; and the first backward after the place where that exchange `stood` before.
    That backward adds to the gradients of yet another version: they would be a third set.
    """
    version, chunk, place = exchange.version, exchange.chunk, stands
    for i in range(end, stands):
        own = instructions[i]
        if not isinstance(own, _ON_A_VERSION) or own.chunk != chunk:
            continue
        if own.version == version or (i > stood and isinstance(own, _BACKWARD)):
            place = i
            break
    while end < place and isinstance(instructions[place - 1], _BEFORE_WORK):
        place -= 1
    return place


def _end(instructions: Sequence[Instruction], index: int) -> int:
    """The place after the exchange, its update and its checkpoint, as far as these follow."""
    kinds = (ReduceGradients, Update, Checkpoint)
    chunk = instructions[index].chunk
    end = index
    for kind, instruction in zip(kinds, instructions[index : index + 3], strict=False):
        if not isinstance(instruction, kind) or instruction.chunk != chunk:
            break
        end += 1
    return end
