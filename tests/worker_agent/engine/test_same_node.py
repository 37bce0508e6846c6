"""The wire between processes of one node: tensors arrive as they were, and nobody waits for a process that is gone."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.forked import fork_server
from worker_agent.engine.lines import ChannelEdge, Lines, open_lines
from worker_agent.engine.same_node import PeerGoneError, SameNode
from worker_agent.engine.wires import GroupWire, Wire, Work

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that lets processes read each other")

THERE, BACK = ChannelEdge(0, 1, gradients=False), ChannelEdge(1, 0, gradients=True)
SIZES = (1, 24, 4096, 2**20 + 7, 5)
MANY = 10_000
"""More messages than a pipe has room for."""
NOBODY, NOT_DUMPABLE = 65534, 4


def start(work: Callable[[int, Path], None], folder: Path) -> Sequence[BaseProcess]:
    processes = [fork_server().Process(target=_meet, args=(work, folder, rank), daemon=True) for rank in (0, 1)]
    for process in processes:
        process.start()
    return processes


def ended(processes: Sequence[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def _meet(work: Callable[[int, Path], None], folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    work(rank, folder)
    dist.destroy_process_group()


def opened(rank: int, timeout_s: float = 60.0) -> Lines:
    return open_lines([THERE, BACK], rank, timeout_s=timeout_s)


def wire_of(lines: Lines, edge: ChannelEdge) -> Wire:
    return lines[edge].tensors


def content(number: int, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def test_tensors_arrive_as_they_were_whatever_is_waited_for_first(tmp_path: Path) -> None:
    assert ended(start(_exchange, tmp_path)) == [0, 0]


def _exchange(rank: int, folder: Path) -> None:
    """Both send on two tags and receive into more memory than needed, from the last to the first of each tag."""
    out, back = (THERE, BACK) if rank == 0 else (BACK, THERE)
    wire, other = wire_of(opened(rank), out), 1 - rank
    assert isinstance(wire, SameNode) and wire.reaches(other) and not wire.reaches(rank)
    mine = [content(10 * rank + n, size) for n, size in enumerate(SIZES)]
    sends = [wire.send(tensor, other, out.tag(n % 2)) for n, tensor in enumerate(mine)]
    memory = [torch.zeros(size + 3, dtype=torch.uint8) for size in SIZES]
    receives = [wire.receive(into, other, back.tag(n % 2)) for n, into in enumerate(memory)]
    works: list[Work] = [*reversed(receives), *sends]
    for work in works:
        work.wait()
    for n, (into, size) in enumerate(zip(memory, SIZES, strict=True)):
        assert torch.equal(into[:size], content(10 * other + n, size))
        assert not into[size:].any()


def test_a_send_waits_for_nobody_however_many_messages_are_on_their_way(tmp_path: Path) -> None:
    """Both fill the pipes before either of them receives."""
    assert ended(start(_fill, tmp_path)) == [0, 0]


def _fill(rank: int, folder: Path) -> None:
    out, back = (THERE, BACK) if rank == 0 else (BACK, THERE)
    wire, other = wire_of(opened(rank), out), 1 - rank
    numbers, found = torch.arange(MANY), torch.empty(MANY, dtype=torch.int64)
    sends = [wire.send(numbers[n], other, out.tag(0)) for n in range(MANY)]
    for n in range(MANY):
        work = wire.receive(found[n], other, back.tag(0))
        assert work is not None
        work.wait()
    for send in sends:
        assert send is not None
        send.wait()
    assert torch.equal(found, numbers)


@pytest.mark.parametrize("waits", ["for a message", "for an answer", "to write"])
def test_who_waits_for_a_process_that_ends_is_told(waits: str, tmp_path: Path) -> None:
    """At once: not after the time for a silent one."""
    waiting = {"for a message": _wait_for_message, "for an answer": _wait_for_answer, "to write": _write}[waits]
    first, second = start(waiting, tmp_path)
    second.join()
    assert second.exitcode == -signal.SIGKILL
    assert ended([first]) == [0]


def _wait_for_message(rank: int, folder: Path) -> None:
    wire = wire_of(opened(rank, timeout_s=1e6), THERE)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = wire.receive(torch.empty(1), 1, BACK.tag(0))
    assert work is not None
    with pytest.raises(PeerGoneError, match="rank 1 is gone"):
        work.wait()
    os._exit(0)


def _wait_for_answer(rank: int, folder: Path) -> None:
    wire = wire_of(opened(rank, timeout_s=1e6), THERE)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerGoneError, match="rank 1 is gone"):
        work = wire.send(torch.empty(1), 1, THERE.tag(0))
        assert work is not None
        work.wait()
    os._exit(0)


def _write(rank: int, folder: Path) -> None:
    wire = wire_of(opened(rank, timeout_s=1e6), THERE)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerGoneError, match="rank 1 is gone"):
        for _ in range(MANY):
            wire.send(torch.empty(1), 1, THERE.tag(0))
    os._exit(0)


def test_who_waits_for_a_silent_process_is_told_after_the_time_that_was_given(tmp_path: Path) -> None:
    assert ended(start(_be_silent, tmp_path)) == [0, 0]


def _be_silent(rank: int, folder: Path) -> None:
    wire = wire_of(opened(rank, timeout_s=0.2), THERE)
    if rank == 0:
        work = wire.receive(torch.empty(1), 1, BACK.tag(0))
        assert work is not None
        with pytest.raises(PeerGoneError, match=r"rank 1 said nothing for 0\.2 s"):
            work.wait()
    dist.barrier()


def test_processes_that_may_not_read_each_others_memory_send_by_gloo(tmp_path: Path) -> None:
    assert ended(start(_hide, tmp_path)) == [0, 0]


def _hide(rank: int, folder: Path) -> None:
    """Rank 1 can read no memory of rank 0, and a root that is rank 0 can read all: one direction is not enough."""
    if rank == 1 and os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    ctypes.CDLL(None).prctl(NOT_DUMPABLE, ctypes.c_ulong(0), *[ctypes.c_ulong(0)] * 3)
    wire = wire_of(opened(rank), THERE)
    assert isinstance(wire, GroupWire)
    into = torch.empty(3)
    work = wire.send(torch.arange(3.0), 1, 0) if rank == 0 else wire.receive(into, 0, 0)
    assert work is not None
    work.wait()
    assert rank == 0 or into.tolist() == [0.0, 1.0, 2.0]
    dist.barrier()
