"""Export: a checkpoint's weights as a folder that other programs load.

A Hugging Face model is written as `save_pretrained` writes it, for `from_pretrained`. Any other model is one file with
the names of its `state_dict`, as nn.Sequential makes them. Both hold the checkpoint's values to the last bit.
"""

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeplan.errors import InvalidInputError, RunFailedError, require
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.folders import WEIGHTS, files_beside, read_config
from worker_agent.models.materialise import Contents
from worker_agent.models.spec import parse_spec
from worker_agent.runtime.checkpoint import defect_of, newest_finite
from worker_agent.runtime.manifest import Manifest, frozen_file, inspect, stage_files, step_directory, steps_in


def export_checkpoint(checkpoints: Path, to: Path, *, step: int | None = None) -> int:
    """Writes a checkpoint's weights to a new folder, whole or not at all. Returns the checkpoint's step.

    The default is the newest whole checkpoint. Raises InvalidInputError without such a checkpoint, for a folder that is
    not empty, and for a model that is not the checkpoint's; RunFailedError where the folder cannot be written.
    """
    free = not to.exists() or (to.is_dir() and not any(to.iterdir()))
    require(free, "to", "must be a new folder, or an empty one", str(to))
    manifest = chosen_manifest(checkpoints, step)
    with ExitStack() as stack:
        chain = build_model(manifest.model, seed=manifest.seed, empty=True)
        try:
            saved: dict[str, Tensor] = {}
            for stage in range(manifest.stages):
                for name in {stage_files(stage)[0], frozen_file(stage)} & manifest.files.keys():
                    path = step_directory(checkpoints, manifest.step) / name
                    file = stack.enter_context(safe_open(path, framework="pt"))
                    saved |= {tensor: file.get_tensor(tensor) for tensor in file.keys()}  # noqa: SIM118
            take_saved(chain, saved)
            place = to if to.exists() else to.absolute().parent
            place.mkdir(parents=True, exist_ok=True)
            aside = Path(stack.enter_context(TemporaryDirectory(dir=place, prefix=".pipeplan-"))) / "model"
            aside.mkdir()
            if isinstance(chain.contents, Contents):
                write_folder(chain.root, manifest, aside)
            else:
                own = {name: t.clone() for name, t in chain.root.state_dict().items() if isinstance(t, Tensor)}
                save_file(own, aside / WEIGHTS, metadata={"format": "pt"})
            if place == to:
                for path in sorted(aside.iterdir()):
                    path.replace(to / path.name)
            else:
                aside.replace(to)
        except (OSError, SafetensorError) as error:
            raise RunFailedError(f"cannot export to {to}: {error}") from error
    return manifest.step


def chosen_manifest(checkpoints: Path, step: int | None) -> Manifest:
    """The manifest of the checkpoint after this many steps, or of the newest whole one."""
    if step is not None:
        found = inspect(checkpoints, step)
        defect = defect_of(checkpoints, found) if isinstance(found, Manifest) else found
        if isinstance(found, Manifest) and defect is None:
            return found
        if step_directory(checkpoints, step).exists():
            raise InvalidInputError("step", f"must be a whole checkpoint: {defect}", step)
        there = ", ".join(map(str, steps_in(checkpoints))) or "none"
        raise InvalidInputError("step", f"must be that of a checkpoint; there are {there}", step)
    latest = newest_finite(checkpoints)
    if latest.manifest is None:
        reasons = "; ".join(map(str, latest.defects)) or f"there is none in {checkpoints}"
        raise InvalidInputError("run", f"must have a whole checkpoint: {reasons}", str(checkpoints.parent))
    return latest.manifest


def take_saved(chain: Chain, saved: Mapping[str, Tensor]) -> None:
    """Replaces the model's tensors by a checkpoint's. Raises InvalidInputError if they do not match."""
    named = chain.names()
    for name in sorted(set(named.values()) ^ saved.keys()):
        where = "the checkpoint" if name in saved else "the model"
        raise InvalidInputError("model", f"must be that of the checkpoint: only {where} has this tensor", name)
    state: dict[str, Tensor] = {}
    for name, tensor in chain.root.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            state[name] = found = saved[named[tensor]]
            rule = f"must be that of the checkpoint, where it is {tuple(found.shape)}"
            require(found.shape == tensor.shape, f"model.{name}", rule, tuple(tensor.shape))
    chain.root.load_state_dict(state, strict=False, assign=True)


def write_folder(root: Any, manifest: Manifest, folder: Path) -> None:
    """Has the library write the model, in its formats, and copies the other files of the initial weights' folder."""
    root.tie_weights()
    root.config.use_cache = True  # it was off for training
    root.config.dtype = getattr(torch, manifest.plan["dtype"])
    named = parse_spec(manifest.model, field="model").path
    source = None if named is None else Path(named)
    said = {} if source is None else read_config(source)
    labels = said.get("id2label")
    if isinstance(labels, dict) and len(labels) == root.config.num_labels:
        root.config.id2label = labels  # a model is built with their number alone
        root.config.label2id = said.get("label2id", {name: int(number) for number, name in labels.items()})
    root.save_pretrained(folder)
    if source is not None and source.is_dir():
        for name in files_beside(source):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
