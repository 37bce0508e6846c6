"""Placement of a process on its device: a GPU of its own, or cores of its own."""

import os

import torch

from planner_service.core.errors import require


def place_process(device: str, local_rank: int, local_world_size: int) -> torch.device:
    """Chooses and prepares the device of a node's local rank; "auto" takes GPUs where there are any.

    On the CPU a device is one core: the process is pinned to it and computes with one thread. Stages that wander
    between cores lose about a tenth of their speed. Raises InvalidInputError where there are too few GPUs.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" or (device == "auto" and gpus):
        require(local_world_size <= gpus, "device", f"needs {local_world_size} GPUs on this node", gpus)
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[local_rank % len(cores)]})
    torch.set_num_threads(1)
    return torch.device("cpu")
