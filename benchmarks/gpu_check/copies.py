"""Copies between host and device, from memory that may be paged out and from pinned memory."""

from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.here import MIB, device, is_short
from benchmarks.gpu_check.timing import host_s, synchronise

SIZES_BYTES = (4096, MIB // 4, MIB, 16 * MIB, 128 * MIB)


def check(findings: Findings) -> None:
    """A case for each direction; without a GPU nothing needs to be pinned."""
    sizes_bytes = (4096, MIB // 4) if is_short(findings) else SIZES_BYTES
    pinned = (False, True) if torch.cuda.is_available() else (False,)
    if len(pinned) == 1:
        findings.leave_out("pinned memory", "there is no GPU")
    findings.run({name: partial(copy, name, sizes_bytes, pinned) for name in ("to the device", "to the host")})


def copy(direction: str, sizes_bytes: tuple[int, ...], pinned: tuple[bool, ...]) -> dict[str, Any]:
    """Seconds of a copy, by kind of memory and bytes; for pinned memory also the host's wait."""
    figures: dict[str, Any] = {}
    where = device()
    for is_pinned in pinned:
        kind = "pinned" if is_pinned else "pageable"
        for size_bytes in sizes_bytes:
            host = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            there = torch.empty(size_bytes, dtype=torch.uint8, device=where)
            source, target = (host, there) if direction == "to the device" else (there, host)
            move = partial(target.copy_, source, non_blocking=is_pinned)
            whole_s = host_s(partial(_through, move, where), where, repeats=10)
            seconds = {"through_s": whole_s, "bytes_per_s": size_bytes / whole_s}
            figures[f"{kind} {size_bytes}"] = seconds | {"host_s": host_s(move, where, repeats=10)}
    return figures


def _through(move: "partial[torch.Tensor]", where: torch.device) -> None:
    move()
    synchronise(where)
