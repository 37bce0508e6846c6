"""Channels: move tensors from stage to stage. Each directed edge has a first-in, first-out queue for each kind of
message.

A notice announces every message, from host to host. Its 16 bytes hold the number of the message's layout: the count,
shapes and types of its tensors. A layout that is new on the edge follows its notice. Small tensors travel in the
notice, until the edge has had a message that is too large for that (`Ahead`).

Receives of notices and of tensors are posted ahead, into memory that is allocated once and reused. The memory for
tensors is as large as the largest message so far. Before a larger message, the sender completes each receive that is
posted ahead with one byte.

    sender     notice 0, layout 0, payload   notice 0, payload   notice 1, layout 1, 1 byte, 1 byte, payload
    receiver   knows nothing, posts payload  2 posted ahead      1 does not fit: empties both, posts payload
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan.errors import RunFailedError
from worker_agent.engine.lines import LAYOUT, NOTICE, PAYLOAD, RECEIVES_AHEAD, ChannelEdge, ChannelLines
from worker_agent.engine.notice import HEAD_BYTES, Known, Layout, Notice, Sizes
from worker_agent.engine.wires import Posted, Work


class Ahead:
    """The receives that are posted ahead. Both ends of an edge count them by the same rules, and so agree.

    After the first message that does not fit in a notice, no notice carries tensors: this bounds their memory.
    """

    def __init__(self, messages: int, lines: ChannelLines) -> None:
        self.sizes: Sizes = ()
        self.posted = 0
        self._left = messages
        self._ahead = lines.ahead
        self._riding_bytes = lines.riding_bytes or -1

    def rides(self, riding_bytes: int) -> bool:
        """Whether a message's tensors, of this many bytes, travel in its notice. All so far must have been small."""
        if riding_bytes > self._riding_bytes:
            self._riding_bytes = -1
            return False
        self._left -= 1
        return True

    @property
    def notice_bytes(self) -> int:
        """The bytes that later notices reserve for tensors."""
        return max(self._riding_bytes, 0)

    def fits(self, sizes: Sizes) -> bool:
        return self.posted > 0 and len(sizes) == len(self.sizes) and all(map(int.__le__, sizes, self.sizes))

    def empty(self, sizes: Sizes) -> None:
        """The posted receives are used up. Only a receive of a message of these sizes is posted now."""
        grows = self._ahead > 0 and len(sizes) == len(self.sizes)
        self.sizes = tuple(map(max, sizes, self.sizes)) if grows else sizes
        self.posted = 1

    def pass_on(self) -> int:
        """Records that the message is complete. Returns how many receives are posted in addition."""
        self._left -= 1
        self.posted -= 1
        more = max(min(self._ahead, self._left) - self.posted, 0)
        self.posted += more
        return more


class Outbox:
    """The sending end of an edge, for a known number of messages. A send never waits, and keeps its tensors until they
    have arrived.

    gloo cannot report whether a send is done; one can only wait for it. But at most `window` messages between two
    stages can be in transit in either direction: the upstream stage's maximum of microbatches in flight. All earlier
    messages have arrived, and waiting for them takes no time. An answer to a message proves its arrival sooner
    (`arrived`).

    A tensor that a block changes before it has arrived may arrive changed: this is detected, and ends the run.
    """

    def __init__(self, edge: ChannelEdge, lines: ChannelLines, *, messages: int, window: int) -> None:
        self._edge = edge
        self._lines = lines
        self._window = window
        self._known: dict[tuple[tuple[torch.Size, torch.dtype], ...], Known] = {}
        self._ahead = Ahead(messages, lines)
        self._pending: deque[tuple[Notice, list[Posted], list[int]]] = deque()
        self._finished = 0
        self._free: list[Notice] = []

    def send(self, tensors: Sequence[Tensor]) -> int:
        """Passes the tensors on, in order. Returns the message's number on the edge."""
        kind = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        known, text = self._known.get(kind), None
        if known is None:
            layouts = tuple(Layout(tuple(shape), dtype) for shape, dtype in kind)
            known = self._known[kind] = Known.of(len(self._known), layouts)
            described = json.dumps([[layout.shape, str(layout.dtype).removeprefix("torch.")] for layout in layouts])
            text = torch.frombuffer(bytearray(described.encode()), dtype=torch.uint8)
        rides = self._ahead.rides(known.riding_bytes)
        room, free = known.riding_bytes if rides else 0, self._free.pop() if self._free else None
        notice = free if free and room <= free.riding_bytes <= self._ahead.notice_bytes else Notice(room)
        notice.head[0], notice.head[1] = known.number, 0 if text is None else text.numel()
        said = notice.memory[:HEAD_BYTES]
        if rides:
            said, riding = notice.places(known)
            for place, tensor in zip(riding, tensors, strict=True):
                place.copy_(tensor.detach())

        message = [self._say(said, NOTICE)]
        if text is not None:
            message.append(self._say(text, LAYOUT))
        if not rides:
            message += self._payload(tensors, known.sizes)
        self._pending.append((notice, message, [tensor._version for _, tensor in message]))
        number = self._finished + len(self._pending) - 1
        while len(self._pending) > self._window:
            self._finish_oldest()
        return number

    def arrived(self, number: int) -> None:
        """This message and all earlier ones have arrived: frees their tensors."""
        while self._finished <= number:
            self._finish_oldest()

    def _payload(self, tensors: Sequence[Tensor], sizes: Sizes) -> list[Posted]:
        """Sends the tensors by themselves."""
        message: list[Posted] = []
        if not self._ahead.fits(sizes):
            for size in self._ahead.sizes * self._ahead.posted:
                message += self._post(self._filler(tensors), size)
            self._ahead.empty(sizes)
        for tensor, size in zip(tensors, self._ahead.sizes, strict=True):
            if tensor.nbytes:
                through_host = self._lines.through_host and tensor.device.type != "cpu"
                payload = tensor.cpu() if through_host else tensor
                if payload.is_complex() or payload.is_neg():  # else a lazy conjugate sends its base
                    payload = payload.resolve_conj().resolve_neg()
                payload = payload.detach().contiguous().view(-1).view(torch.uint8)
            else:
                payload = self._filler(tensors)
            message += self._post(payload, size)

        self._ahead.pass_on()
        return message

    def flush(self) -> None:
        """Waits until everything sent has arrived."""
        while self._pending:
            self._finish_oldest()

    def _say(self, tensor: Tensor, part: int) -> Posted:
        return self._lines.notices.send(tensor, self._edge.target, self._edge.tag(part)), tensor

    def _post(self, memory: Tensor, posted_bytes: int) -> list[Posted]:
        """Sends the memory, unless the posted receive has no bytes."""
        if posted_bytes == 0:
            return []
        return [(self._lines.tensors.send(memory, self._edge.target, self._edge.tag(PAYLOAD)), memory)]

    def _filler(self, tensors: Sequence[Tensor]) -> Tensor:
        device = torch.device("cpu") if self._lines.through_host else tensors[0].device
        return torch.zeros(1, dtype=torch.uint8, device=device)

    def _finish_oldest(self) -> None:
        notice, message, versions = self._pending.popleft()
        for work, _ in message:
            if work is not None:
                work.wait()
        if versions != [tensor._version for _, tensor in message]:
            raise RunFailedError(
                f"a tensor for rank {self._edge.target} was changed in place while it was on its way: a block must "
                "return a copy of what it changes later"
            )
        self._finished += 1
        if not self._free:  # one for the next send; tensors may have ridden in the others
            self._free.append(notice)


