"""Who is taken for hung, by a clock of the test's own; ranks are processes that sleep, with a made-up status."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.programs.instructions import (
    Backward,
    Checkpoint,
    Forward,
    RecvGradient,
    ReduceNorm,
    ReduceTied,
    SendActivation,
    Update,
)
from tests.worker_agent.runtime.plans import make_plan
from worker_agent.engine.results import read_failure
from worker_agent.runtime.hung import SILENT_S, STARTING_S, Hunter
from worker_agent.runtime.job import RunJob, write_job
from worker_agent.runtime.status import ENDING, EVERYTHING, MEETING, STARTING, Activity, Status

BEGUN_S = 1000.0


class Node:
    """Two ranks and the hunter that looks at them."""

    def __init__(
        self, out: Path, processes: list[subprocess.Popen[bytes]], *, microbatches: int = 4, forward_s: float = 0.01
    ) -> None:
        plan = make_plan("1f1b", (0, 2, 4), microbatches=microbatches)
        quick = tuple(
            replace(c, forward_s=forward_s, backward_s=2 * forward_s, recompute_s=0.0, update_s=0.0) for c in plan.costs
        )
        self.job = RunJob(
            plan=replace(plan, costs=quick),
            model="m:m",
            data="d:d",
            steps=9,
            checkpoint_every=3,
            timeout_s=70,
            clip_norm=1.0,
            tied=((0, 1),),
            out=str(out),
        )
        write_job(self.job)
        self.processes = processes
        self.now_s = BEGUN_S
        self.hunter = Hunter(self.job, (0, 1), self.now_s)

    def place(self, kind: type, batch: int = 2) -> int:
        """The index of an instruction of rank 0, in so manieth a batch."""
        found = [i for i, each in enumerate(self.job.program().streams[0].instructions) if isinstance(each, kind)]
        return found[len(found) * batch // 9]

    def at(
        self,
        rank: int,
        instruction: int,
        *,
        since_s: float,
        pulse_s: float | None = None,
        batches: int = 3,
        activity: Activity = Activity.OWN,
        finished: int = EVERYTHING,
    ) -> None:
        """Writes a rank's status."""
        pulse_s = self.now_s if pulse_s is None else pulse_s
        status = Status(instruction, since_s, batches, 0.5, self.processes[rank].pid, pulse_s)
        status = replace(status, activity=activity, finished=finished)
        self.job.directory.status(rank).write_bytes(status.packed())

    def pass_time(
        self,
        seconds: float,
        place: int,
        *,
        alive: bool = True,
        batches: int = 3,
        activity: Activity = Activity.OWN,
        finished: int = EVERYTHING,
    ) -> str | None:
        """Looks four times a second while rank 0 stays at a place; what is said of it in the end."""
        since_s = self.now_s
        for _ in range(int(4 * seconds)):
            self.now_s += 0.25
            pulse_s = None if alive else since_s
            self.at(0, place, since_s=since_s, pulse_s=pulse_s, batches=batches, activity=activity, finished=finished)
            self.at(1, MEETING, since_s=since_s)
            self.hunter.look(self.now_s)
        return self.said(0)

    def said(self, rank: int) -> str | None:
        """The last word that was written for a rank."""
        failure = read_failure(self.job.directory.failure(rank))
        return failure.message if failure else None


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-c", "input()"]
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE)) for _ in (0, 1)]
        yield started
        for process in started:
            process.kill()


