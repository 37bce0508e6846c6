"""Manifests: show which checkpoints are whole. A checkpoint counts if its manifest and every file agree to the last
bit.

    checkpoints/step-20/
        stage-0.safetensors  stage-0.state  ...     the files of the stages (`checkpoint`)
        stage-0.frozen.safetensors                  its frozen weights, if it has any
        stage-0.json         sizes and SHA-256 of a stage's files, once they are whole
        manifest.json        the same for all stages, and a description of the run; the last stage to finish writes it

A file is written under another name, flushed and renamed; the manifest comes last. Whenever a process is killed or a
disk is full, the checkpoint is either whole or without a manifest.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from pipeplan.documents.identity import canonical_json
from pipeplan.documents.names import STRICT
from pipeplan.documents.plan import Plan
from pipeplan.documents.records import read_record
from pipeplan.errors import InvalidInputError

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d+)")
_ASIDE = "damaged-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A file's content: its number of bytes, and its SHA-256."""

    bytes: int
    sha256: str

    __pydantic_config__: ClassVar = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint's description: `step` batches of `steps` are done, and the next one's first sample is `next_sample`.

    `plan` describes the plan, for the message where two plans differ. `sha256` is the sum over all other fields.
    """

    plan_id: str
    plan: Mapping[str, str]
    model: str
    data: str
    seed: int
    step: int
    steps: int
    next_sample: int
    stages: int
    batch_size: int
    files: Mapping[str, Content] = field(default_factory=dict)
    sha256: str = ""

    __pydantic_config__: ClassVar = STRICT

    def sealed(self, files: Mapping[str, Content]) -> "Manifest":
        """The manifest with its files, in the order of their names, and its `sha256`."""
        unsealed = replace(self, files=dict(sorted(files.items())), sha256="")
        return replace(unsealed, sha256=unsealed.sum())

    def sum(self) -> str:
        return hashlib.sha256(canonical_json(replace(self, sha256="")).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """Why a checkpoint cannot be used. An unfinished checkpoint never had a manifest."""

    step: int
    reason: str
    unfinished: bool = False

    def __str__(self) -> str:
        return f"step-{self.step} {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The newest whole checkpoint, if there is one, and those that are newer and cannot be used."""

    manifest: Manifest | None
    defects: tuple[Defect, ...]


def describe(plan: Plan) -> dict[str, str]:
    """A plan in a few words, to compare it with another one."""
    cuts = [0, *(stage.stop for stage in plan.stages)]
    return {
        "schedule": plan.schedule,
        "dtype": plan.dtype,
        "stages": "-".join(map(str, cuts)),
        "replicas": "-".join(map(str, plan.replicas)),
        "batch size": f"{plan.batch_size} in microbatches of {plan.microbatch_size}",
        "optimizer": plan.optimizer,
    }


def stage_files(stage: int) -> tuple[str, str]:
    return f"stage-{stage}.safetensors", f"stage-{stage}.state"


def frozen_file(stage: int) -> str:
    """The name of the file with a stage's frozen weights, which only stages with such weights have."""
    return f"stage-{stage}.frozen.safetensors"


