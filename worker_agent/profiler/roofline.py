"""Roofline: how long operations take on a device, from its datasheet.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer (Williams, Waterman and
Patterson 2009, "Roofline"), each at the share of the peak that the datasheet states.
"""

from collections.abc import Sequence

from worker_agent.profiler.datasheet import Datasheet
from worker_agent.profiler.operations import Operation

UPDATE_PASSES = {"sgd": 3, "momentum": 5, "adam": 7, "adamw": 7}
"""Reads and writes of an array as large as the weights: gradients in, weights in and out, every state in and out."""


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


def update_s_per_byte(optimizer: str, sheet: Datasheet) -> float:
    """Seconds of an optimizer's fused step a byte of weights, all in the weights' dtype: its traffic alone."""
    return UPDATE_PASSES[optimizer] / sheet.reached_bytes_per_s
