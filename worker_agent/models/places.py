"""Places: the position of a forward in the user's code."""

import sys
from pathlib import Path

import torch
from torch import nn

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def place_of(module: nn.Module, caller: str) -> str:
    """A module's class, and the file and line of the user's code that runs, the innermost above a function `caller`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        if frame.f_code.co_qualname == caller:
            return type(module).__name__
        frame = frame.f_back
    return f"{type(module).__name__}, {Path(frame.f_code.co_filename).name} line {frame.f_lineno}"
