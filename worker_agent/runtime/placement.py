"""Placement of a process on its device: a GPU of its own, or cores of its own."""

import os

import torch

from planner_service.core.errors import require


def place_process(device: str, local_rank: int, local_world_size: int) -> torch.device:
    """Chooses and prepares the device of a node's local rank; "auto" takes GPUs where there are any.

    On the CPU the node's cores are shared out evenly, the process is pinned to its share and computes with as many
    threads: stages that wander between cores lose about a tenth of their speed. Raises InvalidInputError where there
    are too few GPUs.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" or (device == "auto" and gpus):
        require(local_world_size <= gpus, "device", f"needs {local_world_size} GPUs on this node", gpus)
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    cores = sorted(os.sched_getaffinity(0))
    share = max(len(cores) // local_world_size, 1)
    start = local_rank * share % len(cores)
    os.sched_setaffinity(0, cores[start : start + share])
    torch.set_num_threads(share)
    return torch.device("cpu")
