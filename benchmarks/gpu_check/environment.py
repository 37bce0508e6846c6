"""Environment: versions, and the device's own description."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.here import OPTIONAL, datasheet, device, device_name, is_installed


def check(findings: Findings) -> None:
    """Records both; a first operation shows that the device works."""
    findings.run({"versions": _versions, "device": _device, "first operation": _first_operation})
    for module in OPTIONAL:
        if not is_installed(module):
            findings.leave_out(f"what needs {module}", "it is not installed")
    if device().type == "cpu":
        findings.leave_out("all that needs a GPU", "there is none: this is the short form, on the CPU")


def _versions() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    collectives: Any = torch.cuda.nccl
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "safetensors": version("safetensors"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, collectives.version())) if cuda and dist.is_nccl_available() else None,
        "optional": {module: _version(module) for module in OPTIONAL},
    }


def _version(module: str) -> str | None:
    try:
        return version(module) if is_installed(module) else None
    except PackageNotFoundError:
        return "unknown"


def _device() -> dict[str, Any]:
    cores = {"processors": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
    if device().type == "cpu":
        return {"name": device_name(), "count": 0} | cores
    properties = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    sheet = datasheet()
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "device_total_bytes": total_bytes,
        "device_free_bytes": free_bytes,
        "context_bytes": total_bytes - free_bytes - torch.cuda.memory_reserved(0),
        "datasheet": sheet.name if sheet else None,
        "allocator": torch.cuda.get_allocator_backend(),
    } | cores


def _first_operation() -> dict[str, Any]:
    ones = torch.ones(64, 64, device=device())
    total = float((ones @ ones).sum())
    if total != 64.0**3:
        raise ValueError(f"a product of ones is wrong: its sum is {total}, not {64.0**3}")
    return {"sum": total}
