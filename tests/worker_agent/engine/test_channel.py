"""Channels on wires of the tests' own: every rank is a thread, and a first use may wait for the other end."""

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from pipeplan.errors import RunFailedError
from pipeplan.programs.in_transit import in_transit, windows
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
from pipeplan.programs.program import Program
from pipeplan.programs.text import format_instruction
from pipeplan.simulation.predict import program_of
from tests.schedules import DATA_PARALLEL, SCHEDULES, STASHING, chunks_of
from tests.worker_agent.runtime.plans import make_plan
from worker_agent.engine.channel import Inbox, Outbox
from worker_agent.engine.lines import NOTICE, PAYLOAD, ChannelEdge, ChannelLines, meet
from worker_agent.runtime.mail import Mail, edges_of

CPU = torch.device("cpu")
WAIT_S = 20.0
"""So long a thread waits for what never comes; one that comes is there in milliseconds."""


class Stuck(Exception):
    """Nobody came."""


@dataclass
class Switchboard:
    """Where the ranks' messages are, and who has used which group."""

    greets: bool
    wait_s: float = WAIT_S
    changed: threading.Condition = field(default_factory=threading.Condition)
    sent: dict[tuple[object, int, int, int], deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))
    used: dict[object, set[int]] = field(default_factory=lambda: defaultdict(set))
    counts: dict[tuple[object, int, int, int], int] = field(default_factory=lambda: defaultdict(int))
    stuck: bool = False

    def until(self, happened: Callable[[], object]) -> None:
        """Waits; the first who waits in vain says so to all."""
        if not self.changed.wait_for(lambda: self.stuck or happened(), self.wait_s) or self.stuck:
            self.stuck = True
            self.changed.notify_all()
            raise Stuck

    def use(self, group: object, rank: int) -> None:
        """NCCL's first use of a group holds the host until the other rank is there."""
        self.used[group].add(rank)
        self.changed.notify_all()
        if self.greets and isinstance(group, ChannelEdge):
            self.until(lambda: len(self.used[group]) == 2)


@dataclass
class Arrival:
    """A receive that is on its way."""

    board: Switchboard
    key: tuple[object, int, int, int]
    into: Tensor

    def wait(self) -> None:
        """Until the message is there, which must fit."""
        with self.board.changed:
            self.board.until(lambda: self.board.sent[self.key])
            message = self.board.sent[self.key].popleft()
        self.into[: len(message)] = message


@dataclass
class FakeWire:
    """One rank's end of a group."""

    board: Switchboard
    group: object
    rank: int
    posted: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """How many receives, by their tag."""

    def send(self, tensor: Tensor, target: int, tag: int) -> None:
        """There at once."""
        with self.board.changed:
            self.board.use(self.group, self.rank)
            self.board.sent[self.group, self.rank, target, tag].append(tensor.clone())
            self.board.counts[self.group, self.rank, target, tag] += 1
            self.board.changed.notify_all()

    def receive(self, tensor: Tensor, source: int, tag: int) -> Arrival:
        """Waits for the other end at the first use, never for the message."""
        with self.board.changed:
            self.board.use(self.group, self.rank)
        self.posted[tag] += 1
        return Arrival(self.board, (self.group, source, self.rank, tag), tensor)


def free(lines: dict[ChannelEdge, ChannelLines], rank: int) -> None:
    """What an allocator does that has run out: cudaFree waits until the device has done all that it was given, the
    receives of tensors among it. Notices are the host's.
    """
    for edge, of_edge in lines.items():
        wire = of_edge.tensors
        assert isinstance(wire, FakeWire)
        for tag, posted in wire.posted.items():
            with wire.board.changed:
                wire.board.until(lambda: wire.board.counts[edge, edge.source, rank, tag] >= posted)  # noqa: B023


def lines_of(board: Switchboard, program: Program, rank: int, ahead: int) -> dict[ChannelEdge, ChannelLines]:
    streams = [part for stream in program.streams for part in program.stage_streams(stream)]
    edges = {edge for stream in streams for edge in edges_of(stream) if rank in (edge.source, edge.target)}
    world = FakeWire(board, "world", rank)
    return {edge: ChannelLines(FakeWire(board, edge, rank), world, ahead=ahead) for edge in edges}


