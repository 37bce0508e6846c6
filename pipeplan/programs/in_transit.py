"""In transit: what a stage's messages take in memory after each instruction of its stream, in counts.

The rules are those of the runtime's channels. An output is held until its microbatch's gradient comes, which says that
all outputs sent before have arrived, too. A gradient is held until as many later ones have been sent as the stage
before has microbatches in flight. Beside the messages that microbatches hold there is memory for those whose receives
are posted ahead, and for one more, once one has been released.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipeplan.arrays import FloatArray
from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
)

RECEIVES_AHEAD = 2
"""Messages for which a worker has receives posted on an edge, beyond those that it has taken."""

Size = TypeVar("Size", int, float, FloatArray)
"""Bytes, or an array of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InTransit:
    """Messages, and memory for messages, beside what microbatches in flight keep (`footprint.Held`).

    `inputs` are as large as the stage's input, `outputs` as its output. `kept_outputs` are those of the outputs that
    belong to microbatches kept whole.
    """

    inputs: int = 0
    outputs: int = 0
    kept_outputs: int = 0

    def bytes(self, input_bytes: Size, output_bytes: Size, kept_output_bytes: Size) -> Size:
        """The bytes of all of it: what a message costs is said here alone.

        A stage's input and output, and the part of its output that its activations have
        (`Measurement.kept_output_bytes`). Each is 0 where nothing is received or sent.
        """
        return self.inputs * input_bytes + self.outputs * output_bytes - self.kept_outputs * kept_output_bytes


def in_transit(
    instructions: Sequence[Instruction], *, window: int, recompute: bool, by_block: bool = False
) -> Iterator[InTransit]:
    """What is in transit after each instruction of one stage's stream, which lists its transfers.

    `window`: the most microbatches that the stage before has in flight at once. For a backward by block it is what is
    in transit while that runs.
    """
    kinds = list(map(type, instructions))
    received, gradients = _Inbox(kinds.count(RecvActivation)), _Inbox(kinds.count(RecvGradient))
    receives, sends = RecvActivation in kinds, SendActivation in kinds
    unanswered: deque[int] = deque()  # outputs, by microbatch
    made = sent = 0  # gradients of inputs
    now = InTransit()
    for instruction in instructions:
        match instruction:
            case RecvActivation():
                received.take()
            case Forward(microbatch=k) if sends:
                unanswered.append(k)
            case RecvGradient(microbatch=k):
                gradients.take()
                while k in unanswered:
                    unanswered.popleft()
            case Backward() | BackwardInput():
                made = int(receives)
                received.release()
                gradients.release()
            case SendGradient():
                made, sent = 0, min(sent + 1, window)
            case _:
                pass
        before = now
        now = InTransit(
            inputs=received.others + made + sent,
            outputs=gradients.held + gradients.others + len(unanswered),
            kept_outputs=0 if recompute else len(unanswered),
        )
        yield before if by_block and isinstance(instruction, Backward) else now


class _Inbox:
    """The messages of an edge that microbatches hold, and the memory for others: posted, and free."""

    def __init__(self, messages: int) -> None:
        self._left = messages
        self._posted = 0
        self._free = 0
        self.held = 0

    def take(self) -> None:
        """A message has come. The receives of the next ones are posted, into memory that is free or new."""
        self._left -= 1
        self.held += 1
        more = min(self._left, RECEIVES_AHEAD) - max(self._posted - 1, 0)
        self._posted = min(self._left, RECEIVES_AHEAD)
        self._free = max(self._free - more, 0)

    def release(self) -> None:
        """Its microbatch needs it no longer."""
        if self.held:
            self.held, self._free = self.held - 1, 1

    @property
    def others(self) -> int:
        """Memory that no microbatch holds."""
        return self._posted + self._free
