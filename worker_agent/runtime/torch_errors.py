"""What torch's own errors mean, in a few words."""

import torch

_ALLOCATION = "can't allocate memory"


def cause_of(error: RuntimeError) -> str:
    """The first line of what torch says; memory that ran out is called that."""
    lines = str(error).strip().splitlines()
    first_line = lines[0] if lines else type(error).__name__
    if isinstance(error, torch.OutOfMemoryError) or _ALLOCATION in first_line:
        return f"too little memory ({first_line})"
    return first_line
