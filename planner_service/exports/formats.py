"""Formats: all exports by name, and the versions of the target where it matters which."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planner_service.core.errors import InvalidInputError, require
from planner_service.exports import chrome_trace, deepspeed, kubernetes, megatron, slurm, torchrun, torchtitan
from planner_service.exports.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How an export is made, what it is sent as, and what its file is called.

    `versions` are the same for versions of the target that read something else; the format itself is the first of them.
    """

    write: Callable[[Source], str]
    media_type: str
    suffix: str
    versions: Mapping[str, "Format"] = field(default_factory=dict)


_TORCHTITAN = {
    "0.2": Format(write=torchtitan.write_toml, media_type="application/toml", suffix=".toml"),
    "2026-08": Format(write=torchtitan.write_python, media_type="text/x-python", suffix=".py"),
}

FORMATS = {
    "torchrun": Format(write=torchrun.write, media_type="text/x-shellscript", suffix=".sh"),
    "slurm": Format(write=slurm.write, media_type="text/x-shellscript", suffix=".sbatch"),
    "kubernetes": Format(write=kubernetes.write, media_type="application/yaml", suffix=".yaml"),
    "megatron": Format(write=megatron.write, media_type="text/x-shellscript", suffix=".sh"),
    "deepspeed": Format(write=deepspeed.write, media_type="application/json", suffix=".json"),
    "torchtitan": Format(
        write=torchtitan.write_toml, media_type="application/toml", suffix=".toml", versions=_TORCHTITAN
    ),
    "chrome-trace": Format(write=chrome_trace.write, media_type="application/json", suffix=".json"),
}


def format_named(name: str, target_version: str | None = None) -> Format:
    """The format, for a version of its target. Raises InvalidInputError for what does not exist."""
    if name not in FORMATS:
        raise InvalidInputError("format", f"must be one of {', '.join(FORMATS)}", name)
    chosen = FORMATS[name]
    if target_version is None:
        return chosen
    known = ", ".join(chosen.versions)
    rule = f"must be one of {known} for {name}" if known else f"must be left out for {name}: one export fits all"
    require(target_version in chosen.versions, "target_version", rule, target_version)
    return chosen.versions[target_version]
