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

from planner_service.core.schedule.instructions import Backward, Checkpoint, Forward, RecvGradient, Update
from tests.worker.runtime.plans import make_plan
from worker_agent.runtime.hung import SILENT_S, STARTING_S, Hunter
from worker_agent.runtime.job import RunJob, write_job
from worker_agent.runtime.results import read_failure
from worker_agent.runtime.status import ENDING, MEETING, STARTING, Status

BEGUN_S = 1000.0


class Node:
    """Two ranks and the hunter that looks at them."""

    def __init__(self, out: Path, processes: list[subprocess.Popen[bytes]]) -> None:
        plan = make_plan("1f1b", (0, 2, 4))
        quick = tuple(replace(c, forward_s=0.01, backward_s=0.02, recompute_s=0.0) for c in plan.costs)
        self.job = RunJob(
            plan=replace(plan, costs=quick),
            model="m:m",
            data="d:d",
            steps=9,
            checkpoint_every=3,
            timeout_s=70,
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
        self, rank: int, instruction: int, *, since_s: float, pulse_s: float | None = None, batches: int = 3
    ) -> None:
        """Writes a rank's status."""
        pulse_s = self.now_s if pulse_s is None else pulse_s
        status = Status(instruction, since_s, batches, 0.5, self.processes[rank].pid, pulse_s)
        self.job.directory.status(rank).write_bytes(status.packed())

    def pass_time(self, seconds: float, place: int, *, alive: bool = True, batches: int = 3) -> str | None:
        """Looks four times a second while rank 0 stays at a place; what is said of it in the end."""
        since_s = self.now_s
        for _ in range(int(4 * seconds)):
            self.now_s += 0.25
            self.at(0, place, since_s=since_s, pulse_s=None if alive else since_s, batches=batches)
            self.at(1, MEETING, since_s=since_s)
            self.hunter.look(self.now_s)
        return self.said(0)

    def said(self, rank: int) -> str | None:
        """The last word that was written for a rank."""
        failure = read_failure(self.job.directory.failure(rank))
        return failure.message if failure else None


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    command = [sys.executable, "-c", "input()"]
    with ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE)) for _ in (0, 1)]
        yield Node(tmp_path, processes)
        for process in processes:
            process.kill()


@pytest.mark.parametrize("kind", [Forward, Backward, RecvGradient, Update, Checkpoint])
def test_a_rank_without_a_sign_of_life_is_ended_wherever_it_is(kind: type, node: Node) -> None:
    assert node.pass_time(SILENT_S - 1, node.place(kind), alive=False) is None
    assert node.pass_time(SILENT_S + 1, node.place(kind), alive=False) == "hung: no sign of life for 10 s"
    assert node.processes[0].wait(10) == -signal.SIGKILL
    assert node.said(1) is None and node.processes[1].poll() is None


@pytest.mark.parametrize("kind", [Forward, Backward, Update])
def test_a_rank_that_stays_at_its_own_work_is_ended(kind: type, node: Node) -> None:
    assert node.pass_time(SILENT_S - 1, node.place(kind)) is None
    assert node.pass_time(SILENT_S + 1, node.place(kind)) == "hung: 10 s in one instruction"
    assert node.processes[0].wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("kind", [RecvGradient, Checkpoint])
def test_a_rank_that_waits_for_others_or_its_disk_is_not(kind: type, node: Node) -> None:
    assert node.pass_time(60, node.place(kind)) is None


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


@pytest.mark.parametrize("place", [STARTING, MEETING, ENDING])
def test_a_rank_that_is_silent_beside_its_stream_is_ended_soon_only_if_it_is_stopped(place: int, node: Node) -> None:
    """The import of a large library from a slow disk gives no sign of life either."""
    assert node.pass_time(STARTING_S - 1, place, alive=False) is None
    os.kill(node.processes[0].pid, signal.SIGSTOP)
    os.waitpid(node.processes[0].pid, os.WUNTRACED)
    assert node.pass_time(SILENT_S + 1, place, alive=False) is not None


def test_a_rank_that_never_comes_out_of_its_start_is_ended_and_those_that_wait_for_it_are_not(node: Node) -> None:
    assert node.pass_time(69, MEETING) is None
    assert node.pass_time(71, STARTING) == "hung: 70 s before its first instruction"
    assert node.said(1) is None


def test_a_rank_that_has_ended_is_left_alone(node: Node) -> None:
    """It gives no sign of life while others still write: it was once blamed for that."""
    node.job.directory.result(0).write_text("{}")
    assert node.pass_time(60, ENDING, alive=False) is None
    assert node.pass_time(60, node.place(Forward), alive=False) is None
    assert node.processes[0].poll() is None