def step_directory(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def commit(aside: Path, path: Path) -> None:
    """Flushes a file that was written aside, gives it its name, and flushes the directory that now names it."""
    _flush(aside)
    aside.replace(path)
    _flush(path.parent)


def seal(directory: Path, manifest: Manifest, stage: int, *, frozen: bool = False) -> None:
    """Records that a stage's files are whole and, once those of all stages are, that the checkpoint is.

    `frozen`: the stage has a file of frozen weights.
    """
    names = (*stage_files(stage), frozen_file(stage)) if frozen else stage_files(stage)
    contents = {name: asdict(content_of(directory / name)) for name in names}
    _write(directory, f"stage-{stage}.json", _readable(contents), stage)
    sums = [directory / f"stage-{s}.json" for s in range(manifest.stages)]
    if not all(path.exists() for path in sums):
        return
    files: dict[str, Content] = {}
    for path in sums:
        files |= read_record(dict[str, Content], path.read_bytes())
    _flush(directory.parent)
    _write(directory, MANIFEST, _readable(asdict(manifest.sealed(files))), stage)


def content_of(path: Path) -> Content:
    """A file's present content."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Content(bytes=os.fstat(file.fileno()).st_size, sha256=sha256)


def newest(root: Path, *, before: int | None = None) -> Newest:
    """The newest checkpoint that is whole. With a step, the newest before that step.

    Reads all of it. Raises InvalidInputError where a file cannot be read.
    """
    defects: list[Defect] = []
    for step in sorted((s for s in steps_in(root) if before is None or s < before), reverse=True):
        found = inspect(root, step)
        if isinstance(found, Manifest):
            return Newest(manifest=found, defects=tuple(defects))
        defects.append(found)
    return Newest(manifest=None, defects=tuple(defects))


def inspect(root: Path, step: int) -> Manifest | Defect:
    """A checkpoint's manifest if every file matches it, or what is wrong."""
    directory = step_directory(root, step)
    try:
        manifest = read_record(Manifest, (directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        return Defect(step=step, reason="was not finished", unfinished=True)
    except OSError as error:
        return Defect(step=step, reason=_unreadable(directory / MANIFEST, error))
    except InvalidInputError as error:
        return Defect(step=step, reason=f"is damaged ({MANIFEST}: {error})")
    due = {name for stage in range(manifest.stages) for name in stage_files(stage)}
    others = manifest.files.keys() - {frozen_file(stage) for stage in range(manifest.stages)}
    if manifest.sha256 != manifest.sum() or manifest.step != step or others != due:
        return Defect(step=step, reason=f"is damaged ({MANIFEST} is not as it was written)")
    with ThreadPoolExecutor(max_workers=4) as pool:
        wrong = [why for why in pool.map(lambda item: _difference(directory, *item), manifest.files.items()) if why]
    return Defect(step=step, reason=wrong[0]) if wrong else manifest


def clear(root: Path, *, after: int) -> None:
    """Clears checkpoints after a step: removes unfinished ones, and renames damaged ones.

    The stages' records of their files are removed too, to prevent a manifest that mixes the files of two attempts.
    """
    for step in steps_in(root):
        directory = step_directory(root, step)
        found = inspect(root, step) if step > after or not (directory / MANIFEST).exists() else None
        if isinstance(found, Defect) and found.unfinished:
            shutil.rmtree(directory)
        elif isinstance(found, Defect):
            aside = root / f"{_ASIDE}{directory.name}"
            shutil.rmtree(aside, ignore_errors=True)
            directory.rename(aside)
        elif found is not None:
            for path in directory.glob("stage-*.json"):
                path.unlink()


def steps_in(root: Path) -> list[int]:
    """The steps after which there are checkpoints, whole or not."""
    names = (_STEP.fullmatch(path.name) for path in root.glob("step-*"))
    return sorted(int(name.group(1)) for name in names if name)


def is_sealed(root: Path, step: int) -> bool:
    """Whether a checkpoint was whole when it was written."""
    return (step_directory(root, step) / MANIFEST).exists()


def _difference(directory: Path, name: str, expected: Content) -> str | None:
    """What is wrong with a file; its size is checked first, which is faster."""
    path = directory / name
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"is damaged ({name} has {size} bytes of {expected.bytes})"
        same = content_of(path).sha256 == expected.sha256
        return None if same else f"is damaged ({name} has another checksum than when it was written)"
    except FileNotFoundError:
        return f"is damaged ({name} is missing)"
    except OSError as error:
        return _unreadable(path, error)


def _unreadable(path: Path, error: OSError) -> str:
    """Raises InvalidInputError for a missing permission, which the user can give."""
    if isinstance(error, PermissionError):
        raise InvalidInputError("resume", "must have checkpoint files that may be read", str(path)) from error
    return f"cannot be read ({path.name}: {error.strerror})"


def _readable(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False)


def _write(directory: Path, name: str, text: str, stage: int) -> None:
    aside = directory / f"{name}.{stage}.part"
    try:
        aside.write_text(text, encoding="utf-8")
        commit(aside, directory / name)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
