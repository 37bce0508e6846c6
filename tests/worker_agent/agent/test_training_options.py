"""How a run trains is said once: jobs, the command and ranks know the same options, with the same defaults."""

import inspect
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from pipeplan.documents.files import dump, parse, plan_document
from pipeplan.errors import InvalidInputError
from pipeplan.protocol.jobs import RunResult, RunTask
from pipeplan.protocol.training import TrainingOptions
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from worker_agent.agent.task import perform, write_task
from worker_agent.commands.run import run
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.measured import read_batches

PLAN = make_plan("1f1b", (0, 2, 4), dtype="float32", microbatches=2)
MODEL, DATA = "preset:mlp?depth=4&width=8", "worker_agent.models.presets:regression?width=8"
CHOSEN: dict[str, Any] = {
    "seed": 3,
    "learning_rate": 0.5,
    "lr_schedule": "cosine",
    "warmup_steps": 2,
    "clip_norm": 0.05,
    "autocast": "float16",
    "loss_scale": 64.0,
    "checkpoint_every": 2,
}


def task(**options: Any) -> RunTask:
    return RunTask(plan_id="0" * 32, model=MODEL, data=DATA, steps=4, **options)


def test_jobs_the_command_and_ranks_have_the_same_options_and_defaults() -> None:
    options = {field.name: field.default for field in fields(TrainingOptions)}
    of_tasks = {name: RunTask.model_fields[name].default for name in options}
    of_command = {name: inspect.signature(run).parameters[name].default for name in options}
    assert of_tasks == options
    assert of_command | {"checkpoint_every": 0} == options  # the command's default there is a tenth of the steps
    assert issubclass(RunJob, TrainingOptions)
    assert task(**CHOSEN).training == TrainingOptions(**CHOSEN)


@pytest.mark.campaign
def test_an_agent_trains_as_its_job_says(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    write_task(folder, task(**CHOSEN), dump(plan_document(PLAN)))
    perform(folder)
    report = parse(RunResult, (folder / "result.json").read_bytes()).report
    job = RunJob(plan=PLAN, model=MODEL, data=DATA, steps=4, out=str(tmp_path / "same"), device="cpu", **CHOSEN)
    run_ranks(job)
    assert list(report.losses) == read_batches(job.directory.batches(1))["loss"].tolist()
    run_ranks(RunJob(**asdict_but(job, clip_norm=None, out=str(tmp_path / "other"))))
    assert list(report.losses) != read_batches(tmp_path / "other" / "ranks" / "rank-1.batches")["loss"].tolist()


def asdict_but(job: RunJob, **changes: Any) -> dict[str, Any]:
    return {field.name: getattr(job, field.name) for field in fields(job)} | changes


@pytest.mark.parametrize(
    ("field", "value"),
    [("lr_schedule", "steps"), ("warmup_steps", -1), ("clip_norm", 0.0), ("batch_norm", "batch"), ("autocast", "int8")],
)
def test_impossible_options_of_a_run_are_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        TrainingOptions(**{field: value})
    assert caught.value.field == field
    with pytest.raises(InvalidInputError) as caught:
        parse(RunTask, asdict(TrainingOptions()) | task().model_dump() | {field: value})
    assert caught.value.field == field
