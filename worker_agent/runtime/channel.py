"""Channels: move tensors from stage to stage. Every directed edge and kind is first in, first out, for itself.

With gloo all edges share the group of all ranks, and tags tell their messages apart: each further group would have its
own connections, and threads that wake up a hundred times a second. NCCL knows no tags: there every edge has a group for
its tensors.

A notice announces every message: 16 bytes, from processor to processor, with the number of the message's layout. A
layout says how many tensors there are, their shapes and types; one that is new on the edge follows its notice. So a
message may differ from the one before in any way.

Receives of notices and of tensors are posted ahead, into memory that is allocated once and used again: as many bytes as
the largest message so far had. Before a message that does not fit there, the sender fills each receive that is posted
ahead with one byte.

    sender     notice 0, layout 0, payload   notice 0, payload   notice 1, layout 1, 1 byte, 1 byte, payload
    receiver   knows nothing, posts payload  2 posted ahead      1 does not fit: empties both, posts payload

Gloo moves what is in the processor's memory: a GPU's tensors are copied there, and from there.
"""

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

RECEIVES_AHEAD = 2

PAYLOAD, NOTICE, LAYOUT = range(3)
"""The parts of an edge."""

Sizes = tuple[int, ...]
"""The bytes of a message's tensors."""


class Work(Protocol):
    """A transfer that is on its way."""

    def wait(self) -> object:
        """Until it is through, or on a GPU until all that is enqueued later will find it through."""


Posted = tuple[Work | None, Tensor]
"""A transfer with its tensor, which must stay until it is through."""


class Wire(Protocol):
    """What moves tensors between this rank and another one, in order for each tag. No call waits."""

    def send(self, tensor: Tensor, target: int, tag: int) -> Work | None:
        """Starts to send."""

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work | None:
        """Starts to receive into the tensor."""


class GroupWire:
    """A process group of torch as a wire, called directly: `isend` and `irecv` check each time what is known here."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._places = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}

    def send(self, tensor: Tensor, target: int, tag: int) -> Work | None:
        """Starts to send."""
        return self._group.send([tensor], self._places[target], tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work | None:
        """Starts to receive into the tensor."""
        return self._group.recv([tensor], self._places[source], tag)


@dataclass(frozen=True, slots=True, order=True)
class ChannelEdge:
    """A directed edge between two ranks; activations and gradients have edges of their own.

    So has every `stage` of the sender: ranks that hold several send each other tensors of several shapes.
    """

    source: int
    target: int
    gradients: bool
    stage: int = 0

    def tag(self, part: int) -> int:
        """Tells its messages from those of other edges between the two ranks, and its parts from each other."""
        return 3 * (2 * self.stage + self.gradients) + part


@dataclass(frozen=True, slots=True)
class Layout:
    """One tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def on(self, memory: Tensor) -> Tensor:
        """The tensor that lies in some bytes of memory; it is no view of them, and has changes counted for itself."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), 0, self.shape)  # type: ignore[call-overload,no-any-return]


Layouts = tuple[Layout, ...]


def layouts_of(tensors: Iterable[Tensor]) -> Layouts:
    """The layouts of a message's tensors."""
    return tuple(Layout(tuple(t.shape), t.dtype) for t in tensors)


@dataclass(frozen=True, slots=True)
class ChannelLines:
    """The wires of an edge: one for its tensors, one for what is said about them, which is on the processor.

    With `through_host` tensors travel from processor to processor as well. `ahead` is how many of them may be posted
    before it is known how large they are.
    """

    tensors: Wire
    notices: Wire
    through_host: bool = True
    ahead: int = RECEIVES_AHEAD


def open_lines(edges: Iterable[ChannelEdge], rank: int) -> dict[ChannelEdge, ChannelLines]:
    """The lines of the edges that touch a rank. Every rank makes all groups, in the same order.

    NCCL takes a message into memory of just its size: what comes must be known before a receive is posted. The first
    use of an NCCL group waits for the other rank. So all edges meet here, before any instruction.
    """
    if dist.get_backend() != "nccl":
        world = GroupWire(_made(dist.group.WORLD))
        return {edge: ChannelLines(world, world) for edge in edges if rank in (edge.source, edge.target)}
    notices = GroupWire(_made(dist.new_group(backend="gloo", group_desc="notices")))
    lines = {}
    for edge in sorted(edges):
        group = dist.new_group([edge.source, edge.target], group_desc=str(edge))
        if rank in (edge.source, edge.target):
            lines[edge] = ChannelLines(GroupWire(_made(group)), notices, through_host=False, ahead=0)
    meet(lines, rank, torch.device("cuda", torch.cuda.current_device()))
    return lines


