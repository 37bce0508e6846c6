"""Graphs: what autograd's graph of a microbatch takes beside the tensors that it keeps.

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
"""The bytes of a call whose weight's gradient waits for p2, beside its tensors, on the same heap."""


def graph_bytes(roots: Iterable[Tensor], *, saved: int, device: torch.device) -> int:
    """The bytes of the graph that leads to these tensors and has saved so many, on its device: 0 on a GPU.

    Nodes that belong to leaves are not counted: weights have them as long as any graph does.
    """
    if device.type != "cpu":
        return 0
    nodes = sum(not hasattr(node, "variable") for node in nodes_of(roots))
    return NODE_BYTES * nodes + SAVED_BYTES * saved


def calls_bytes(calls: int, device: torch.device) -> int:
    """The bytes of so many calls that wait for p2, beside their tensors: 0 on a GPU."""
    return CALL_BYTES * calls if device.type == "cpu" else 0


def refuses_hooks(error: BaseException) -> bool:
    """Whether a forward failed because hooks look at what its graph saves: `torch.func` allows none."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code is unwrap(disable_saved_tensors_hooks).__code__
