"""What a rank is at: by its status, by the events of its device, and as real ranks say it."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.programs.instructions import is_compute
from pipeplan.programs.text import parse_instruction, parse_stream
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from worker_agent.engine.clocks import Events, HostClock
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.recorder import Recorder
from worker_agent.runtime.status import (
    ENDING,
    EVERYTHING,
    MEETING,
    STARTING,
    Activity,
    Holdup,
    Status,
    StatusWriter,
    activity_of,
    holdup,
    read_status,
)

STREAM = parse_stream("F1 >F1:1 <B1:1 B1 U1 C1")
STATUS = Status(instruction=0, started_s=0.0, batches_done=0, loss=0.5, process=1, pulse_s=0.0)
OWN, DATA, CHECKPOINT, PEER = Activity
MLP = "worker_agent.models.presets:mlp?width=8&depth=4"
REGRESSION = "worker_agent.models.presets:regression?width=8&samples=64"
WATCHED = "tests.worker_agent.runtime.faulty:watched_data?ranks="
WAITS = "tests.worker_agent.runtime.faulty:waits_backwards?ranks="


@pytest.mark.parametrize(
    ("instruction", "finished", "activity", "expected"),
    [
        (STARTING, 0, OWN, Holdup(range(0), OWN)),
        (STARTING, 0, DATA, Holdup(range(0), DATA)),
        (MEETING, 0, OWN, Holdup(range(0), PEER)),
        (0, EVERYTHING, OWN, Holdup(range(1), OWN)),
        (0, 0, DATA, Holdup(range(1), DATA)),
        (0, 1, DATA, Holdup(range(1), DATA)),
        (2, 2, OWN, Holdup(range(2, 3), PEER)),
        (4, 0, OWN, Holdup(range(5), OWN, on_device=True)),
        (4, 2, OWN, Holdup(range(2, 5), PEER, on_device=True)),
        (4, 4, OWN, Holdup(range(4, 5), OWN)),
        (5, EVERYTHING, OWN, Holdup(range(5, 6), CHECKPOINT)),
        (ENDING, 3, OWN, Holdup(range(3, 6), OWN, on_device=True)),
        (ENDING, 6, OWN, Holdup(range(0), PEER)),
    ],
)
def test_a_rank_is_at_what_its_device_has_not_finished(
    instruction: int, finished: int, activity: Activity, expected: Holdup
) -> None:
    status = replace(STATUS, instruction=instruction, finished=finished, activity=activity)
    assert holdup(status, STREAM) == expected


@pytest.mark.parametrize(
    ("text", "activity"),
    [
        *((text, OWN) for text in ("R1", "I1", "W1")),
        *((text, PEER) for text in ("<F1:0", ">B1:0", "S1", "G1", "T1:0,1", "N1")),
    ],
)
def test_every_exchange_is_a_wait_for_another_rank(text: str, activity: Activity) -> None:
    assert activity_of(parse_instruction(text)) is activity


class Passing:
    """An event that a device has passed, or not yet."""

    def __init__(self, passed: bool = False) -> None:
        self.passed = passed

    def query(self) -> bool:
        """Whether it has."""
        return self.passed


def test_events_are_counted_in_order_and_over_those_that_are_taken() -> None:
    events, all_of_them = Events[Passing](), [Passing() for _ in range(6)]
    for event in all_of_them:
        events.add(event)
    assert events.passed() == 0
    for place in (0, 1, 3):
        all_of_them[place].passed = True
    assert events.passed() == 2
    events.take(2)
    assert events.passed() == 2
    all_of_them[2].passed = True
    assert events.passed() == 4
    for event in all_of_them:
        event.passed = True
    events.take(3)  # whoever takes has waited for them: nobody had asked meanwhile
    assert events.passed() == 6
    assert events.oldest() == all_of_them[5:]


class Lost:
    """An event of a device that has failed."""

    def query(self) -> bool:
        """Fails as torch does."""
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_fails_has_passed_no_more() -> None:
    """The thread that gives signs of life goes on; the host hears of it at its own next call."""
    events = Events[Passing | Lost]()
    for event in (Passing(True), Lost()):
        events.add(event)
    assert events.passed() == events.passed() == 1


def test_on_a_processor_an_instruction_is_finished_at_its_end() -> None:
    recorder = Recorder(HostClock(), closes=lambda instruction: instruction == STREAM[4])
    found = []
    for instruction in STREAM:
        recorder.begin()
        found.append(recorder.finished())
        recorder.end(instruction, 0)
    assert [*found, recorder.finished()] == [0, 1, 2, 3, 4, 5, 6]


def test_processor_time_is_that_of_compute_alone() -> None:
    ticks = iter(range(100))
    recorder = Recorder(HostClock(), processor=lambda: float(next(ticks)))
    for instruction in STREAM:
        recorder.begin()
        recorder.end(instruction, 0)
    assert recorder.processor_s == sum(is_compute(instruction) for instruction in STREAM) > 0
    assert Recorder(HostClock()).processor_s is None


def test_a_status_says_what_a_host_does_instead_of_its_instruction(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.status"
    writer, said = StatusWriter(path), []

    def note() -> None:
        status = read_status(path)
        assert status is not None
        said.append(status.activity)

    note()
    with pytest.raises(OSError, match="gone"), writer.during(DATA):
        note()
        raise OSError("gone")
    note()
    assert said == [OWN, DATA, OWN]


def job(folder: Path, *, microbatches: int = 3, model: str = MLP, data: str = REGRESSION) -> RunJob:
    plan = make_plan("gpipe", (0, 2, 4), microbatches=microbatches, dtype="float32")
    return RunJob(plan=plan, model=model, data=data, steps=1, out=str(folder), device="cpu")


def test_a_rank_that_reads_data_says_so_and_how_far_its_device_is(tmp_path: Path) -> None:
    run_ranks(job(tmp_path, data=f"{WATCHED}{tmp_path}/ranks"))
    for rank in (0, 1):
        lines = (tmp_path / "ranks" / f"rank-{rank}.seen").read_text().splitlines()
        seen = [tuple(map(int, line.split())) for line in lines]
        assert [at == STARTING for _, at, _ in seen] == [True, True, False, False], "the last one first"
        assert all(activity == DATA and at in (STARTING, finished) for activity, at, finished in seen)


def test_a_rank_that_waits_for_its_last_sends_is_at_its_end(tmp_path: Path) -> None:
    """It once stayed at its last update, and was taken for hung while the other rank computed."""
    run_ranks(job(tmp_path, microbatches=8, model=f"{WAITS}{tmp_path}/ranks"))
