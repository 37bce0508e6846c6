"""Devices: where a process computes, a GPU or a core of its own, and how much memory it has there.

CUDA's context, the loaded kernels and NCCL's buffers lie outside the allocator: only the device knows their size.
"""

import ctypes
import os
import platform
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from pipeplan.documents.profile import Device, DeviceMemory
from pipeplan.errors import require

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""mallopt's parameters: how much free memory the heap keeps, and from which size memory is not taken from the heap."""

_HARDWARE_QUEUES = 32
"""The number of a GPU's queues. A stage has one communicator for each directed edge, one for its replicas and one for
all ranks, each with a stream. With the default of 8 queues, streams share queues with the kernels, and an operation
that waits blocks all later ones of its queue.
"""

_TASKS = Path("/proc/self/task")
_MEMORY = Path("/proc/meminfo")
_PROCESSORS = Path("/proc/cpuinfo")
_GROUP = Path("/sys/fs/cgroup")


def place_process(device: str, local_rank: int, local_world_size: int, *, shared: bool = False) -> torch.device:
    """Chooses and prepares the device of a node's local rank; "auto" takes GPUs where there are any.

    Every rank has a GPU of its own. If GPUs may be `shared`, the ranks take the available GPUs in turn.

    On the CPU a device is one core: the process is pinned to it and computes with one thread. Stages that wander
    between cores lose about a tenth of their speed. Raises InvalidInputError where there are too few GPUs.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(_HARDWARE_QUEUES))  # CUDA reads it once, at its first call
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


def _keep_freed_memory() -> None:
    """Makes the C library keep freed memory: a step frees and takes the same sizes again, and fresh pages cost time.

    Only glibc knows these settings; with any other library nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_THRESHOLD, 32 * 2**20)


def let_gloo_wait() -> None:
    """Lets gloo's present threads take a core only when the computing thread leaves it or has used its time slice.

    A gloo thread that wakes up on the same core stops the other thread, often inside a call that holds a connection's
    lock. It then polls for the lock until the kernel gives the core back, some milliseconds later. Under Linux's
    SCHED_BATCH a thread that wakes up stops no other. Other systems are left as they are.
    """
    for task in _TASKS.iterdir() if _TASKS.exists() else ():
        with suppress(OSError):  # a thread that has just ended, or a system that does not allow it
            number = int(task.name)
            if (task / "comm").read_text().startswith("gloo") and os.sched_getscheduler(number) == os.SCHED_OTHER:
                os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))


def device_memory(device: torch.device, processes: int) -> DeviceMemory | None:
    """The memory that this process has taken so far of a GPU that it shares with no other.

    None on a CPU, whose memory is the host's, and if a node's `processes` share GPUs: figures then include others.
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
    """The device with `context_bytes`: memory outside the allocator, which a plan must leave free."""
    memory = device_memory(device, processes)
    return described if memory is None else replace(described, context_bytes=memory.context_bytes)


def place(device: str, local_rank: int, processes: int) -> torch.device:
    """The device of a local rank: a GPU of its own, or on the CPU one core, pinned, and one thread.

    One core, not a share of the cores: a profile of one device then holds for as many devices as there are cores.
    """
    gpus = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if device == "cuda" or (device == "auto" and gpus):
        return place_process("cuda", local_rank, processes)
    return place_process("cpu", local_rank, len(os.sched_getaffinity(0)))


def describe(device: torch.device, processes: int) -> Device:
    """A device's name and memory: all of a GPU's, or an even share of the memory that the node has available now."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(name=properties.name, memory_bytes=properties.total_memory)
    processor = _first_entry(_PROCESSORS, "model name") or platform.processor() or platform.machine()
    return Device(name=f"{processor}, 1 core", memory_bytes=available_memory_bytes() // processes)


def available_memory_bytes() -> int:
    """The memory that programs may still take on this node, by the kernel's estimate and the control group's limit."""
    estimate = _first_entry(_MEMORY, "MemAvailable")  # such as "8033408 kB"
    if estimate is None:
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    else:
        limits = [int(estimate.split()[0]) * 1024]

    limit, used = _number(_GROUP / "memory.max"), _number(_GROUP / "memory.current")
    if limit is not None and used is not None:
        limits.append(max(limit - used, 1))
    return min(limits)


def _first_entry(path: Path, key: str) -> str | None:
    """The value of the first line `key: value` of a file under /proc; None where there is none."""
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return None


def _number(path: Path) -> int | None:
    """A control group's figure; None where there is none, or it says "max"."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None
