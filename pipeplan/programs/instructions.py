"""The instructions that a worker executes, in the order in which its stream lists them.

Microbatches are numbered from 1 through the whole run, as in the papers' figures, over all replicas. Microbatch k holds
the samples [(k - 1) b, k b). On every stage replica (k - 1) mod replicas computes it. Weight version v is the stage's
weights after v updates. If a rank has several stages, `chunk` says which of them an instruction is for (`pipeline`).
Each chunk counts its own versions and microbatches.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, get_args

KEPT = 2**15
"""Upper bound on the cached instructions of each kind: making one takes seven times as long as finding it."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Computes the stage's output for a microbatch on a weight version.

    Waits for nothing: its input was received before. Keeps what the backward needs. A stage that recomputes keeps only
    its input; a stage that recomputes by block keeps the input of every block.
    """

    microbatch: int
    version: int = 0
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Recompute:
    """Runs the stage's forward again from the kept input, on the forward's version; keeps what the backward needs.

    It needs no gradient, so it can run while the gradient is still on its way.
    """

    microbatch: int
    version: int = 0
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    """Computes the gradients of the stage's input and of its weights (added to those of the batch) in one go.

    A stage that recomputes by block has no Recompute: here it goes from the last block to the first, and runs each
    one's forward again right before its backward. Releases everything that the microbatch kept.
    """

    microbatch: int
    version: int = 0
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """2BP's backward-p1: the gradient of the stage's input alone.

    Keeps what BackwardWeight needs, inputs and output gradients of the layers with weights, and releases the rest.
    """

    microbatch: int
    version: int = 0
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """2BP's backward-p2 for one microbatch, or for several concatenated: the gradient of the weights.

    Releases everything that these microbatches kept.
    """

    microbatches: tuple[int, ...]
    version: int = 0
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class SendActivation:
    """Hands the stage's output to the next stage's worker; never blocks what follows."""

    microbatch: int
    peer: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class RecvActivation:
    """Waits for the stage's input from the previous stage."""

    microbatch: int
    peer: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Hands the gradient of the stage's input to the stage before; never blocks what follows."""

    microbatch: int
    peer: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class RecvGradient:
    """Waits for the gradient of the stage's output from the next stage."""

    microbatch: int
    peer: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class StartReduce:
    """Begins the exchange of the gradients for `version` among the stage's replicas; waits for nobody.

    Stands right before the backward that completes them: each gradient leaves as soon as it is complete, while the
    worker goes on. With a `source` that rank alone has them, and sends them to all others, wherever these are.
    """

    version: int
    chunk: int = 0
    source: int | None = None


@dataclass(frozen=True, slots=True)
class ReduceGradients:
    """Averages the gradients for `version` over the stage's replicas; waits until all of them are through.

    Where no StartReduce began the exchange, it begins here. With a `source` the gradients are those of that rank, which
    has them and does not wait for what it sends.
    """

    version: int
    chunk: int = 0
    source: int | None = None


@dataclass(frozen=True, slots=True)
class ReduceTied:
    """Sums the gradients for `version` of the weights that these stages share; waits for all of the stages.

    Each exchange is among one replica of every stage: their gradients are averages over the replicas already. A rank
    takes part once for all of its stages, as chunk 0.
    """

    version: int
    stages: tuple[int, ...]
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class ReduceNorm:
    """Agrees on the norm of the whole model's gradient for `version`; waits for all workers of all stages.

    The updates that follow scale their gradients by what the norm says, or leave the weights as they are. A rank takes
    part once for all of its stages, as chunk 0.
    """

    version: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """Makes weight version `version` from version - 1 with the gradients gathered since the last update.

    Releases the versions that no later instruction names.
    """

    version: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Writes the stage's state at weight version `version`: a run that is resumed there computes the same.

    Needs the versions [oldest, version]: a schedule without a flush goes on computing on older ones.
    """

    version: int
    oldest: int
    chunk: int = 0


@lru_cache(maxsize=KEPT)
def forward(microbatch: int, version: int = 0, chunk: int = 0) -> Forward:
    """A Forward, which the streams of all stages share."""
    return Forward(microbatch, version, chunk)


@lru_cache(maxsize=KEPT)
def backward(microbatch: int, version: int = 0, chunk: int = 0) -> Backward:
    """A Backward, which the streams of all stages share."""
    return Backward(microbatch, version, chunk)


@lru_cache(maxsize=KEPT)
def recompute(microbatch: int, version: int = 0, chunk: int = 0) -> Recompute:
    """A Recompute, which the streams of all stages share."""
    return Recompute(microbatch, version, chunk)


@lru_cache(maxsize=KEPT)
def update(version: int, chunk: int = 0) -> Update:
    """An Update, which the streams of all stages share."""
    return Update(version, chunk)


Compute: TypeAlias = Forward | Recompute | Backward | BackwardInput | BackwardWeight
Transfer: TypeAlias = SendActivation | RecvActivation | SendGradient | RecvGradient
Exchange: TypeAlias = StartReduce | ReduceGradients | ReduceTied | ReduceNorm
Instruction: TypeAlias = Compute | Transfer | Exchange | Update | Checkpoint

COMPUTE = frozenset({Forward, Recompute, Backward, BackwardInput, BackwardWeight})
"""Forward and backward work: what the papers' bubbles count as busy."""

_TRANSFERS = frozenset({SendActivation, RecvActivation, SendGradient, RecvGradient})

NUMBERS = {kind: number for number, kind in enumerate(get_args(Instruction))}
"""The kinds of instructions, numbered."""


def numbered(instructions: Sequence[Instruction]) -> bytes:
    """The kind of every instruction, by number: a byte each, which searches faster than the instructions themselves."""
    return bytes(map(NUMBERS.__getitem__, map(type, instructions)))


def marking(kinds: Collection[type[Instruction]]) -> bytes:
    """A table for `bytes.translate` that turns the numbers of these kinds into 1, and all others into 0."""
    marked = {NUMBERS[kind] for kind in kinds}
    return bytes(number in marked for number in range(256))


def is_compute(instruction: Instruction) -> bool:
    """Whether the instruction is forward or backward work."""
    return type(instruction) in COMPUTE


def is_transfer(instruction: Instruction) -> bool:
    """Whether the instruction moves tensors between stages. Two in three do: the answer must be quick."""
    return type(instruction) in _TRANSFERS


def microbatches_of(instruction: Instruction) -> tuple[int, ...]:
    """The microbatches that the instruction works on; none for what concerns the whole stage."""
    match instruction:
        case BackwardWeight():
            return instruction.microbatches
        case StartReduce() | ReduceGradients() | ReduceTied() | ReduceNorm() | Update() | Checkpoint():
            return ()
        case _:
            return (instruction.microbatch,)


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