@pytest.fixture
def node(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> Node:
    return Node(tmp_path, processes)


@pytest.fixture
def long_node(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> Node:
    """Batches of 300 microbatches that take 0.18 s together."""
    return Node(tmp_path, processes, microbatches=300, forward_s=0.0002)


@pytest.mark.each_case
@pytest.mark.parametrize("kind", [Forward, Backward, RecvGradient, Update, Checkpoint])
def test_a_rank_without_a_sign_of_life_is_ended_wherever_it_is(kind: type, node: Node) -> None:
    assert node.pass_time(SILENT_S - 1, node.place(kind), alive=False) is None
    assert node.pass_time(SILENT_S + 1, node.place(kind), alive=False) == "hung: no sign of life for 10 s"
    assert node.processes[0].wait() == -signal.SIGKILL
    assert node.said(1) is None and node.processes[1].poll() is None


@pytest.mark.each_case
@pytest.mark.parametrize("kind", [Forward, Backward, Update])
def test_a_rank_that_stays_at_its_own_work_is_ended(kind: type, node: Node) -> None:
    assert node.pass_time(SILENT_S - 1, node.place(kind)) is None
    assert node.pass_time(SILENT_S + 1, node.place(kind)) == "hung: 10 s in one instruction"
    assert node.processes[0].wait() == -signal.SIGKILL


@pytest.mark.each_case
@pytest.mark.parametrize("kind", [RecvGradient, Checkpoint])
def test_a_rank_that_waits_for_others_or_its_disk_is_not(kind: type, node: Node) -> None:
    assert node.pass_time(60, node.place(kind)) is None


@pytest.mark.each_case
@pytest.mark.parametrize("kind", [RecvGradient, SendActivation, ReduceTied, ReduceNorm])
@pytest.mark.parametrize("device", [False, True])
def test_whoever_waits_for_another_rank_is_not_to_blame_however_long(kind: type, device: bool, node: Node) -> None:
    """Neither where the host waits, nor where it waits for a device that waits: in an update, most often."""
    place = node.place(kind)
    if device:
        assert node.pass_time(200, node.place(Update), finished=place) is None
    else:
        assert node.pass_time(200, place) is None


def test_data_may_take_as_long_as_others_wait(node: Node) -> None:
    """They once counted as a forward, and a slow disk cost a healthy rank its life after 10 s."""
    place = node.place(Forward)
    assert node.pass_time(69, place, activity=Activity.DATA) is None
    assert node.pass_time(2, place) is None
    assert node.pass_time(69, place, activity=Activity.DATA) is None
    assert node.pass_time(71, place, activity=Activity.DATA) == "hung: 70 s at its data"


def test_a_checkpoint_that_takes_longer_than_others_wait_is_named(node: Node) -> None:
    assert node.pass_time(71, node.place(Checkpoint)) == "hung: 70 s at its checkpoint"


def test_a_host_that_is_ahead_of_its_device_may_wait_while_that_gets_on(long_node: Node) -> None:
    """On a GPU the whole batch is computed while the host waits in its update."""
    node, update = long_node, long_node.place(Update)
    first = node.place(Forward)
    for finished in range(first, first + 60):
        assert node.pass_time(1, update, finished=finished) is None
    for finished in range(update - 9, update + 1):
        assert node.pass_time(SILENT_S - 1, update, finished=finished) is None


def test_a_device_that_gets_no_further_is_ended_by_what_it_has_left_to_do(long_node: Node) -> None:
    """With 300 microbatches left the limit is 100 times their 0.18 s."""
    node, update = long_node, long_node.place(Update)
    assert node.pass_time(17, update, finished=node.place(Forward)) is None
    assert node.pass_time(1, update, finished=node.place(Forward) + 1) is None
    assert node.pass_time(17, update, finished=node.place(Forward)) is None
    said = node.pass_time(19, update, finished=node.place(Forward))
    assert said == "hung: 18 s in one instruction of its device, F601@2, with its host"


def test_a_device_that_hangs_in_the_last_backward_is_ended_soon(long_node: Node) -> None:
    node, update = long_node, long_node.place(Update)
    instructions = node.job.program().streams[0].instructions
    last = max(i for i in range(update) if isinstance(instructions[i], Backward))
    assert node.pass_time(SILENT_S - 1, update, finished=last) is None
    said = node.pass_time(SILENT_S + 1, update, finished=last)
    assert said == "hung: 10 s in one instruction of its device, B900@2, with its host"


def test_a_device_that_hangs_at_the_end_is_ended(node: Node) -> None:
    last = len(node.job.program().streams[0].instructions)
    assert node.pass_time(200, ENDING, finished=last) is None
    said = node.pass_time(SILENT_S + 1, ENDING, finished=node.place(Backward, 8))
    assert said is not None and said.startswith("hung: 10 s in one instruction of its device, B33@8")


def test_a_host_is_ended_once_its_device_has_nothing_left_to_do(node: Node) -> None:
    place = node.place(Forward)
    assert node.pass_time(SILENT_S - 1, place, finished=place - 1) is None
    assert node.pass_time(SILENT_S - 1, place, finished=place) is None
    assert node.pass_time(SILENT_S + 1, place, finished=place) == "hung: 10 s in one instruction"


def test_a_first_batch_may_take_as_long_as_others_wait(node: Node) -> None:
    """A model may be compiled in it."""
    assert node.pass_time(69, node.place(Forward, 0), batches=0) is None
    assert node.pass_time(71, node.place(Forward, 0), batches=0) == "hung: 70 s in one instruction"


def test_ranks_that_were_suspended_together_with_the_hunter_are_not_hung(node: Node) -> None:
    """A container that is paused, a laptop that sleeps: the first look comes before the first sign of life."""
    place = node.place(Forward)
    for _ in range(5):
        node.at(0, place, since_s=node.now_s)
        node.hunter.look(node.now_s)
        node.now_s += 1000.0
        node.hunter.look(node.now_s)
    assert node.said(0) is None


def test_a_slow_rank_whose_signs_of_life_come_late_is_not_hung(node: Node) -> None:
    for _ in range(20):
        assert node.pass_time(SILENT_S - 1, node.place(Forward), alive=False) is None
        node.now_s += 0.25


@pytest.mark.each_case
@pytest.mark.parametrize("place", [STARTING, MEETING, ENDING])
def test_a_silent_rank_outside_its_stream_is_ended_soon_only_if_stopped(place: int, node: Node) -> None:
    """The import of a large library from a slow disk gives no sign of life either."""
    assert node.pass_time(STARTING_S - 1, place, alive=False) is None
    os.kill(node.processes[0].pid, signal.SIGSTOP)
    os.waitpid(node.processes[0].pid, os.WUNTRACED)
    assert node.pass_time(SILENT_S + 1, place, alive=False) is not None


def test_a_rank_that_hangs_at_its_start_is_ended_and_its_waiting_peers_are_not_blamed(node: Node) -> None:
    assert node.pass_time(69, MEETING) is None
    assert node.pass_time(71, STARTING) == "hung: 70 s before its first instruction"
    assert node.said(1) is None


def test_a_rank_that_hangs_at_its_first_data_is_ended(node: Node) -> None:
    assert node.pass_time(69, STARTING, activity=Activity.DATA) is None
    assert node.pass_time(71, STARTING, activity=Activity.DATA) == "hung: 70 s at its data"


def test_a_rank_that_has_ended_is_left_alone(node: Node) -> None:
    """It gives no sign of life while others still write: it was once blamed for that."""
    node.job.directory.result(0).write_text("{}")
    assert node.pass_time(60, ENDING, alive=False) is None
    assert node.pass_time(60, node.place(Forward), alive=False) is None
    assert node.processes[0].poll() is None
