"""Same node: a wire between the processes of one node, which read tensors from each other's memory.

The sender writes a tensor's address to a pipe. The receiver copies it when it waits for it, and counts it in memory
that both share. Gloo would move the same tensor through a socket, by a thread of its own that shares the rank's core.

A rank that waits for a message, for a receiver or for a full pipe reads all of its pipes: no two ranks can wait for
each other to read. A process whose pipe ends is gone.

Linux allows this (`process_vm_readv`) to a process that may trace the other one. Some containers forbid it; Yama
allows only a process that the other one has named. Each pair of ranks tries it.
"""

import ctypes
import os
import select
import struct
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from mmap import mmap
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_RECORD = struct.Struct("=qqq")
"""A pipe's record: a tag, an address and a number of bytes."""

MOST_TAGS = 2**16
"""The number of tags, and of shared message counters. Only pages in use take memory."""

_READ_BYTES = 1024 * _RECORD.size
_LOOK_MS = 1
"""The polling interval of a rank that waits for a full pipe or for a receiver: both are rare."""

_NAME_A_TRACER = 0x59616D61
_TOKEN_BYTES = 16


class PeerGoneError(RuntimeError):
    """Another process of this node has ended, or is silent for too long."""


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


_read_memory = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _read_memory is not None:
    _read_memory.restype = ctypes.c_ssize_t


