"""A checkpoint that is not whole to the last bit is never used; no fault while one is written costs an earlier one."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeplan.errors import InvalidInputError, RunFailedError
from tests.forked import fork_server
from tests.properties import examples
from tests.worker_agent.runtime.plans import make_plan
from worker_agent.engine.optimizers import Optimizer
from worker_agent.engine.weights import Weights, find_slots
from worker_agent.runtime.checkpoint import load_stage, save_stage
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.manifest import Defect, Manifest, clear, inspect, newest, step_directory
from worker_agent.runtime.resume import resumed

MLP = "worker_agent.models.presets:mlp?width=8&depth=4"
DATA = "worker_agent.models.presets:regression?width=8"
FILES = (
    "manifest.json",
    "stage-0.safetensors",
    "stage-0.state",
    "stage-1.safetensors",
    "stage-1.state",
)


def job_in(out: Path, *, steps: int = 9) -> RunJob:
    plan = make_plan("1f1b", (0, 2, 4), optimizer="momentum")
    return RunJob(plan=plan, model=MLP, data=DATA, steps=steps, out=str(out), checkpoint_every=3, device="cpu")


def stage_weights(seed: int) -> Weights:
    """A linear layer's, with the optimizer's states."""
    torch.manual_seed(seed)
    layer = nn.Linear(8, 8)
    names: dict[Tensor, str] = {parameter: name for name, parameter in layer.named_parameters()}
    weights = Weights(find_slots([layer], names), Optimizer("momentum", 0.1))
    weights.grade(0)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    weights.update(1, keep_base=False)
    return weights


def save(job: RunJob, step: int, stage: int) -> None:
    root, weights = job.directory.checkpoints, stage_weights(10 * step + stage)
    save_stage(root, job.manifest(step), stage=stage, weights=weights, buffers={}, versions=[1])


def write(job: RunJob, *steps: int) -> Path:
    """Whole checkpoints of two stages after these steps; the folder of the last."""
    for step in steps:
        for stage in (0, 1):
            save(job, step, stage)
    return step_directory(job.directory.checkpoints, steps[-1])


def defects(job: RunJob) -> tuple[int | None, list[str]]:
    """The newest whole checkpoint's step, and what is said of newer ones."""
    found = newest(job.directory.checkpoints)
    return found.manifest.step if found.manifest else None, [str(defect) for defect in found.defects]


