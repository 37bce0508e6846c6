"""Device memory: what a process has taken of a GPU, apart from what it holds on the host.

CUDA's context, the kernels that are loaded and NCCL's buffers lie beside the allocator: only the device can tell.
"""

from dataclasses import replace

import torch

from pipeplan.documents.profile import Device, DeviceMemory


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
