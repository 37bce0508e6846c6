"""Checkpoints: every stage writes its own files, without coordination (PipeDream 2018, section 4).

checkpoints/step-20/
    stage-0.safetensors          the stage's weights and buffers by their names in the whole model; of one that is not
                                 dense the parts, as name/0, name/1, ...
    stage-0.frozen.safetensors   the same of its frozen weights, if it has any
    stage-0.state                older weight versions still needed, the optimizer's states, the loss scale
    stage-0.json, manifest.json  which of these files are whole (`manifest`)

Frozen weights are stored once. A later checkpoint hard-links the file of an earlier one, as long as the
weights are the same to the last bit. Each folder thus has all files of its checkpoint, and any other may be removed.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeplan.errors import InvalidInputError, RunFailedError
from worker_agent.engine.results import DivergedError
from worker_agent.engine.weights import Weights
from worker_agent.models.values import is_dense, parts_of
from worker_agent.runtime.job import LossScale
from worker_agent.runtime.manifest import (
    Defect,
    Manifest,
    Newest,
    commit,
    frozen_file,
    newest,
    seal,
    stage_files,
    step_directory,
    steps_in,
)

Buffers = Mapping[str, Tensor]

FINITE = "finite"
"""The key of a file's metadata that says that its weights and states were found finite. Older files do not have it."""

FROZEN = "frozen"
"""The key of a weight file's metadata that says that the stage's frozen weights are in a file of their own."""


class Untrained(Mapping[str, Tensor]):
    """The persistent buffers and the frozen parameters of some blocks, by their names in the whole model.

    Every look-up returns the present tensor, because a module may replace a buffer by another tensor. `frozen` are the
    names of the parameters, `infinite` those of tensors that were made with values that are not finite: masks, bounds.
    """

    def __init__(self, blocks: Sequence[nn.Module], names: Mapping[Tensor, str]) -> None:
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self.frozen: set[str] = set()
        for module in dict.fromkeys(module for block in blocks for module in block.modules()):
            frozen = {key: p for key, p in module._parameters.items() if p is not None and not p.requires_grad}
            self.frozen |= {names[parameter] for parameter in frozen.values() if parameter in names}
            for held, chosen in ((module._parameters, frozen), (module._buffers, module._buffers)):
                for key, tensor in chosen.items():
                    if tensor is not None and tensor in names:
                        self._places[names[tensor]] = (cast(dict[str, Any], held), key)
        buffers = _parts({name: self[name] for name in self if name not in self.frozen})
        self.infinite = {name for name, tensor in buffers.items() if not_finite({name: tensor}) is not None}

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name in the whole model."""
        where, attribute = self._places[name]
        tensor: Tensor | None = where[attribute]
        if tensor is None:
            raise RunFailedError(f"the model has dropped its buffer {name}, which a checkpoint must hold")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def save_stage(
    root: Path,
    manifest: Manifest,
    *,
    stage: int,
    weights: Weights,
    buffers: Buffers,
    versions: Sequence[int],
    loss_scale: LossScale | None = None,
    frozen: Set[str] = frozenset(),
    infinite: Set[str] = frozenset(),
) -> None:
    """Writes one stage's part: `versions` are its weight versions, the newest last, and `frozen` names the buffers that
    are frozen weights.

    Raises DivergedError if a weight, a state or a buffer, other than those in `infinite` and masks, is not finite: the
    checkpoint is then never whole.
    Raises RunFailedError if it cannot be written.
    """
    directory = step_directory(root, manifest.step)
    *older, latest = versions
    state = {f"version/{v}/{name}": t for v in older for name, t in weights.version_tensors(v).items()}
    state |= {f"optimizer/{key}": t for key, t in weights.optimizer_tensors().items()}
    trained = weights.version_tensors(latest)
    others = _parts({name: tensor for name, tensor in buffers.items() if name not in frozen})
    checked = ((name, tensor) for name, tensor in others.items() if name not in infinite)
    name = not_finite(trained | state) or _not_finite_of(checked)
    if name is not None:
        raise DivergedError(f"{name} is not finite after step {manifest.step}: try a lower learning rate")
    state |= {f"loss_scale/{key}": t for key, t in loss_scale.tensors().items()} if loss_scale else {}
    metadata = {"newest": str(latest), "older": json.dumps(list(older)), "plan_id": manifest.plan_id, FINITE: "yes"}
    metadata |= {FROZEN: "yes"} if frozen else {}
    weight_file, state_file = stage_files(stage)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _save(directory / state_file, state, metadata)
        _save(directory / weight_file, trained | others, metadata)
        if frozen:
            _save_frozen(root, manifest.step, stage, _parts({name: buffers[name] for name in sorted(frozen)}))
        seal(directory, manifest, stage, frozen=bool(frozen))
    except (OSError, SafetensorError) as error:
        raise RunFailedError(f"cannot write the checkpoint {directory}, earlier ones are kept: {error}") from error


def load_stage(
    root: Path, step: int, *, stage: int, weights: Weights, buffers: Buffers, loss_scale: LossScale | None = None
) -> None:
    """Loads one stage's part into its weights, buffers and loss scale. Raises InvalidInputError if that fails."""
    directory = step_directory(root, step)
    weight_file, state_file = stage_files(stage)
    try:
        saved, metadata = _load(directory / weight_file)
        if FROZEN in metadata:
            saved |= _load(directory / frozen_file(stage))[0]
        state, _ = _load(directory / state_file)
    except (OSError, SafetensorError) as error:
        raise InvalidInputError("resume", f"must have readable checkpoint files ({error})", str(directory)) from error

    # The checkpoint must hold the model's tensors, with their shapes and types.
    untrained = _parts(buffers)
    own = {slot.name: slot.parameter for slot in weights.slots} | untrained
    rule = "must be of the model that wrote the checkpoint"
    for name in sorted(own.keys() ^ saved.keys()):
        where = "the checkpoint" if name in saved else "the model"
        raise InvalidInputError("model", f"{rule}: only {where} has this tensor", name)
    for name, tensor in own.items():
        if (tensor.shape, tensor.dtype) != (saved[name].shape, saved[name].dtype):
            written = f"{tuple(saved[name].shape)} of {saved[name].dtype}"
            given = f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise InvalidInputError(f"model.{name}", f"{rule}, {written}", given)

    weights.load_version(int(metadata["newest"]), saved)
    for version in json.loads(metadata["older"]):
        weights.load_version(version, _under(f"version/{version}/", state))
    weights.load_optimizer(_under("optimizer/", state))
    if loss_scale:
        loss_scale.load(_under("loss_scale/", state))
    with torch.no_grad():
        for name, buffer in untrained.items():
            buffer.copy_(saved[name])


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a value that is not finite; None if there is none. Waits once for a device."""
    real = {name: torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for name, t in tensors.items()}
    looked_at = {name: t for name, t in real.items() if t.is_floating_point() and t.numel()}
    ends = [torch.stack(torch.aminmax(t.detach())).isfinite().all() for t in looked_at.values()]  # NaN passes through
    finite = torch.stack(ends).tolist() if ends else []
    return next((name for name, is_finite in zip(looked_at, finite, strict=True) if not is_finite), None)


def defect_of(root: Path, manifest: Manifest) -> Defect | None:
    """What is wrong with the numbers of a whole checkpoint: earlier releases wrote some that are not finite.

    A checkpoint of this release was checked before it was written, and is not read.
    """
    for stage in range(manifest.stages):
        for file_name in sorted(manifest.files.keys() & {*stage_files(stage), frozen_file(stage)}):
            with suppress(SafetensorError):  # `load_stage` says what is wrong with such a file
                with safe_open(step_directory(root, manifest.step) / file_name, framework="pt") as file:
                    tensors = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
                    name = None if FINITE in (file.metadata() or {}) else _not_finite_of(tensors)
                if name is not None:
                    return Defect(step=manifest.step, reason=f"holds {name}, which is not finite")
    return None


def _not_finite_of(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor, of those that may be masks, with a value that is not finite."""
    return next((name for name, t in tensors if not_finite({name: t}) and not _is_mask(t)), None)


