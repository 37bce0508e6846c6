"""Formats: all exports by name, and, where it matters, by the version of their target."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipeplan.errors import require, require_one_of
from pipeplan.exports import deepspeed, kubernetes, megatron, nodes, torchtitan
from pipeplan.exports.source import ExportSource
from pipeplan.simulation.predict import predict
from pipeplan.simulation.trace import chrome_trace

BATCHES = 2
"""The number of batches in a trace."""


def write_chrome_trace(source: ExportSource) -> str:
    """The trace of the plan's first batches."""
    return chrome_trace({"predicted": predict(source.plan, batches=BATCHES)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How an export is made, its media type, and the name of its file.

    `versions` are the formats for the target's versions, if these read different files; the first of them is the
    format itself.
    """

    write: Callable[[ExportSource], str]
    media_type: str
    suffix: str
    versions: Mapping[str, "Format"] = field(default_factory=dict)


_TORCHTITAN = {
    "0.2": Format(write=torchtitan.write_toml, media_type="application/toml", suffix=".toml"),
    "2026-08": Format(write=torchtitan.write_python, media_type="text/x-python", suffix=".py"),
}

FORMATS = {
    "torchrun": Format(write=nodes.write_torchrun, media_type="text/x-shellscript", suffix=".sh"),
    "slurm": Format(write=nodes.write_slurm, media_type="text/x-shellscript", suffix=".sbatch"),
    "kubernetes": Format(write=kubernetes.write, media_type="application/yaml", suffix=".yaml"),
    "megatron": Format(write=megatron.write, media_type="text/x-shellscript", suffix=".sh"),
    "deepspeed": Format(write=deepspeed.write, media_type="application/json", suffix=".json"),
    "torchtitan": Format(
        write=torchtitan.write_toml, media_type="application/toml", suffix=".toml", versions=_TORCHTITAN
    ),
    "chrome-trace": Format(write=write_chrome_trace, media_type="application/json", suffix=".json"),
}


def format_named(name: str, target_version: str | None = None) -> Format:
    """The format, for a version of its target. Raises InvalidInputError for an unknown format or version."""
    require_one_of(FORMATS, "format", name)
    chosen = FORMATS[name]
    if target_version is None:
        return chosen
    known = ", ".join(chosen.versions)
    rule = f"must be one of {known} for {name}" if known else f"must be left out for {name}: one export fits all"
    require(target_version in chosen.versions, "target_version", rule, target_version)
    return chosen.versions[target_version]
