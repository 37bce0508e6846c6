"""Formats: all exports by name."""

from collections.abc import Callable
from dataclasses import dataclass

from planner_service.core.errors import InvalidInputError
from planner_service.exports import chrome_trace, deepspeed, kubernetes, megatron, slurm, torchrun, torchtitan
from planner_service.exports.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How an export is made, what it is sent as, and what its file is called."""

    write: Callable[[Source], str]
    media_type: str
    suffix: str


FORMATS = {
    "torchrun": Format(write=torchrun.write, media_type="text/x-shellscript", suffix=".sh"),
    "slurm": Format(write=slurm.write, media_type="text/x-shellscript", suffix=".sbatch"),
    "kubernetes": Format(write=kubernetes.write, media_type="application/yaml", suffix=".yaml"),
    "megatron": Format(write=megatron.write, media_type="text/x-shellscript", suffix=".sh"),
    "deepspeed": Format(write=deepspeed.write, media_type="application/json", suffix=".json"),
    "torchtitan": Format(write=torchtitan.write, media_type="application/toml", suffix=".toml"),
    "chrome-trace": Format(write=chrome_trace.write, media_type="application/json", suffix=".json"),
}


def format_named(name: str) -> Format:
    """The format. Raises InvalidInputError for one that does not exist."""
    if name not in FORMATS:
        raise InvalidInputError("format", f"must be one of {', '.join(FORMATS)}", name)
    return FORMATS[name]