def execute(instruction: Instruction, mail: Mail) -> None:
    """The transfers of a stream; a message says which microbatch it is of."""
    match instruction:
        case SendActivation(microbatch=k, peer=peer):
            mail.send_activation(k, peer, [torch.full((k % 3 + 1,), float(k))])
        case SendGradient(microbatch=k, peer=peer):
            mail.send_gradient(peer, [torch.full((k % 3 + 1,), float(-k))])
        case RecvActivation(microbatch=k, peer=peer):
            (got,) = mail.receive_activation(k, peer)
            assert torch.equal(got, torch.full((k % 3 + 1,), float(k)))
        case RecvGradient(microbatch=k, peer=peer):
            (got,) = mail.receive_gradient(k, peer)
            assert torch.equal(got, torch.full((k % 3 + 1,), float(-k)))
            mail.release(k)
            held = [len(outbox._pending) for (_, gradients), outbox in mail._outboxes.items() if not gradients]
            assert sum(held) <= len(mail._sent), "an output is held though its gradient has come"


def on_threads(rank_of: Callable[[int], None], ranks: int) -> list[str]:
    """Every rank on a thread of its own; what went wrong."""
    wrong: list[str] = []

    def run(rank: int) -> None:
        try:
            rank_of(rank)
        except (Stuck, AssertionError) as error:
            wrong.append(f"rank {rank}: {error!r}")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(2 * WAIT_S)
        if thread.is_alive():
            wrong.append(f"rank {rank} has not ended")
    return wrong


def play(
    schedule: str, *, depth: int, meets: bool, ahead: int, frees: bool = False, wait_s: float = WAIT_S
) -> list[str]:
    """Every rank's stream on a thread of its own; what went wrong. With `frees` each wants memory all the time."""
    chunks = chunks_of(schedule)
    cuts = tuple(range(depth * chunks + 1))
    microbatches = 1 if schedule in STASHING else 2 * depth
    program = program_of(make_plan(schedule, cuts, microbatches=microbatches, chunks=chunks), batches=3)
    board = Switchboard(greets=True, wait_s=wait_s)

    def rank_of(rank: int) -> None:
        lines = lines_of(board, program, rank, ahead)
        if meets:
            meet(lines, rank, CPU)
        mails = [Mail(program, rank, lines, CPU, chunk=chunk) for chunk in range(chunks)]
        for instruction in program.streams[rank].instructions:
            execute(instruction, mails[instruction.chunk])
            if frees:
                free(lines, rank)

    return on_threads(rank_of, len(program.streams))


PIPELINES = sorted(set(SCHEDULES) - DATA_PARALLEL)


def memories_of(mail: Mail, held: set[int], *, gradients: bool) -> int:
    """The messages that a stage has memory for, received and sent, but for received ones of these microbatches."""
    inboxes = [inbox for (_, of_gradients), inbox in mail._inboxes.items() if of_gradients == gradients]
    sent = [len(outbox._pending) for (_, of_gradients), outbox in mail._outboxes.items() if of_gradients != gradients]
    lent = [k for k in held if any(inbox in inboxes for inbox, _ in mail._borrowed.get(k, ()))]
    there = sum(len(inbox._posted) + len(inbox._free) for inbox in inboxes) + sum(sent)
    return there + (len(lent) if gradients else 0)


def transfer(instruction: Instruction, mail: Mail, held: set[int]) -> None:
    """A stage's transfers, all of one size; the microbatches whose messages it holds."""
    match instruction:
        case SendActivation(microbatch=k, peer=peer):
            mail.send_activation(k, peer, [torch.zeros(3)])
        case SendGradient(peer=peer):
            mail.send_gradient(peer, [torch.zeros(3)])
        case RecvActivation(microbatch=k, peer=peer):
            mail.receive_activation(k, peer)
            held.add(k)
        case RecvGradient(microbatch=k, peer=peer):
            mail.receive_gradient(k, peer)
            held.add(k)
        case Backward(microbatch=k) | BackwardInput(microbatch=k):
            mail.release(k)
            held.discard(k)
        case _:
            pass


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (3, 2, 1), (2, 3), (1, 4, 2), (4, 6)], ids=str)
@pytest.mark.parametrize("schedule", ["pipedream"])
def test_what_is_in_transit_is_counted_by_peer(schedule: str, replicas: tuple[int, ...]) -> None:
    cuts = tuple(range(len(replicas) + 1))
    check_transit(program_of(make_plan(schedule, cuts, replicas=replicas, microbatches=1), batches=4))


