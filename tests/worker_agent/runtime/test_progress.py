"""The progress of a run: what the ranks' statuses come to, and how it is said."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pipeplan.cli.console import EVERY_S
from pipeplan.documents.forms import Form
from pipeplan.errors import InvalidInputError
from tests.worker_agent.runtime.plans import make_plan
from worker_agent.commands.run import ProgressLines, redrawn
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.status import Status, StatusWriter, read_status
from worker_agent.runtime.watch import LATELY_S, RunProgress, Watcher, describe

JOB = RunJob(plan=make_plan("1f1b", (0, 2, 4)), model="m", data="d", steps=100, first_step=20, out="/nowhere")


def status(batches: int, end_s: float, busy_s: float, memory_bytes: int, loss: float = float("nan")) -> Status:
    """A rank that has done so many batches since the start."""
    return Status(
        instruction=0,
        started_s=0.0,
        batches_done=JOB.first_step + batches,
        loss=loss,
        process=1,
        pulse_s=0.0,
        measured_batches=batches,
        end_s=end_s,
        busy_s=busy_s,
        memory_bytes=memory_bytes,
        peak_memory_bytes=memory_bytes,
    )


def test_progress_is_of_all_ranks_and_of_the_last_seconds() -> None:
    watcher = Watcher(JOB)
    first = watcher.look({0: status(4, 2.0, 1.0, 300), 1: status(4, 2.0, 2.0, 200, loss=0.5)})
    assert first == RunProgress(
        done=24,
        steps=100,
        loss=0.5,
        samples_per_s=4 * 8 / 2.0,
        bubble_fraction=0.25,
        peak_memory_bytes=300,
        memory_rank=0,
        left_s=76 * 8 / 16.0,
    )
    later_s = 2.0 + LATELY_S
    later = watcher.look({0: status(44, later_s, 1.0, 300), 1: status(44, later_s, 7.0, 200, loss=0.25)})
    assert later is not None
    assert later.samples_per_s == 40 * 8 / LATELY_S
    assert later.bubble_fraction == 1 - (0 + 5) / (2 * LATELY_S)


def test_progress_is_reported_only_with_a_loss_and_a_new_batch() -> None:
    watcher = Watcher(JOB)
    done = {0: status(4, 2.0, 1.0, 300), 1: status(4, 2.0, 2.0, 200, loss=0.5)}
    assert watcher.look({0: done[0]}) is None
    assert watcher.look({**done, 1: replace(done[1], loss=float("nan"))}) is None
    assert watcher.look(done) is not None
    assert watcher.look(done) is None


def test_the_rank_with_the_last_chunk_of_the_model_is_followed() -> None:
    plan = make_plan("1f1b-interleaved", (0, 1, 2, 3, 4), chunks=2)
    assert Watcher(replace(JOB, plan=plan)).followed == 1
    assert Watcher(replace(JOB, plan=replace(plan, schedule="zb-v"))).followed == 0
    assert Watcher(replace(JOB, plan=make_plan("pipedream", (0, 1, 4), replicas=(2, 1), microbatches=1))).followed == 1


def test_an_update_without_a_loss_keeps_the_newest(tmp_path: Path) -> None:
    """Under ASP the last update of a batch has the gradients, and the loss, of another replica."""
    path = tmp_path / "rank-0.status"
    writer = StatusWriter(path)
    writer.updated(0)
    writer.note_loss(0.5)
    writer.updated(1)
    found = read_status(path)
    assert found is not None
    assert (found.batches_done, found.loss) == (1, 0.5)


PROGRESS = RunProgress(
    done=120,
    steps=1000,
    loss=0.12341,
    samples_per_s=512.3,
    bubble_fraction=0.123,
    peak_memory_bytes=1288490189,
    memory_rank=3,
    left_s=192.0,
)


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (
            PROGRESS,
            "step 120 of 1000, loss 0.1234, 512 samples/s, bubble 12 %, memory 1.2 GiB (rank 3), 0:03:12 left",
        ),
        (
            replace(PROGRESS, samples_per_s=None, bubble_fraction=None, peak_memory_bytes=0, left_s=None),
            "step 120 of 1000, loss 0.1234",
        ),
    ],
)
def test_a_line_says_what_is_known(progress: RunProgress, line: str) -> None:
    assert describe(progress) == line


def test_without_a_terminal_lines_come_now_and_then_and_at_the_end() -> None:
    said: list[str] = []
    now = [100.0]
    lines = ProgressLines(said.append, lambda: now[0])
    for step in range(1, 101):
        lines(replace(PROGRESS, done=step, steps=100))
        now[0] += EVERY_S / 10
    assert [line.split(",")[0] for line in said] == [f"step {step} of 100" for step in (*range(11, 100, 10), 100)]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_on_a_narrow_terminal_nothing_is_cut_off(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    with redrawn(JOB, console) as on_progress:
        on_progress(PROGRESS)
    assert isinstance(console.file, io.StringIO)
    assert describe(PROGRESS) in " ".join(console.file.getvalue().split())


def test_a_plan_for_another_engine_is_not_run() -> None:
    plan = replace(make_plan("1f1b", (0, 2, 4)), engine="megatron", form=Form(tensor=2))
    with pytest.raises(InvalidInputError, match="export it") as raised:
        RunJob(plan=plan, model="m", data="d", steps=100, out="/nowhere")
    assert raised.value.field == "plan.engine"
