"""Traced: blocks as vTrain puts them together from the trace of a single layer (docs/decisions/0137).

Its `src/predictor.py` takes a pass to last from its first kernel to its last in the trace, adds the layers'
all-reduces, and lets a stage wait while it sends.
"""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.truth.constants import EngineConstants
from benchmarks.truth.counted import Pass
from benchmarks.truth.programs import Trace
from pipeplan.documents.forms import BlockKind


def pass_s(one_pass: Pass, computing_s: float, devices: int, constants: EngineConstants, trace: Trace) -> float:
    """A pass of one of so many devices that share a layer, without the bytes of its all-reduces.

    The slower of the host's launches and the device's kernels determines the trace. Of each kernel that the devices
    share, `unshared_s` is not divided among them.
    """
    exchanges = sum(each.count for each in one_pass.collectives)
    kernels_s = _kernels_s(one_pass, computing_s, devices, constants)
    return max(kernels_s, _launches_s(one_pass, constants)) + exchanges * trace.exchange_s


def is_launching(one_pass: Pass, computing_s: float, devices: int, constants: EngineConstants) -> bool:
    """Whether the host's launches determine such a pass."""
    return _kernels_s(one_pass, computing_s, devices, constants) <= _launches_s(one_pass, constants)


def _kernels_s(one_pass: Pass, computing_s: float, devices: int, constants: EngineConstants) -> float:
    own_s = (constants.gap_s or 0.0) + (constants.unshared_s or 0.0) * (1 - 1 / devices)
    return computing_s + len(one_pass.operations) * own_s


def _launches_s(one_pass: Pass, constants: EngineConstants) -> float:
    return len(one_pass.operations) * (constants.host_s or 0.0)


def sending(kinds: Sequence[BlockKind], stops: Sequence[int], layers: int, trace: Trace) -> tuple[BlockKind, ...]:
    """The kind of every block, of embedding, layer and head: those at a cut also send, there and back.

    A message has twice the bytes of what passes the cut.
    """
    embedding, layer, head = kinds
    blocks = [embedding, *[layer] * layers, head]
    (measured,) = layer.measurements
    message_s = 2 * measured.output_bytes / trace.message_bytes_per_s
    for stop in stops:
        blocks[stop - 1] = _longer(blocks[stop - 1], "there", forward_s=message_s)
        blocks[stop] = _longer(blocks[stop], "back", backward_s=message_s)
    return tuple(blocks)


def _longer(kind: BlockKind, way: str, *, forward_s: float = 0.0, backward_s: float = 0.0) -> BlockKind:
    (measured,) = kind.measurements
    longer = replace(measured, forward_s=measured.forward_s + forward_s, backward_s=measured.backward_s + backward_s)
    return replace(kind, name=f"{kind.name}, {way}", measurements=(longer,))