@pytest.mark.parametrize("schedule", PIPELINES)
def test_what_is_in_transit_is_what_the_streams_say(schedule: str) -> None:
    depth, chunks = 3, chunks_of(schedule)
    microbatches = 1 if schedule in STASHING else 2 * depth
    cuts = tuple(range(depth * chunks + 1))
    check_transit(program_of(make_plan(schedule, cuts, microbatches=microbatches, chunks=chunks), batches=4))


def check_transit(program: Program) -> None:
    """Messages are released when the backward that needs them has ended. What the next instruction sends counts."""
    board = Switchboard(greets=False)

    def rank_of(rank: int) -> None:
        lines, parts = lines_of(board, program, rank, 2), program.stage_streams(program.streams[rank])
        mails = [Mail(program, rank, lines, CPU, chunk=chunk) for chunk in range(len(parts))]
        said = [in_transit(part.instructions, windows=windows(program, part), recompute=False) for part in parts]
        kinds = [set(map(type, part.instructions)) for part in parts]
        held = [set[int]() for _ in parts]
        for instruction in program.streams[rank].instructions:
            chunk = instruction.chunk
            transfer(instruction, mails[chunk], held[chunk])
            output = isinstance(instruction, Forward) and SendActivation in kinds[chunk]
            gradient = isinstance(instruction, Backward | BackwardInput) and RecvActivation in kinds[chunk]
            inputs = memories_of(mails[chunk], held[chunk], gradients=False) + gradient
            outputs = memories_of(mails[chunk], held[chunk], gradients=True) + output
            expected = next(said[chunk])
            assert (inputs, outputs) == (expected.inputs, expected.outputs), format_instruction(instruction)

    assert on_threads(rank_of, len(program.streams)) == []


@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("schedule", PIPELINES)
def test_no_schedule_waits_for_itself_where_first_uses_wait_for_the_other_rank(schedule: str, depth: int) -> None:
    assert play(schedule, depth=depth, meets=True, ahead=0) == []


@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-interleaved", "pipedream-2bw", "zb-v"])
def test_receives_may_be_posted_ahead_on_such_wires_once_all_have_met(schedule: str, depth: int) -> None:
    assert play(schedule, depth=depth, meets=True, ahead=2) == []


@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("schedule", PIPELINES)
def test_no_receive_that_is_posted_keeps_an_allocator_from_freeing(schedule: str, depth: int) -> None:
    """As NCCL's are posted: none before its notice has come."""
    assert play(schedule, depth=depth, meets=True, ahead=0, frees=True) == []


def test_a_receive_posted_ahead_would_deadlock_with_the_ranks_own_send() -> None:
    assert play("1f1b", depth=2, meets=True, ahead=2, frees=True, wait_s=1.0) != []


@pytest.mark.parametrize("shared_order", [True, False])
def test_ranks_that_meet_in_orders_of_their_own_would_wait_for_each_other(shared_order: bool) -> None:
    """The second one shows that these wires do what NCCL does."""
    board = Switchboard(greets=True, wait_s=WAIT_S if shared_order else 0.5)
    edges = [ChannelEdge(0, 1, gradients=False), ChannelEdge(1, 0, gradients=True)]
    stuck = list[int]()

    def rank_of(rank: int) -> None:
        lines = {edge: ChannelLines(FakeWire(board, edge, rank), FakeWire(board, "world", rank)) for edge in edges}
        order = edges if rank == 0 else edges[::-1]
        try:
            for some in [lines] if shared_order else [{edge: lines[edge]} for edge in order]:
                meet(some, rank, CPU)
        except Stuck:
            stuck.append(rank)

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert sorted(stuck) == ([] if shared_order else [0, 1])


