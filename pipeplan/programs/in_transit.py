"""In transit: the memory of a stage's messages after each instruction of its stream, in counts.

The rules are those of the runtime's channels, one for each worker of a neighbouring stage. An output is held until its
microbatch's gradient comes, which shows that all earlier outputs to this worker have arrived, too. A gradient is held
until as many later ones have been sent to this worker as it has microbatches in flight. In addition to the messages
that microbatches hold, every channel has memory for receives posted ahead and, once a message has been released, for
one more.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from pipeplan.programs.program import Program, Stream

RECEIVES_AHEAD = 2
"""Messages for which a worker has receives posted on an edge, beyond those that it has taken."""

Size = TypeVar("Size", int, float, FloatArray)
"""Bytes, or an array of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InTransit:
    """Messages, and memory for messages, without those that microbatches in flight keep (`footprint.Held`).

    `inputs` have the size of the stage's input, `outputs` that of its output. `kept_outputs` are the outputs of
    microbatches kept whole.
    """

    inputs: int = 0
    outputs: int = 0
    kept_outputs: int = 0

    def bytes(self, input_bytes: Size, output_bytes: Size, kept_output_bytes: Size) -> Size:
        """The bytes of all messages: the only definition of a message's cost.

        The arguments are a stage's input and output, and the part of its output among its activations
        (`Measurement.kept_output_bytes`), each 0 where nothing is received or sent.
        """
        return self.inputs * input_bytes + self.outputs * output_bytes - self.kept_outputs * kept_output_bytes


def most_in_flight(instructions: Sequence[Instruction], peer: int) -> int:
    """The maximum number of microbatches that a stage's worker has sent to a peer and has no gradient of yet."""
    for_peer = {each.microbatch for each in instructions if isinstance(each, SendActivation) and each.peer == peer}
    now = most = 0
    for instruction in instructions:
        match instruction:
            case Forward(microbatch=k) if k in for_peer:
                now += 1
                most = max(most, now)
            case RecvGradient(microbatch=k) if k in for_peer:
                now -= 1
            case _:
                pass
    return most


def windows(program: Program, stream: Stream) -> dict[int, int]:
    """By worker of the stage before, `most_in_flight` for the worker of a stage's stream."""
    peers = {each.peer for each in stream.instructions if isinstance(each, RecvActivation)}
    if not peers:
        return {}
    _, place = program.pipeline.place_of(stream.stage - 1)
    return {
        peer: most_in_flight(program.stage_streams(program.streams[peer])[place].instructions, stream.rank)
        for peer in peers
    }


def in_transit(
    instructions: Sequence[Instruction], *, windows: Mapping[int, int], recompute: bool, by_block: bool = False
) -> Iterator[InTransit]:
    """The messages in transit after each instruction of one stage's stream, which lists its transfers.

    `windows` are those of the stage's program. For a backward by block, the messages are those while it runs.
    """
    sources = {each.microbatch: each.peer for each in instructions if isinstance(each, RecvActivation)}
    targets = {each.microbatch: each.peer for each in instructions if isinstance(each, SendActivation)}
    received, gradients = _inboxes(sources), _inboxes(targets)
    unanswered: list[int] = []  # outputs, by microbatch
    sent = Counter[int]()  # gradients of inputs, by peer
    made = 0
    now = InTransit()
    for instruction in instructions:
        match instruction:
            case RecvActivation(peer=peer):
                received[peer].take()
            case Forward(microbatch=k) if k in targets:
                unanswered.append(k)
            case RecvGradient(microbatch=k, peer=peer):
                gradients[peer].take()
                sent_before = unanswered[: unanswered.index(k) + 1] if k in unanswered else []
                unanswered = [each for each in unanswered if targets[each] != peer or each not in sent_before]
            case Backward(microbatch=k) | BackwardInput(microbatch=k):
                made = int(k in sources)
                if k in sources:
                    received[sources[k]].release()
                if k in targets:
                    gradients[targets[k]].release()
            case SendGradient(peer=peer):
                made, sent[peer] = 0, min(sent[peer] + 1, windows[peer])
            case _:
                pass
        before = now
        now = InTransit(
            inputs=sum(inbox.others for inbox in received.values()) + made + sent.total(),
            outputs=sum(inbox.held + inbox.others for inbox in gradients.values()) + len(unanswered),
            kept_outputs=0 if recompute else len(unanswered),
        )
        yield before if by_block and isinstance(instruction, Backward) else now


def _inboxes(peers: Mapping[int, int]) -> dict[int, "_Inbox"]:
    """By peer, for the messages of these microbatches."""
    return {peer: _Inbox(messages) for peer, messages in Counter(peers.values()).items()}


class _Inbox:
    """The messages of a channel that microbatches hold, and the memory for others: posted, and free."""

    def __init__(self, messages: int) -> None:
        self._left = messages
        self._posted = 0
        self._free = 0
        self.held = 0

    def take(self) -> None:
        """Takes a message, and posts the next receives into free or new memory."""
        self._left -= 1
        self.held += 1
        more = min(self._left, RECEIVES_AHEAD) - max(self._posted - 1, 0)
        self._posted = min(self._left, RECEIVES_AHEAD)
        self._free = max(self._free - more, 0)

    def release(self) -> None:
        """Releases a message that its microbatch no longer needs."""
        if self.held:
            self.held, self._free = self.held - 1, 1

    @property
    def others(self) -> int:
        """Memory that no microbatch holds."""
        return self._posted + self._free
