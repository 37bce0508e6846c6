"""Timing: an operation's time on the device, and the host's time to launch it."""

import time
from collections.abc import Callable
from statistics import median

import torch

from worker_agent.engine.clocks import clock_for

Operation = Callable[[], object]

ROUND_S, MOST_REPEATS = 0.02, 500


def device_s(operation: Operation, device: torch.device, *, repeats: int | None = None, rounds: int = 5) -> float:
    """Seconds of one call by the device's own clock: the median over rounds of several calls in a row.

    By default as many calls as take `ROUND_S`.
    """
    operation()
    if repeats is None:
        repeats = min(max(int(ROUND_S / max(_calls_s(operation, device, 1), 1e-9)), 1), MOST_REPEATS)
    return median(_calls_s(operation, device, repeats) for _ in range(rounds)) / repeats


def _calls_s(operation: Operation, device: torch.device, repeats: int) -> float:
    clock = clock_for(device)
    clock.mark()
    for _ in range(repeats):
        operation()
    clock.mark()
    start_s, end_s = clock.seconds()
    return end_s - start_s


def host_s(operation: Operation, device: torch.device, *, repeats: int = 200, rounds: int = 5) -> float:
    """Seconds in which the host launches one call, without waiting for any: the median over rounds."""
    found = []
    for _ in range(rounds + 1):
        synchronise(device)
        start_s = time.perf_counter()
        for _ in range(repeats):
            operation()
        found.append((time.perf_counter() - start_s) / repeats)
    synchronise(device)
    return median(found[1:])


def synchronise(device: torch.device) -> None:
    """Waits for all launched work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