def _is_mask(tensor: Tensor) -> bool:
    """Whether a tensor holds -inf and one other number alone: a buffer that masks. Buffers lie among the weights."""
    others = tensor[tensor != -torch.inf]
    return bool((others == others[:1]).all()) and not_finite({"others": others}) is None


def newest_finite(root: Path, *, before: int | None = None) -> Newest:
    """The newest checkpoint that is whole, and whose weights and states are finite (`manifest.newest`)."""
    defects: list[Defect] = []
    while True:
        found = newest(root, before=before)
        defects += found.defects
        defect = None if found.manifest is None else defect_of(root, found.manifest)
        if found.manifest is None or defect is None:
            return Newest(manifest=found.manifest, defects=tuple(defects))
        defects.append(defect)
        before = found.manifest.step


def _parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by name, those that are not dense in parts, which lie in the same memory."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = (tensor,) if is_dense(tensor) else parts_of(tensor) or ()
        named |= {name if part is tensor else f"{name}/{i}": part for i, part in enumerate(parts)}
    return named


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _save_frozen(root: Path, step: int, stage: int, tensors: Buffers) -> None:
    """Gives the newest other checkpoint's file a second name if it has the same tensors, or else writes a file."""
    files = [step_directory(root, other) / frozen_file(stage) for other in steps_in(root) if other != step]
    latest = next((path for path in reversed(files) if path.exists()), None)
    path = step_directory(root, step) / frozen_file(stage)
    if latest is not None and holds(latest, tensors):
        with suppress(OSError):  # the file system may have no hard links, and the other checkpoint may go meanwhile
            _commit(path, lambda aside: os.link(latest, aside))
            return
    name = _not_finite_of(tensors.items())
    if name is not None:
        raise DivergedError(f"{name}, which is frozen, is not finite after step {step}: give the model other weights")
    _save(path, tensors, {FINITE: "yes"})


def holds(path: Path, tensors: Buffers) -> bool:
    """Whether a file has these tensors and no others, to the last bit."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)

    try:
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != tensors.keys():
                return False
            pairs = ((file.get_tensor(name), tensor) for name, tensor in tensors.items())
            return all(
                (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(bits(one), bits(other))
                for one, other in pairs
            )
    except (OSError, SafetensorError):
        return False


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    on_host = {name: t.detach().contiguous().cpu() for name, t in tensors.items()}
    _commit(path, lambda aside: save_file(on_host, aside, metadata=metadata))


def _commit(path: Path, write: Callable[[Path], None]) -> None:
    """Makes a file aside, then gives it its name."""
    aside = path.with_name(path.name + ".part")
    try:
        write(aside)
        commit(aside, path)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)  # on a full disk this file takes the space


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
