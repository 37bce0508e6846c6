"""Checkpoints: every stage writes its own files, without coordination (PipeDream 2018, section 4).

    checkpoints/step-20/
        stage-0.safetensors          the stage's weights, frozen ones and buffers by their names in the whole model
        stage-0.state                older weight versions still needed, the optimizer's states, the loss scale
        manifest.json                written by whichever stage comes last; without it the checkpoint does not count

A file is written aside, flushed and renamed, so that there is a whole one or none.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from planner_service.core.errors import InvalidInputError, RunFailedError
from worker_agent.runtime.loss_scale import LossScale
from worker_agent.runtime.weights import Weights

Buffers = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is of. The next batch is number `step`, its first sample `step * batch_size`."""

    plan_id: str
    step: int
    stages: int
    batch_size: int
    seed: int


def untrained(blocks: Sequence[nn.Module], names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """The persistent buffers and the frozen parameters of some blocks by their names in the whole model."""
    buffers = {names[b]: b for block in blocks for b in block.buffers() if b in names}
    frozen = {names[p]: p for block in blocks for p in block.parameters() if not p.requires_grad}
    return buffers | frozen


def save_stage(
    root: Path,
    manifest: Manifest,
    *,
    stage: int,
    weights: Weights,
    buffers: Buffers,
    versions: Sequence[int],
    loss_scale: LossScale | None = None,
) -> None:
    """Writes one stage's part: `versions` are its weight versions, the newest last. Raises RunFailedError."""
    directory = step_directory(root, manifest.step)
    *older, newest = versions
    state = {f"version/{v}/{name}": t for v in older for name, t in weights.version_tensors(v).items()}
    state |= {f"optimizer/{key}": t for key, t in weights.optimizer_tensors().items()}
    state |= {f"loss_scale/{key}": t for key, t in loss_scale.tensors().items()} if loss_scale else {}
    metadata = {"newest": str(newest), "older": json.dumps(list(older)), "plan_id": manifest.plan_id}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _save(directory / f"stage-{stage}.state", state, metadata)
        _save(directory / f"stage-{stage}.safetensors", weights.version_tensors(newest) | dict(buffers), metadata)
        if all((directory / f"stage-{s}.safetensors").exists() for s in range(manifest.stages)):
            _write_text(directory / "manifest.json", json.dumps(asdict(manifest), indent=2))
    except (OSError, SafetensorError) as error:
        raise RunFailedError(f"cannot write the checkpoint {directory}: {error}") from error


def load_stage(
    root: Path, step: int, *, stage: int, weights: Weights, buffers: Buffers, loss_scale: LossScale | None = None
) -> None:
    """Loads one stage's part into its weights, buffers and loss scale. Raises InvalidInputError where it cannot."""
    directory = step_directory(root, step)
    try:
        newest, metadata = _load(directory / f"stage-{stage}.safetensors")
        state, _ = _load(directory / f"stage-{stage}.state")
    except (OSError, SafetensorError) as error:
        raise InvalidInputError("resume", f"must have readable checkpoint files ({error})", str(directory)) from error
    weights.load_version(int(metadata["newest"]), newest)
    for version in json.loads(metadata["older"]):
        weights.load_version(version, _under(f"version/{version}/", state))
    weights.load_optimizer(_under("optimizer/", state))
    if loss_scale:
        loss_scale.load(_under("loss_scale/", state))
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(newest[name])


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def latest(root: Path, *, before: int | None = None) -> Manifest | None:
    """The newest checkpoint that every stage completed, among those before a step where one is given."""
    manifests = [_manifest(path) for path in root.glob("step-*/manifest.json")]
    found = [manifest for manifest in manifests if before is None or manifest.step < before]
    return max(found, key=lambda manifest: manifest.step, default=None)


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint after so many steps lies."""
    return root / f"step-{step}"


def _manifest(path: Path) -> Manifest:
    try:
        return Manifest(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInputError("resume", f"must have a readable manifest ({error})", str(path)) from error


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    aside = path.with_name(path.name + ".part")
    save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, aside, metadata=metadata)
    _commit(aside, path)


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def _write_text(path: Path, text: str) -> None:
    aside = path.with_suffix(f".{os.getpid()}.part")
    aside.write_text(text)
    _commit(aside, path)


def _commit(aside: Path, path: Path) -> None:
    """Flushes a file that was written aside, gives it its name, and flushes the directory that now names it."""
    _flush(aside)
    aside.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