def copy_from(process: int, address: int, memory: Tensor, size: int) -> None:
    """Copies `size` bytes at an address of another process to the start of a contiguous tensor. Raises OSError."""
    if _read_memory is None:
        raise OSError("this system has no process_vm_readv")
    done = 0
    while done < size:
        here = _Range(memory.data_ptr() + done, size - done)
        there = _Range(address + done, size - done)
        copied = _read_memory(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if copied <= 0:
            raise OSError(ctypes.get_errno(), f"cannot read the memory of process {process}")
        done += copied


@dataclass(slots=True)
class _Peer:
    """Another process: the pipes to and from it, its records, and the receives that wait for it, by tag.

    `taken` counts our messages that it has received, `took` its messages that we have. Both processes see both.
    """

    rank: int
    process: int
    say: int
    said: int
    taken: "memoryview[int]"
    took: "memoryview[int]"
    messages: defaultdict[int, deque[tuple[int, int]]] = field(default_factory=lambda: defaultdict(deque))
    posted: "defaultdict[int, deque[_Receive]]" = field(default_factory=lambda: defaultdict(deque))
    sent: Counter[int] = field(default_factory=Counter)
    is_gone: bool = False


class SameNode:
    """The wire between this rank and those whose memory it can read, as they can read its.

    Its pipes stay open until the process ends: others must not think it gone before it has reported why it failed.
    """

    def __init__(self, peers: Iterable[_Peer], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._peers = {peer.rank: peer for peer in peers}
        self._by_pipe = {peer.said: peer for peer in self._peers.values()}
        self._poll = select.poll()
        for pipe in self._by_pipe:
            self._poll.register(pipe, select.POLLIN)

    def reaches(self, rank: int) -> bool:
        return rank in self._peers

    def send(self, tensor: Tensor, target: int, tag: int) -> "_Send":
        """Says where the tensor lies. It must stay as it is until the transfer has completed."""
        peer = self._peers[target]
        peer.sent[tag] += 1
        self._say(peer, tag, tensor.data_ptr(), tensor.nbytes)
        return _Send(self, peer, tag, peer.sent[tag])

    def receive(self, tensor: Tensor, source: int, tag: int) -> "_Receive":
        """A receive into the tensor's first bytes, which happens when it is waited for."""
        peer = self._peers[source]
        receive = _Receive(self, peer, tag, tensor)
        peer.posted[tag].append(receive)
        return receive

    def take(self, peer: _Peer, tag: int) -> None:
        """Completes the oldest receive: copies the oldest message into it, once there is one."""
        messages = peer.messages[tag]
        while not messages:
            if peer.is_gone:
                raise PeerGoneError(f"rank {peer.rank} is gone")
            if not self._listen(1000 * self._timeout_s):
                raise PeerGoneError(f"rank {peer.rank} said nothing for {self._timeout_s:g} s")
        address, size = messages.popleft()
        receive = peer.posted[tag].popleft()
        if size > receive.memory.nbytes:
            raise RuntimeError(f"a message of {size} bytes came where {receive.memory.nbytes} were awaited")
        try:
            copy_from(peer.process, address, receive.memory, size)
        except OSError as error:
            raise PeerGoneError(f"rank {peer.rank} is gone: {error}") from error
        receive.is_done = True
        peer.took[tag] += 1

    def until_taken(self, peer: _Peer, tag: int, number: int) -> None:
        """Waits until another process has taken a message of ours. Raises PeerGoneError if it will not any more."""
        end_s = time.monotonic() + self._timeout_s
        while peer.taken[tag] < number:
            if peer.is_gone and peer.taken[tag] < number:
                raise PeerGoneError(f"rank {peer.rank} is gone")
            if time.monotonic() > end_s:
                raise PeerGoneError(f"rank {peer.rank} took nothing for {self._timeout_s:g} s")
            self._listen(_LOOK_MS)

    def _listen(self, timeout_ms: float) -> bool:
        """Notes all that has been said; waits until something is. False if nothing was in this time."""
        ready = self._poll.poll(timeout_ms)
        for pipe, _ in ready:
            peer = self._by_pipe[pipe]
            records = os.read(pipe, _READ_BYTES)
            if not records:
                peer.is_gone = True
                self._poll.unregister(pipe)
            for tag, address, size in _RECORD.iter_unpack(records):
                peer.messages[tag].append((address, size))
        return bool(ready)

    def _say(self, peer: _Peer, tag: int, address: int, size: int) -> None:
        """Writes a record, whole or not at all: it is shorter than PIPE_BUF."""
        record = _RECORD.pack(tag, address, size)
        end_s = time.monotonic() + self._timeout_s
        while True:
            try:
                os.write(peer.say, record)
            except BlockingIOError:  # the pipe is full
                self._listen(_LOOK_MS)
            except BrokenPipeError as error:
                raise PeerGoneError(f"rank {peer.rank} is gone") from error
            else:
                return
            if time.monotonic() > end_s:
                raise PeerGoneError(f"rank {peer.rank} read nothing for {self._timeout_s:g} s")


@dataclass(slots=True)
class _Send:
    """A message that the other process takes when it wants."""

    wire: SameNode
    peer: _Peer
    tag: int
    number: int

    def wait(self) -> None:
        """Until the other process has taken it."""
        self.wire.until_taken(self.peer, self.tag, self.number)


@dataclass(slots=True)
class _Receive:
    """A receive that waits for its message, after those before it."""

    wire: SameNode
    peer: _Peer
    tag: int
    memory: Tensor
    is_done: bool = False

    def wait(self) -> None:
        """Until the message is in the memory."""
        while not self.is_done:
            self.wire.take(self.peer, self.tag)


_Said = TypeVar("_Said")


@dataclass(frozen=True, slots=True)
class _Offer:
    """A process's announcement: a token in its memory, and for each rank the pipe that it reads and its counts."""

    process: int
    address: int
    token: bytes
    pipes: dict[int, int]
    counts: dict[int, int]

    def reach(self, rank: int) -> "tuple[int, memoryview[int]] | None":
        """This rank's pipe to the process, and the counts of its receives.

        None if its memory cannot be read: it may be another node's.
        """
        found = torch.zeros(_TOKEN_BYTES, dtype=torch.uint8)
        files = f"/proc/{self.process}/fd"
        try:
            copy_from(self.process, self.address, found, _TOKEN_BYTES)
            if found.numpy().tobytes() != self.token:
                return None
            counts = os.open(f"{files}/{self.counts[rank]}", os.O_RDWR | os.O_CLOEXEC)
            pipe = os.open(f"{files}/{self.pipes[rank]}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            return pipe, _shared(counts)
        except OSError:
            return None


def _shared(counts: int) -> "memoryview[int]":
    """The counts of a file in memory, which is closed: they stay as long as one process has them."""
    shared = mmap(counts, 8 * MOST_TAGS)
    os.close(counts)
    return memoryview(shared).cast("q")


def _gathered(own: _Said, group: dist.ProcessGroup) -> list[_Said]:
    """Every rank's announcement."""
    every: list[_Said] = [own] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group)
    return every


def open_same_node(others: Iterable[int], rank: int, group: dist.ProcessGroup, timeout_s: float) -> SameNode:
    """The wire to those of some other ranks that are on this node. Collective among all ranks of the group, which moves
    tensors of the host.

    Each rank tries to read a token from the other one's memory. Only ranks that both succeed have a wire. `timeout_s`
    bounds every wait.
    """
    if _read_memory is None:  # no Linux
        others = ()
    token = os.urandom(_TOKEN_BYTES)
    memory = torch.frombuffer(bytearray(token), dtype=torch.uint8)
    pipes = {other: os.pipe() for other in others}
    counts = {other: os.memfd_create("pipeplan") for other in pipes}
    for descriptor in counts.values():
        os.truncate(descriptor, 8 * MOST_TAGS)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # where Yama guards memory, the launcher and all of its processes may read ours
        prctl(_NAME_A_TRACER, ctypes.c_ulong(os.getppid()), *[ctypes.c_ulong(0)] * 3)
    offer = _Offer(os.getpid(), memory.data_ptr(), token, {o: say for o, (_, say) in pipes.items()}, counts)
    offers = _gathered(offer, group)
    reached = {other: found for other in pipes if (found := offers[other].reach(rank)) is not None}
    reaching = _gathered(frozenset(reached), group)

    peers = []
    for other, (said, own_say) in pipes.items():
        os.close(own_say)  # else the pipe would not end with the other process
        took = _shared(counts[other])
        if other in reached and rank in reaching[other]:
            say, taken = reached[other]
            peers.append(_Peer(other, offers[other].process, say=say, said=said, taken=taken, took=took))
        else:
            os.close(said)
            if other in reached:
                os.close(reached[other][0])
    return SameNode(peers, timeout_s)