def test_the_last_stage_makes_a_checkpoint_whole(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    save(job, 3, 1)
    assert defects(job) == (None, ["step-3 was not finished"])
    save(job, 3, 0)
    assert defects(job) == (3, [])
    assert newest(job.directory.checkpoints, before=3).manifest is None
    left = sorted(path.name for path in step_directory(job.directory.checkpoints, 3).iterdir())
    assert left == sorted((*FILES, "stage-0.json", "stage-1.json"))


def test_a_checkpoint_says_where_the_data_goes_on(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    write(job, 3)
    manifest = newest(job.directory.checkpoints).manifest
    assert manifest is not None
    assert (manifest.step, manifest.steps, manifest.next_sample, manifest.data) == (3, 9, 24, DATA)


@settings(examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_a_file_torn_or_changed_anywhere_is_noticed_and_the_checkpoint_before_is_taken(
    name: str, where: float, bit: int, cut: bool, tmp_path: Path
) -> None:
    job = job_in(tmp_path)
    if not tmp_path.joinpath("checkpoints").exists():
        write(job, 3, 6)
    path = tmp_path / "checkpoints" / "step-6" / name
    whole = path.read_bytes()
    at = int(where * len(whole))
    path.write_bytes(whole[:at] if cut else whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
    said: list[str] = []
    assert resumed(job, tell=said.append).first_step == 3
    # this folder holds checkpoints alone: that it lacks the options is said besides
    assert len(said) == 2 and said[0].startswith("step-6 is damaged (" + name)
    assert said[0].endswith(": going on from step-3")
    path.write_bytes(whole)
    assert resumed(job).first_step == 6


@pytest.mark.parametrize("name", FILES[1:])
def test_a_manifest_without_one_of_its_files_is_noticed(name: str, tmp_path: Path) -> None:
    job = job_in(tmp_path)
    (write(job, 3, 6) / name).unlink()
    assert defects(job) == (3, [f"step-6 is damaged ({name} is missing)"])


def test_a_manifest_that_was_moved_to_another_step_is_noticed(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    step_6 = write(job, 3, 6)
    step_6.rename(step_6.with_name("step-8"))
    assert defects(job) == (3, ["step-8 is damaged (manifest.json is not as it was written)"])


def test_a_file_that_cannot_be_read_is_noticed(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    weights = write(job, 3, 6) / "stage-1.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.mkdir()
    (step, [said]), size = defects(job), weights.stat().st_size
    assert (step, said.startswith("step-6 ")) == (3, True)
    assert size != len(content)


def test_where_all_checkpoints_are_damaged_training_does_not_silently_start_over(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    for step in (3, 6):
        (write(job, step) / "stage-0.state").write_bytes(b"garbage")
    with pytest.raises(
        InvalidInputError, match=r"resume: must have a whole checkpoint \(step-6 is damaged .* step-3 is"
    ):
        resumed(job)


def test_what_was_never_finished_makes_room_and_what_is_damaged_is_put_aside(tmp_path: Path) -> None:
    job = job_in(tmp_path, steps=12)
    root = job.directory.checkpoints
    write(job, 3, 6, 9)
    save(job, 12, 0)
    (root / "step-9" / "stage-0.state").write_bytes(b"garbage")
    clear(root, after=3)
    assert sorted(path.name for path in root.iterdir()) == ["damaged-step-9", "step-3", "step-6"]
    assert (root / "damaged-step-9" / "stage-1.safetensors").exists()
    assert isinstance(inspect(root, 6), Manifest)
    clear(root, after=6)
    assert isinstance(inspect(root, 6), Manifest)


def test_stages_of_two_attempts_do_not_make_a_checkpoint(tmp_path: Path) -> None:
    """One that an earlier attempt left half written was once completed by the first stage of the next one."""
    job = job_in(tmp_path)
    write(job, 3)
    save(job, 6, 0)
    clear(job.directory.checkpoints, after=3)
    save(job, 6, 1)
    assert defects(job) == (3, ["step-6 was not finished"])


@pytest.mark.parametrize("limit_bytes", [0, 100])
def test_where_a_disk_is_full_the_error_says_so_and_the_checkpoint_before_is_kept(
    limit_bytes: int, tmp_path: Path
) -> None:
    job = job_in(tmp_path)
    write(job, 3)
    with (
        files_of_at_most(limit_bytes),
        pytest.raises(RunFailedError, match=r"cannot write the checkpoint .*step-6.*large"),
    ):
        save(job, 6, 0)
    assert not list(tmp_path.rglob("*.part"))
    assert defects(job) == (3, ["step-6 was not finished"])
    write(job, 6)
    assert defects(job) == (6, [])


@contextmanager
def files_of_at_most(limit_bytes: int) -> Iterator[None]:
    """While it is active, writes beyond so many bytes of a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.each_case
@pytest.mark.parametrize("limit_bytes", [0, 300, 900])
def test_a_process_that_dies_at_a_byte_of_its_write_leaves_no_checkpoint(limit_bytes: int, tmp_path: Path) -> None:
    """The kernel ends it at exactly that byte: of the first file, or, as all others are smaller, of the manifest."""
    job = job_in(tmp_path)
    write(job, 3)
    save(job, 6, 0)
    process = fork_server().Process(target=_die_writing, args=(job, limit_bytes))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGXFSZ
    assert defects(job) == (3, ["step-6 was not finished"])
    clear(job.directory.checkpoints, after=3)
    write(job, 6)
    assert defects(job) == (6, [])


def _die_writing(job: RunJob, limit_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    save(job, 6, 1)


def test_another_model_cannot_load_a_checkpoint(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    write(job, 3)
    layers = {"narrow": nn.Linear(4, 8), "half": nn.Linear(8, 8).half(), "other": nn.Sequential(nn.Linear(8, 8))}
    for name, rule in (
        ("narrow", r"model.weight: .*\(8, 8\) of torch.float32, got '\(8, 4\) of torch.float32'"),
        ("half", r"model.weight: .*\(8, 8\) of torch.float32, got '\(8, 8\) of torch.float16'"),
        (
            "other",
            "model: must be of the model that wrote the checkpoint: only the model has this tensor, got '0.bias'",
        ),
    ):
        names: dict[Tensor, str] = {parameter: key for key, parameter in layers[name].named_parameters()}
        weights = Weights(find_slots([layers[name]], names), Optimizer("sgd", 0.1))
        with pytest.raises(InvalidInputError, match=rule):
            load_stage(job.directory.checkpoints, 3, stage=0, weights=weights, buffers={})


def test_a_stage_loads_what_it_saved(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    write(job, 3)
    other = stage_weights(1)
    load_stage(job.directory.checkpoints, 3, stage=1, weights=other, buffers={})
    saved = stage_weights(31)
    assert all(torch.equal(tensor, saved.version_tensors(1)[name]) for name, tensor in other.version_tensors(1).items())
    assert all(torch.equal(tensor, saved.optimizer_tensors()[key]) for key, tensor in other.optimizer_tensors().items())


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert newest(tmp_path / "none").manifest is None
    assert isinstance(inspect(tmp_path / "none", 3), Defect)
