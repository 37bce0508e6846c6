"""Placement of a process on its device: a GPU of its own, or cores of its own.

Device memory: what a process has taken of a GPU, apart from what it holds on the host.

CUDA's context, the kernels that are loaded and NCCL's buffers lie beside the allocator: only the device can tell.

Devices: what a profiling process runs on, and the memory that is there for it.
"""

import ctypes
import os
import platform
from dataclasses import replace
from pathlib import Path

import torch

from pipeplan.documents.profile import Device, DeviceMemory
from pipeplan.errors import require

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""mallopt's names for when freed memory goes back to the system, and for what is never taken from the heap."""

_HARDWARE_QUEUES = 32
"""As many as a GPU has. With the default of 8, the streams of a stage's communicators, one for each directed edge, one
of its replicas and one of all ranks, share queues with the kernels, and what waits in one stops what stands behind it.
"""


def _keep_freed_memory() -> None:
    """Lets the C library keep what is freed: a step frees and takes the same sizes again, and fresh pages cost time.

    Only glibc knows these settings; elsewhere nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_THRESHOLD, 32 * 2**20)


def place_process(device: str, local_rank: int, local_world_size: int, *, shared: bool = False) -> torch.device:
    """Chooses and prepares the device of a node's local rank; "auto" takes GPUs where there are any.

    Every rank has a GPU of its own, unless they may be `shared`: then those there are, by turns.

    On the CPU a device is one core: the process is pinned to it and computes with one thread. Stages that wander
    between cores lose about a tenth of their speed. Raises InvalidInputError where there are too few GPUs.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(_HARDWARE_QUEUES))  # read once, when CUDA is first asked
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" or (device == "auto" and gpus):
        least = 1 if shared else local_world_size
        require(least <= gpus, "device", f"needs at least {least} GPUs on this node", gpus)
        number = local_rank % gpus
        torch.cuda.set_device(number)
        return torch.device("cuda", number)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[local_rank % len(cores)]})
    torch.set_num_threads(1)
    _keep_freed_memory()
    return torch.device("cpu")


def device_memory(device: torch.device, processes: int) -> DeviceMemory | None:
    """What this process has taken so far of a GPU that it has for itself.

    None on a CPU, whose memory is the host's, and where a node's `processes` share GPUs: nobody says what is whose.
    """
    if device.type != "cuda" or processes > torch.cuda.device_count():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        context_bytes=max(total_bytes - free_bytes - torch.cuda.memory_reserved(device), 0),
    )


def with_context(described: Device, device: torch.device, processes: int) -> Device:
    """The device with what this process has taken beside the allocator: a plan must leave room for it."""
    memory = device_memory(device, processes)
    return described if memory is None else replace(described, context_bytes=memory.context_bytes)


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
