"""Mail: all channels of one of a rank's stages, found by the fields of its stream's transfer instructions."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor

from pipeplan.programs.in_transit import most_in_flight, windows
from pipeplan.programs.instructions import RecvActivation, RecvGradient, SendActivation, SendGradient
from pipeplan.programs.program import Program, Stream, brief
from pipeplan.programs.repeating import counted
from worker_agent.engine.channel import Inbox, Message, Outbox
from worker_agent.engine.lines import ChannelEdge, ChannelLines


def edges_of(stream: Stream) -> Counter[ChannelEdge]:
    """The edges that a stage's stream sends and receives on, with the number of messages on each."""
    rank, stage = stream.rank, stream.stage
    messages: Counter[ChannelEdge] = Counter()
    for instruction, times in counted(stream.instructions):
        match instruction:
            case SendActivation(peer=peer):
                messages[ChannelEdge(rank, peer, gradients=False, stage=stage)] += times
            case SendGradient(peer=peer):
                messages[ChannelEdge(rank, peer, gradients=True, stage=stage)] += times
            case RecvActivation(peer=peer):
                messages[ChannelEdge(peer, rank, gradients=False, stage=stage - 1)] += times
            case RecvGradient(peer=peer):
                messages[ChannelEdge(peer, rank, gradients=True, stage=stage + 1)] += times
    return messages


class Mail:
    """The outboxes and inboxes of a rank's stage, and the received memory that its microbatches still hold."""

    def __init__(
        self,
        program: Program,
        rank: int,
        lines: Mapping[ChannelEdge, ChannelLines],
        device: torch.device,
        *,
        chunk: int = 0,
    ) -> None:
        stream = program.stage_streams(program.streams[rank])[chunk]
        short = brief(program)
        own = short.stage_streams(short.streams[rank])[chunk]
        before = windows(short, own)
        self._outboxes: dict[tuple[int, bool], Outbox] = {}
        self._inboxes: dict[tuple[int, bool], Inbox] = {}
        self._borrowed: dict[int, list[tuple[Inbox, Message]]] = {}
        self._sent: dict[int, tuple[Outbox, int]] = {}
        for edge, messages in edges_of(stream).items():
            if edge.source != stream.rank:
                self._inboxes[edge.source, edge.gradients] = Inbox(edge, lines[edge], messages=messages, device=device)
                continue
            # The maximum of the edge's microbatches in flight on the earlier of its two stages.
            window = before[edge.target] if edge.gradients else most_in_flight(own.instructions, edge.target)
            self._outboxes[edge.target, edge.gradients] = Outbox(edge, lines[edge], messages=messages, window=window)

    def send_activation(self, microbatch: int, peer: int, tensors: Sequence[Tensor]) -> None:
        """Sends a stage's outputs, and keeps them until the microbatch's gradient proves that they have arrived."""
        outbox = self._outboxes[peer, False]
        self._sent[microbatch] = outbox, outbox.send(tensors)

    def send_gradient(self, peer: int, tensors: Sequence[Tensor]) -> None:
        self._outboxes[peer, True].send(tensors)

    def receive_activation(self, microbatch: int, peer: int) -> tuple[Tensor, ...]:
        """Waits for a stage's inputs; they stay valid until the microbatch is released."""
        return self._receive(microbatch, self._inboxes[peer, False])

    def receive_gradient(self, microbatch: int, peer: int) -> tuple[Tensor, ...]:
        """Waits for the gradients of a stage's outputs; they stay valid until the microbatch is released."""
        gradients = self._receive(microbatch, self._inboxes[peer, True])
        outbox, number = self._sent.pop(microbatch)
        outbox.arrived(number)
        return gradients

    def release(self, microbatch: int, *, kept: Set[int] = frozenset()) -> None:
        """Releases the microbatch's memory for other messages, except memory that is `kept`."""
        held = []
        for inbox, message in self._borrowed.pop(microbatch, ()):
            needed = tuple(memory for memory in message.memory if memory.data_ptr() in kept)
            if needed:
                held.append((inbox, Message((), needed)))  # the message's other tensors are free
            else:
                inbox.release(message)
        if held:
            self._borrowed[microbatch] = held

    def flush(self) -> None:
        """Waits until everything sent is through."""
        for outbox in self._outboxes.values():
            outbox.flush()

    def _receive(self, microbatch: int, inbox: Inbox) -> tuple[Tensor, ...]:
        message = inbox.receive()
        if message.memory:
            self._borrowed.setdefault(microbatch, []).append((inbox, message))
        return message.tensors
