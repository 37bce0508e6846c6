"""Devices: what a profiling process runs on, and the memory that is there for it."""

import os
import platform
from pathlib import Path

import torch

from pipeplan.documents.profile import Device
from worker_agent.runtime.placement import place_process

_MEMORY = Path("/proc/meminfo")
_PROCESSORS = Path("/proc/cpuinfo")
_GROUP = Path("/sys/fs/cgroup")


def place(device: str, local_rank: int, processes: int) -> torch.device:
    """The device of a local rank: a GPU of its own, or on the CPU one core, pinned, and one thread.

    A core and not a share of the cores: then a profile of one device holds for as many as there are cores.
    """
    gpus = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if device == "cuda" or (device == "auto" and gpus):
        return place_process("cuda", local_rank, processes)
    return place_process("cpu", local_rank, len(os.sched_getaffinity(0)))


def describe(device: torch.device, processes: int) -> Device:
    """Its name and memory: a GPU's whole, or an even share of what the node has available now."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(name=properties.name, memory_bytes=properties.total_memory)
    return Device(name=f"{_processor_name()}, 1 core", memory_bytes=available_memory_bytes() // processes)


def available_memory_bytes() -> int:
    """What programs may still take on this node, by the kernel's estimate and the limit of the control group."""
    limits = [_kernel_available_bytes()]
    limit, used = _number(_GROUP / "memory.max"), _number(_GROUP / "memory.current")
    if limit is not None and used is not None:
        limits.append(max(limit - used, 1))
    return min(limits)


def _kernel_available_bytes() -> int:
    if _MEMORY.exists():
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _number(path: Path) -> int | None:
    """A control group's figure; None where there is none, or it says "max"."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None


def _processor_name() -> str:
    if _PROCESSORS.exists():
        for line in _PROCESSORS.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