def meet(lines: Mapping[ChannelEdge, ChannelLines], rank: int, device: torch.device) -> None:
    """Sends a byte over every edge, in an order that all ranks share: no two ranks wait for each other."""
    for edge in sorted(lines):
        wire, byte = lines[edge].tensors, torch.zeros(1, dtype=torch.uint8, device=device)
        sends = edge.source == rank
        work = wire.send(byte, edge.target, edge.tag(PAYLOAD)) if sends else None
        work = work if sends else wire.receive(byte, edge.source, edge.tag(PAYLOAD))
        if work is not None:
            work.wait()


def _made(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None, "this rank is in the group, and the ranks have met"
    return group


class Ahead:
    """What a receiver has posted ahead: both ends of an edge keep this account, by the same rules, and agree."""

    def __init__(self, messages: int, ahead: int) -> None:
        self.sizes: Sizes = ()
        self.posted = 0
        self._left = messages
        self._ahead = ahead

    def fits(self, sizes: Sizes) -> bool:
        """Whether a message's tensors go into what is posted for the next one."""
        return self.posted > 0 and len(sizes) == len(self.sizes) and all(map(int.__le__, sizes, self.sizes))

    def empty(self, sizes: Sizes) -> None:
        """Nothing is posted any more, and then the receive of a message of these sizes."""
        grows = self._ahead > 0 and len(sizes) == len(self.sizes)
        self.sizes = tuple(map(max, sizes, self.sizes)) if grows else sizes
        self.posted = 1

    def pass_on(self) -> int:
        """The message is through. Returns how many receives are posted in addition."""
        self._left -= 1
        self.posted -= 1
        more = max(min(self._ahead, self._left) - self.posted, 0)
        self.posted += more
        return more


class Outbox:
    """The sending end of an edge, for a known number of messages. A send never waits; its tensors are held until they
    are through.

    gloo cannot be asked whether a send is through, only be waited for. But of the messages between two stages, in
    either direction, no more than `window` can be under way: the most microbatches that the earlier stage ever has in
    flight. Whatever was sent before those has arrived, and waiting for it takes no time.
    """

    def __init__(self, edge: ChannelEdge, lines: ChannelLines, *, messages: int, window: int) -> None:
        self._edge = edge
        self._lines = lines
        self._window = window
        self._announced: dict[tuple[tuple[torch.Size, torch.dtype], ...], tuple[Tensor, Sizes]] = {}
        self._ahead = Ahead(messages, lines.ahead)
        self._pending: deque[list[Posted]] = deque()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Hands the tensors over, in order."""
        message, sizes = self._announce(tensors)

        if not self._ahead.fits(sizes):
            for size in self._ahead.sizes * self._ahead.posted:
                message += self._post(self._filler(tensors), size)
            self._ahead.empty(sizes)
        for tensor, size in zip(tensors, self._ahead.sizes, strict=True):
            if tensor.nbytes:
                through_host = self._lines.through_host and tensor.device.type != "cpu"
                payload = tensor.cpu() if through_host else tensor
                if payload.is_complex() or payload.is_neg():  # else a lazy conjugate sends what it is a view of
                    payload = payload.resolve_conj().resolve_neg()
                payload = payload.detach().contiguous().view(-1).view(torch.uint8)
            else:
                payload = self._filler(tensors)
            message += self._post(payload, size)

        self._ahead.pass_on()
        self._pending.append(message)
        while len(self._pending) > self._window:
            self._finish_oldest()

    def flush(self) -> None:
        """Waits until all that was sent is through."""
        while self._pending:
            self._finish_oldest()

    def _announce(self, tensors: Sequence[Tensor]) -> tuple[list[Posted], Sizes]:
        """Sends a message's notice; returns what it sent, and the bytes of the tensors."""
        kind = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        known = self._announced.get(kind)
        if known is not None:
            notice, sizes = known
            return [self._say(notice, NOTICE)], sizes

        layouts = layouts_of(tensors)
        described = json.dumps([[list(layout.shape), str(layout.dtype).removeprefix("torch.")] for layout in layouts])
        text = torch.frombuffer(bytearray(described.encode()), dtype=torch.uint8)
        number, sizes = len(self._announced), _sizes(layouts)
        self._announced[kind] = (torch.tensor([number, 0]), sizes)
        return [self._say(torch.tensor([number, text.numel()]), NOTICE), self._say(text, LAYOUT)], sizes

    def _say(self, tensor: Tensor, part: int) -> Posted:
        return self._lines.notices.send(tensor, self._edge.target, self._edge.tag(part)), tensor

    def _post(self, memory: Tensor, posted_bytes: int) -> list[Posted]:
        """Sends some bytes; where none are expected there is nothing to send."""
        if posted_bytes == 0:
            return []
        return [(self._lines.tensors.send(memory, self._edge.target, self._edge.tag(PAYLOAD)), memory)]

    def _filler(self, tensors: Sequence[Tensor]) -> Tensor:
        device = torch.device("cpu") if self._lines.through_host else tensors[0].device
        return torch.zeros(1, dtype=torch.uint8, device=device)

    def _finish_oldest(self) -> None:
        for work, _ in self._pending.popleft():
            if work is not None:
                work.wait()


@dataclass(frozen=True, slots=True)
class Message:
    """What an inbox received: tensors, in memory that it lends until it is given back."""

    tensors: tuple[Tensor, ...]
    memory: tuple[Tensor, ...]


class Inbox:
    """The receiving end of an edge, for a known number of messages."""

    def __init__(self, edge: ChannelEdge, lines: ChannelLines, *, messages: int, device: torch.device) -> None:
        self._edge = edge
        self._lines = lines
        self._device = device
        self._unannounced = messages
        self._notices: deque[Posted] = deque()
        self._layouts: list[tuple[Layouts, Sizes]] = []
        self._ahead = Ahead(messages, lines.ahead)
        self._posted: deque[list[Posted]] = deque()
        self._free: list[tuple[Tensor, ...]] = []
        self._listen()

    def receive(self) -> Message:
        """Waits for the next message."""
        work, notice = self._notices.popleft()
        if work is not None:
            work.wait()
        number, size = notice.tolist()
        if size:  # the layout is new on this edge, and follows
            text = torch.empty(size, dtype=torch.uint8)
            work = self._lines.notices.receive(text, self._edge.source, self._edge.tag(LAYOUT))
            if work is not None:
                work.wait()
            described: list[tuple[list[int], str]] = json.loads(text.numpy().tobytes())
            new = tuple(Layout(tuple(shape), getattr(torch, dtype)) for shape, dtype in described)
            self._layouts.append((new, _sizes(new)))
        self._listen()
        layouts, sizes = self._layouts[int(number)]

        if not self._ahead.fits(sizes):
            while self._posted:
                self._arrived()
            self._ahead.empty(sizes)
            self._free.clear()
            self._post()

        memory = self._arrived()
        for _ in range(self._ahead.pass_on()):
            self._post()
        tensors = tuple(layout.on(m) for layout, m in zip(layouts, memory, strict=True))
        if self._lines.through_host and self._device.type != "cpu":
            tensors = tuple(tensor.to(self._device) for tensor in tensors)
        return Message(tensors, memory)

    def release(self, message: Message) -> None:
        """Takes a message's memory back, to use it again."""
        if tuple(memory.nbytes for memory in message.memory) == self._ahead.sizes:
            self._free.append(message.memory)

    def _listen(self) -> None:
        """Posts the receives of notices ahead."""
        while self._unannounced and len(self._notices) < RECEIVES_AHEAD:
            notice = torch.empty(2, dtype=torch.int64)
            work = self._lines.notices.receive(notice, self._edge.source, self._edge.tag(NOTICE))
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
        """The memory of the oldest posted receive, once what was sent is in it."""
        message = self._posted.popleft()
        for work, _ in message:
            if work is not None:
                work.wait()
        return tuple(memory for _, memory in message)


def _sizes(layouts: Layouts) -> Sizes:
    return tuple(layout.bytes for layout in layouts)