@dataclass(frozen=True, slots=True)
class Message:
    """A received message: tensors in memory that the inbox lends until it is released, or in their own memory."""

    tensors: tuple[Tensor, ...]
    memory: tuple[Tensor, ...]


class Inbox:
    """The receiving end of an edge, for a known number of messages."""

    def __init__(self, edge: ChannelEdge, lines: ChannelLines, *, messages: int, device: torch.device) -> None:
        self._edge = edge
        self._lines = lines
        self._device = device
        self._unannounced = messages
        self._notices: deque[tuple[Work | None, Notice]] = deque()
        self._known: list[Known] = []
        self._ahead = Ahead(messages, lines)
        self._posted: deque[list[Posted]] = deque()
        self._free: list[tuple[Tensor, ...]] = []
        self._listen()

    def receive(self) -> Message:
        """Waits for the next message."""
        work, notice = self._notices.popleft()
        if work is not None:
            work.wait()
        number, size = notice.head
        if size:  # the layout is new on this edge, and follows
            text = torch.empty(size, dtype=torch.uint8)
            work = self._lines.notices.receive(text, self._edge.source, self._edge.tag(LAYOUT))
            if work is not None:
                work.wait()
            described: list[tuple[list[int], str]] = json.loads(text.numpy().tobytes())
            new = tuple(Layout(tuple(shape), getattr(torch, dtype)) for shape, dtype in described)
            self._known.append(Known.of(number, new))
        known = self._known[number]
        if self._ahead.rides(known.riding_bytes):
            # copies, each with its own memory and version counter: other messages reuse the notice's memory
            tensors = tuple([tensor.clone() for tensor in notice.places(known)[1]])
            self._listen(notice)
            return Message(self._on_device(tensors), ())
        self._listen(notice)

        if not self._ahead.fits(known.sizes):
            while self._posted:
                self._arrived()
            self._ahead.empty(known.sizes)
            self._free.clear()
            self._post()

        memory = self._arrived()
        for _ in range(self._ahead.pass_on()):
            self._post()
        tensors = tuple(layout.on(m) for layout, m in zip(known.layouts, memory, strict=True))
        return Message(self._on_device(tensors), memory)

    def release(self, message: Message) -> None:
        """Takes a message's memory back for the next receive. Of many released in a row, that of one is kept."""
        if not self._free and tuple(memory.nbytes for memory in message.memory) == self._ahead.sizes:
            self._free.append(message.memory)

    def _on_device(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._lines.through_host and self._device.type != "cpu":
            return tuple(tensor.to(self._device) for tensor in tensors)
        return tensors

    def _listen(self, read: Notice | None = None) -> None:
        """Posts the receives of notices ahead. Reuses a notice that was read, unless it is larger than needed now."""
        if read is not None and read.riding_bytes > self._ahead.notice_bytes:
            read = None
        while self._unannounced and len(self._notices) < RECEIVES_AHEAD:
            notice, read = read or Notice(self._ahead.notice_bytes), None
            work = self._lines.notices.receive(notice.memory, self._edge.source, self._edge.tag(NOTICE))
            self._notices.append((work, notice))
            self._unannounced -= 1

    def _post(self) -> None:
        """Posts the receive of a message, into memory that is free or new."""
        if self._free:
            memory = self._free.pop()
        else:
            through_host = self._lines.through_host
            device = torch.device("cpu") if through_host else self._device
            pinned = through_host and self._device.type == "cuda"
            memory = tuple(
                torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned) for size in self._ahead.sizes
            )
        wire, source, tag = self._lines.tensors, self._edge.source, self._edge.tag(PAYLOAD)
        self._posted.append([(wire.receive(m, source, tag) if m.nbytes else None, m) for m in memory])

    def _arrived(self) -> tuple[Tensor, ...]:
        """The memory of the oldest posted receive. Waits until the message is in it."""
        message = self._posted.popleft()
        for work, _ in message:
            if work is not None:
                work.wait()
        return tuple(memory for _, memory in message)
