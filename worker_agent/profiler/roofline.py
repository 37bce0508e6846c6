"""Roofline: how long operations take on a device, from its datasheet.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer (Williams, Waterman and
Patterson 2009, "Roofline"), each at the share of the peak that the datasheet states.
"""

from collections.abc import Sequence

from pipeplan.costs.memory import OPTIMIZER_COPIES
from pipeplan.documents.profile import DTYPE_BYTES
from worker_agent.profiler.datasheet import Datasheet
from worker_agent.profiler.operations import Operation


def duration_s(operations: Sequence[Operation], sheet: Datasheet) -> float:
    """Seconds of these operations in a row.

    A GPU computes while its host launches what comes next: the slower of the two decides. A CPU does both itself.
    Raises InvalidInputError for matrix products in a dtype of which the datasheet does not say the peak.
    """
    computing_s = sum(_computing_s(operation, sheet) for operation in operations)
    launching_s = len(operations) * sheet.launch_s
    return max(computing_s, launching_s) if sheet.kind == "gpu" else computing_s + launching_s


def _computing_s(operation: Operation, sheet: Datasheet) -> float:
    arithmetic_s = operation.flops / sheet.reached_flops_per_s(operation.dtype) if operation.flops else 0.0
    return max(arithmetic_s, operation.moved_bytes / sheet.reached_bytes_per_s)


def update_s_per_byte(optimizer: str, dtype: str, sheet: Datasheet) -> float:
    """Seconds of an optimizer's fused step a byte of weights: its memory traffic.

    It reads gradients, and reads and writes weights and states. Weights of 16 bits have float32 copies, on which it
    works and of which it writes the weights.
    """
    weight_bytes = DTYPE_BYTES[dtype]
    worked_on_bytes = max(weight_bytes, DTYPE_BYTES["float32"])
    written_bytes = weight_bytes if worked_on_bytes > weight_bytes else 0
    moved_bytes = weight_bytes + 2 * worked_on_bytes * (1 + OPTIMIZER_COPIES[optimizer]) + written_bytes
    return moved_bytes / weight_bytes / sheet.reached_bytes_per_s


def version_s_per_byte(sheet: Datasheet) -> float:
    """Seconds of copying weights aside, a byte of them: read once, written once."""
    return 2 / sheet.reached_bytes_per_s
