"""Placement of a process on its device: a GPU of its own, or cores of its own."""

import ctypes
import os

import torch

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
