"""A run goes on where its checkpoint ends, with what the checkpoint was written with, or not at all."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Model
from pipeplan.errors import InvalidInputError, RunFailedError
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.recorded import reads_of
from tests.worker_agent.runtime.test_checkpoint import DATA, MLP, write
from worker_agent.models.chain import build_model
from worker_agent.runtime.job import RunJob, holding
from worker_agent.runtime.model_checks import require_match
from worker_agent.runtime.rank import run_rank
from worker_agent.runtime.resume import resumed
from worker_agent.runtime.status import StatusWriter, read_status

PLAN = make_plan("1f1b", (0, 2, 4))


def job_in(out: Path, **options: Any) -> RunJob:
    given: dict[str, Any] = {"plan": PLAN, "model": MLP, "data": DATA, "steps": 9, "checkpoint_every": 3} | options
    return RunJob(out=str(out), device="cpu", **given)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"plan": make_plan("gpipe", (0, 2, 4))}, "plan: must be .*, whose schedule is 1f1b, got 'gpipe'"),
        ({"plan": make_plan("1f1b", (0, 1, 4))}, "plan: must be .*, whose stages is 0-2-4, got '0-1-4'"),
        ({"plan": make_plan("1f1b", (0, 2, 4), replicas=2)}, "plan: must be .*, whose replicas is 1-1, got '2-2'"),
        ({"plan": make_plan("1f1b", (0, 2, 4), dtype="float32")}, "plan: .*, whose dtype is float64, got 'float32'"),
        (
            {"plan": replace(PLAN, planner="another")},
            "plan: must be the one that wrote the checkpoint, [0-9a-f]{32}, got",
        ),
        (
            {"model": MLP.replace("depth=4", "depth=5")},
            "model: must be the one that wrote the checkpoint, .*depth=4, got",
        ),
        ({"data": DATA + "&samples=64"}, "data: must be the one that wrote the checkpoint, .*, got"),
        ({"seed": 1}, "seed: must be the one that wrote the checkpoint, 0, got 1"),
        ({"steps": 6}, "steps: must be above the 6 steps that the checkpoint has done, got 6"),
        ({"steps": 12, "lr_schedule": "linear"}, "decay_steps: must be given: it was 9, the steps .*, got None"),
    ],
)
def test_what_does_not_fit_its_checkpoint_is_refused(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    write(job_in(tmp_path), 3, 6)
    with pytest.raises(InvalidInputError, match=sentence):
        resumed(job_in(tmp_path, **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps": 12},
        {"model": "worker_agent.models.presets:mlp?depth=4&width=8"},
        {"steps": 12, "lr_schedule": "linear", "decay_steps": 9},
    ],
)
def test_what_fits_its_checkpoint_goes_on_from_it(options: dict[str, Any], tmp_path: Path) -> None:
    write(job_in(tmp_path), 3, 6)
    assert resumed(job_in(tmp_path, **options)).first_step == 6


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [("1f1b", (2, 2)), ("pipedream-2bw", (1, 1)), ("pipedream", (2, 1)), ("pipedream", (1, 2))],
)
def test_no_microbatch_is_read_twice_or_left_out_across_a_resumption(
    schedule: str, replicas: tuple[int, ...], tmp_path: Path
) -> None:
    plan = make_plan(schedule, (0, 2, 4), replicas=replicas, microbatches=1 if schedule == "pipedream" else 4)
    data = f"tests.worker_agent.runtime.recorded:recorded?folder={tmp_path}/reads"
    job = job_in(tmp_path, plan=plan, data=data, steps=4, checkpoint_every=2)
    run_ranks(job)
    first = reads(job)
    going_on = resumed(job, before=4)
    assert going_on.first_step == 2
    run_ranks(going_on)
    second, a_batch = reads(going_on), plan.batch_size // plan.microbatch_size
    for rank, numbers in first.items():
        assert [k for k in numbers if k < 2 * a_batch] + second[rank] == numbers
    for stage in (0, 1):
        ranks = [rank for rank, worker in enumerate(plan.placement) if worker.stage == stage]
        assert sorted(k for rank in ranks for k in first[rank]) == list(range(4 * a_batch))


def reads(job: RunJob) -> dict[int, list[int]]:
    """What the ranks of the last start have read, by rank."""
    found = {}
    for rank in range(job.plan.workers):
        status = read_status(job.directory.status(rank))
        assert status is not None
        numbers = reads_of(job.directory.root / "reads", status.process)
        assert numbers is not None
        found[rank] = numbers
    return found


def planned(model: str, blocks: tuple[int, ...]) -> Plan:
    """A plan that knows the bytes of its stages' weights."""
    plan = make_plan("1f1b", blocks, dtype="float32")
    costs = tuple(replace(costs, version_bytes=2 * 72 * 4) for costs in plan.costs)
    return replace(plan, costs=costs, model=Model(name="mlp", spec=model))


def test_a_plan_for_another_model_is_refused(tmp_path: Path) -> None:
    job = job_in(tmp_path, plan=planned(MLP, (0, 2, 4)))
    require_match(job, build_model(MLP, seed=0))
    wider, deeper = MLP.replace("width=8", "width=9"), MLP.replace("depth=4", "depth=5")
    with pytest.raises(
        InvalidInputError, match=r"model: must have the plan's 576 bytes of weights in stage 0; .*, got 720"
    ):
        require_match(replace(job, model=wider), build_model(wider, seed=0))
    with pytest.raises(InvalidInputError, match="model: must have the plan's 4 blocks, got 5"):
        require_match(replace(job, model=deeper), build_model(deeper, seed=0))
    with pytest.raises(
        InvalidInputError, match=r"model: must have the plan's 576 bytes of weights in stage 0; .*, got 1152"
    ):
        require_match(job, build_model(MLP, seed=0, dtype=torch.float64))


def test_another_number_of_processes_than_the_plan_has_workers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    job = job_in(tmp_path)
    with pytest.raises(InvalidInputError, match=r"plan\.workers: must be 3, as many as processes were started, got 2"):
        run_rank(job, 0, 0, StatusWriter(tmp_path / "rank-0.status"))


def test_a_folder_that_cannot_be_written_to_is_one_error(tmp_path: Path) -> None:
    from worker_agent.runtime.run import execute

    (tmp_path / "out").write_text("a file")
    with pytest.raises(RunFailedError, match="cannot prepare the run's folder"):
        execute(job_in(tmp_path / "out"), lambda _progress: None)


def test_a_path_that_can_be_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    for path in (tmp_path / "file", tmp_path / "file" / "out"):
        rule = r"out: must be a folder that can be made: Not a directory, got "
        with pytest.raises(InvalidInputError, match=rule), holding(path):
            pass


def test_a_folder_has_one_run_at_a_time_and_is_free_after_it(tmp_path: Path) -> None:
    refused = pytest.raises(InvalidInputError, match=f"out: must be free, and process {os.getpid()} on ")
    with holding(tmp_path), refused, holding(tmp_path):
        pass
    with holding(tmp_path):
        pass