EDGE = ChannelEdge(0, 1, gradients=False)


def channel(ahead: int, messages: int, riding_bytes: int = 0) -> tuple[Outbox, Inbox, Switchboard]:
    board, edge = Switchboard(greets=False), EDGE
    ends = [
        ChannelLines(
            FakeWire(board, edge, rank), FakeWire(board, "world", rank), ahead=ahead, riding_bytes=riding_bytes
        )
        for rank in (0, 1)
    ]
    outbox = Outbox(edge, ends[0], messages=messages, window=messages)
    return outbox, Inbox(edge, ends[1], messages=messages, device=CPU), board


@pytest.mark.parametrize("riding_bytes", [0, 64, 4096])
@pytest.mark.parametrize("ahead", [0, 2])
def test_messages_of_any_kind_follow_each_other(ahead: int, riding_bytes: int) -> None:
    z = torch.fft.rfft(torch.arange(8.0))
    messages = [
        [torch.arange(6.0).view(2, 3)],
        [torch.arange(6.0).view(3, 2)],
        [torch.arange(6)],
        [torch.ones(100, dtype=torch.bfloat16), torch.tensor([True, False])],
        [torch.zeros(0, 3), torch.tensor(5.0)],
        [z.conj(), z.conj().imag, torch.arange(12.0).view(3, 4).t()],
        [torch.tensor([], dtype=torch.int64)],
        [torch.full((2, 2), 7, dtype=torch.uint8)],
        [torch.arange(6.0).view(2, 3)],
    ]
    outbox, inbox, board = channel(ahead, len(messages), riding_bytes)
    for message in messages:
        outbox.send(message)
        received = inbox.receive()
        for sent, got in zip(message, received.tensors, strict=True):
            assert got.dtype == sent.dtype
            assert torch.equal(got, sent.resolve_conj().resolve_neg())
        inbox.release(received)
    assert not any(board.sent.values())


def test_what_is_known_to_have_arrived_is_not_held() -> None:
    outbox, _, _ = channel(2, 4)
    numbers = [outbox.send([torch.zeros(3)]) for _ in range(3)]
    outbox.arrived(numbers[1])
    assert len(outbox._pending) == 1
    outbox.arrived(numbers[0])  # no news
    assert len(outbox._pending) == 1
    assert outbox.send([torch.zeros(3)]) == numbers[2] + 1


def test_what_is_posted_ahead_is_used_again_for_messages_that_are_shorter() -> None:
    outbox, inbox, _ = channel(2, 6)
    places = set()
    for length in (9, 5, 8, 1, 9, 3):
        outbox.send([torch.arange(float(length))])
        received = inbox.receive()
        assert torch.equal(received.tensors[0], torch.arange(float(length)))
        places.add(received.memory[0].data_ptr())
        inbox.release(received)
    assert len(places) <= 3


@pytest.mark.parametrize("riding_bytes", [0, 64])
def test_of_what_is_released_in_a_row_one_memory_waits_for_the_next_message(riding_bytes: int) -> None:
    """What a batch under GPipe has received stayed allocated until the next one, and so did the notices it had sent."""
    outbox, inbox, _ = channel(2, 8, riding_bytes)
    for _ in range(6):
        outbox.send([torch.zeros(3)])
    for message in [inbox.receive() for _ in range(6)]:
        inbox.release(message)
    outbox.flush()
    assert len(inbox._free) == len(outbox._free) == 1


def test_of_a_message_only_the_tensors_that_p2_keeps_stay() -> None:
    program = program_of(make_plan("1f1b", (0, 1, 2), microbatches=1), batches=1)
    board = Switchboard(greets=False)
    first, second = (Mail(program, rank, lines_of(board, program, rank, 0), CPU) for rank in range(2))
    microbatch = next(each.microbatch for each in program.streams[0].instructions if isinstance(each, SendActivation))
    first.send_activation(microbatch, 1, [torch.ones(3), torch.ones(5)])
    needed = second.receive_activation(microbatch, 0)[0]
    ((_, message),) = second._borrowed[microbatch]
    places = [weakref.ref(memory) for memory in message.memory]
    del message
    second.release(microbatch, kept={needed.data_ptr()})
    assert [place() is None for place in places] == [False, True]
    second.release(microbatch)
    assert [place() is None for place in places] == [True, True]


