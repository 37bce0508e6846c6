"""The text form of instructions and streams, for logs, tests and bug reports. It parses back.

F3@1   Forward of microbatch 3 on weight version 1 (version 0 is not written: F3)
R3@1   Recompute            B3@1   Backward
I3@1   BackwardInput (p1)   W3,4@1 BackwardWeight (p2), one microbatch or several
>F3:1  SendActivation of microbatch 3 to rank 1      <F3:0  RecvActivation from rank 0
>B3:0  SendGradient to rank 0                        <B3:1  RecvGradient from rank 1
S2     StartReduce for version 2         G2  ReduceGradients for version 2, G2:1 of those of rank 1
U2     Update that makes version 2
T2:0,3 ReduceTied for version 2, among the stages 0 and 3        N2  ReduceNorm for version 2
C2@1   Checkpoint at version 2 with the versions from 1 on
F3.1@2 the same forward through chunk 1 of a rank that holds several stages (chunk 0 is not written)
"""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import assert_never

from pipeplan.errors import InvalidInputError
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
    ReduceNorm,
    ReduceTied,
    SendActivation,
    SendGradient,
    StartReduce,
    Update,
)

_ON_VERSION: dict[str, Callable[[int, int, int], Instruction]] = {
    "F": Forward,
    "R": Recompute,
    "B": Backward,
    "I": BackwardInput,
    "C": Checkpoint,
}
_TRANSFERS: dict[str, Callable[[int, int, int], Instruction]] = {
    ">F": SendActivation,
    "<F": RecvActivation,
    ">B": SendGradient,
    "<B": RecvGradient,
}
_ON_STAGE: dict[str, Callable[[int, int, int | None], Instruction]] = {"S": StartReduce, "G": ReduceGradients}
_LETTER: dict[object, str] = {
    cls: letter for table in (_ON_VERSION, _TRANSFERS, _ON_STAGE) for letter, cls in table.items()
}
_WORK = (Forward, Recompute, Backward, BackwardInput)
_TRANSFER = (SendActivation, RecvActivation, SendGradient, RecvGradient)
_PATTERN = re.compile(r"([<>]?[A-Z])(\d+(?:,\d+)*)(?:\.(\d+))?(?:([@:])(\d+(?:,\d+)*))?")


def format_instruction(instruction: Instruction) -> str:
    """The instruction's text form."""
    if isinstance(instruction, _WORK):
        text = f"{_LETTER[type(instruction)]}{instruction.microbatch}{_chunk(instruction)}"
        return f"{text}@{instruction.version}" if instruction.version else text
    if isinstance(instruction, _TRANSFER):
        return f"{_LETTER[type(instruction)]}{instruction.microbatch}{_chunk(instruction)}:{instruction.peer}"
    match instruction:
        case BackwardWeight():
            numbers = ",".join(str(k) for k in instruction.microbatches)
            return f"W{numbers}{_chunk(instruction)}{_version(instruction.version)}"
        case StartReduce() | ReduceGradients():
            source = "" if instruction.source is None else f":{instruction.source}"
            return f"{_LETTER[type(instruction)]}{instruction.version}{_chunk(instruction)}{source}"
        case Update():
            return f"U{instruction.version}{_chunk(instruction)}"
        case ReduceNorm():
            return f"N{instruction.version}"
        case ReduceTied():
            return f"T{instruction.version}:{','.join(str(stage) for stage in instruction.stages)}"
        case Checkpoint():
            return f"C{instruction.version}{_chunk(instruction)}{_version(instruction.oldest)}"
        case _:
            assert_never(instruction)


@lru_cache(maxsize=65536)
def parse_instruction(text: str) -> Instruction:
    """The instruction that `format_instruction` writes as this text. Raises InvalidInputError for any other text."""
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise _unreadable(text)
    letter, numbers, of_chunk, mark, tail = found.groups()
    chunk = int(of_chunk or 0)
    first, *more = (int(n) for n in numbers.split(","))
    alone = of_chunk is None and not more
    if letter == "N" and mark is None and alone:
        return ReduceNorm(first)
    if letter == "T" and mark == ":" and alone:
        return ReduceTied(first, tuple(int(n) for n in tail.split(",")))
    if (tail and "," in tail) or (more and letter != "W"):
        raise _unreadable(text)
    if letter == "W" and mark != ":":
        return BackwardWeight((first, *more), int(tail or 0), chunk)
    if letter in _ON_VERSION and mark != ":":
        return _ON_VERSION[letter](first, int(tail or 0), chunk)
    if letter in _TRANSFERS and mark == ":":
        return _TRANSFERS[letter](first, int(tail), chunk)
    if letter in _ON_STAGE and mark != "@":
        return _ON_STAGE[letter](first, chunk, int(tail) if tail else None)
    if letter == "U" and mark is None:
        return Update(first, chunk)
    raise _unreadable(text)


def format_stream(instructions: Iterable[Instruction]) -> str:
    """A stream on one line: `F1 >F1:1 <B1:1 B1 U1`."""
    return " ".join(format_instruction(i) for i in instructions)


def parse_stream(text: str) -> tuple[Instruction, ...]:
    """The stream that `format_stream` writes so."""
    return tuple(parse_instruction(word) for word in text.split())


def _chunk(instruction: Instruction) -> str:
    return f".{instruction.chunk}" if instruction.chunk else ""


def _version(version: int) -> str:
    return f"@{version}" if version else ""


def _unreadable(text: str) -> InvalidInputError:
    return InvalidInputError("instruction", "must be an instruction's text form such as F3@1, >F3:1 or U2", text)
