"""Here: this machine's equipment, for the parts of the check."""

from importlib.util import find_spec

import torch

from benchmarks.gpu_check.findings import Findings
from pipeplan.documents.cluster import known_types
from worker_agent.profiler.datasheets import DATASHEETS, Datasheet

MIB = 2**20
CPU_MEMORY_BYTES = 8 * 2**30
"""The device for which the short form plans on a CPU."""

OPTIONAL = ("transformers", "pydantic", "typer", "triton")
"""What is used where it is there."""


def device() -> torch.device:
    """The first GPU, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def is_short(findings: Findings) -> bool:
    """Whether the short form is asked for, or all that a CPU has time for."""
    return findings.short or device().type == "cpu"


def device_name() -> str:
    """As the driver has it."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


def datasheet() -> Datasheet | None:
    """The datasheet of this machine's GPU, if one is known."""
    types = known_types(device_name()) if torch.cuda.is_available() else frozenset()
    return DATASHEETS[min(types)] if len(types) == 1 else None


def is_installed(module: str) -> bool:
    """Whether a module is there to be imported."""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False