def test_a_received_tensor_keeps_what_it_holds_until_it_is_released() -> None:
    outbox, inbox, _ = channel(2, 4)
    for k in range(4):
        outbox.send([torch.full((3,), float(k))])
    kept = [inbox.receive() for _ in range(4)]
    assert [float(message.tensors[0][0]) for message in kept] == [0.0, 1.0, 2.0, 3.0]


def sent(board: Switchboard) -> tuple[int, int]:
    """How many notices and how many tensors an edge has carried."""
    return board.counts["world", 0, 1, EDGE.tag(NOTICE)], board.counts[EDGE, 0, 1, EDGE.tag(PAYLOAD)]


def test_small_tensors_ride_in_their_notice_until_one_is_large() -> None:
    lengths = (3, 9, 3, 16, 17, 3, 40, 1)
    outbox, inbox, board = channel(2, len(lengths), riding_bytes=64)
    carried = []
    for length in lengths:
        outbox.send([torch.arange(float(length))])
        received = inbox.receive()
        assert torch.equal(received.tensors[0], torch.arange(float(length)))
        inbox.release(received)
        carried.append(sent(board))
    #                  ride, up to 64 bytes             and then none any more; 40 empties 2 that were posted
    assert carried == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (6, 2), (7, 4 + 1), (8, 6)]
    assert not any(board.sent.values())


def test_after_a_large_message_notices_have_no_room_for_tensors() -> None:
    """Room that nothing can use any more would be kept for every message under way."""
    outbox, inbox, _ = channel(2, 9, riding_bytes=64)
    rooms = []
    for length in (1, 16, 17, 2, 3, 1):
        outbox.send([torch.arange(float(length))])
        inbox.release(inbox.receive())
        outbox.flush()
        rooms.append(([notice.riding_bytes for _, notice in inbox._notices], outbox._free[-1].riding_bytes))
    #                 two that are posted, and the one that was sent
    assert rooms == [
        ([64, 64], 16),
        ([64, 64], 64),
        ([64, 0], 0),
        ([0, 0], 0),
        ([0, 0], 0),
        ([0, 0], 0),
    ]


def test_what_rode_in_a_notice_stays_what_it_was_when_the_notice_is_used_again() -> None:
    outbox, inbox, _ = channel(2, 9, riding_bytes=4096)
    kept = []
    for k in range(9):
        tensor = torch.full((3,), float(k), requires_grad=True)
        outbox.send([tensor, torch.tensor(k)])
        kept.append(inbox.receive())
        inbox.release(kept[-1])
    assert [(float(m.tensors[0][2]), int(m.tensors[1])) for m in kept] == [(float(k), k) for k in range(9)]
    assert all(t.untyped_storage().nbytes() == t.nbytes and not t._is_view() for m in kept for t in m.tensors)


def test_a_sender_may_be_ahead_of_the_receiver_by_all_its_messages() -> None:
    outbox, inbox, _ = channel(2, 6, riding_bytes=64)
    for length in (1, 16, 17, 2, 90, 5):
        outbox.send([torch.arange(float(length))])
    assert [len(inbox.receive().tensors[0]) for _ in range(6)] == [1, 16, 17, 2, 90, 5]


def test_a_tensor_that_is_changed_while_it_is_on_its_way_ends_the_run() -> None:
    """A receiver on the same node reads it when it wants: it may be the changed one."""
    edge, board = ChannelEdge(0, 1, gradients=False), Switchboard(greets=False)
    outbox = Outbox(edge, ChannelLines(FakeWire(board, edge, 0), FakeWire(board, "world", 0)), messages=2, window=1)
    kept = torch.zeros(3)
    outbox.arrived(outbox.send([kept]))
    number = outbox.send([kept.view(3, 1)])
    kept += 1
    with pytest.raises(RunFailedError, match="rank 1 was changed in place while it was on its way"):
        outbox.arrived(number)
