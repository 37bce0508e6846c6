"""Graphs: the memory of a microbatch's autograd graph without the tensors that it keeps.

Nodes and saved tensors are objects on the host, from a few hundred bytes to more than a thousand each. On a CPU they
are in the device's memory. A block that 2BP writes out step by step has a thousand of them.
"""

from collections.abc import Iterable
from inspect import unwrap
from traceback import walk_tb

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

from worker_agent.models.values import nodes_of

NODE_BYTES, SAVED_BYTES = 660, 530
"""The bytes of a node, and of a tensor that it has saved: fitted to the heap of ResNet-50, GPT-2, Llama, BERT and GNMT
under torch 2, whose graphs come to 12 % less to 9 % more.
"""

CALL_BYTES = 700
"""Heap bytes of a call whose weight's gradient waits for p2, without its tensors."""


def graph_bytes(roots: Iterable[Tensor], *, saved: int, device: torch.device) -> int:
    """The bytes, on the device, of the autograd graph of `roots` with `saved` saved tensors: 0 on a GPU.

    Nodes of leaves do not count: weights keep theirs while any graph exists.
    """
    if device.type != "cpu":
        return 0
    nodes = sum(not hasattr(node, "variable") for node in nodes_of(roots))
    return NODE_BYTES * nodes + SAVED_BYTES * saved


def calls_bytes(calls: int, device: torch.device) -> int:
    """The bytes of `calls` calls that wait for p2, without their tensors: 0 on a GPU."""
    return CALL_BYTES * calls if device.type == "cpu" else 0


def refuses_hooks(error: BaseException) -> bool:
    """Whether a forward failed because of hooks on saved tensors: `torch.func` allows none."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code is unwrap(disable_saved_tensors_hooks).__code__
