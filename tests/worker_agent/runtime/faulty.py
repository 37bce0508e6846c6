"""Models that misbehave."""

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.waiting import PATIENCE_S
from worker_agent.runtime.status import ENDING, STARTING, Status, read_status


def hangs(*, after: int, depth: int = 4, width: int = 8) -> list[nn.Module]:
    """Blocks of which the first never comes back from its forward number `after`."""
    return [Hanging(width, after if index == 0 else None) for index in range(depth)]


class Hanging(nn.Module):
    """Scales its input by a weight, so often."""

    def __init__(self, width: int, after: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.left = after

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        if self.left is not None:
            self.left -= 1
            while self.left <= 0:
                time.sleep(1.0)
        scaled: Tensor = x * self.weight
        return scaled


def slow_to_start(*, rank: int, depth: int = 4, width: int = 8) -> list[nn.Module]:
    """Blocks that one of the ranks never gets."""
    if os.environ["RANK"] == str(rank):
        time.sleep(3600.0)
    return [Hanging(width, None) for _ in range(depth)]


def waits_backwards(*, ranks: str, depth: int = 4, width: int = 8) -> list[nn.Module]:
    """Blocks of which the first ends its first backward once rank 1 is through with its stream, if that comes."""
    blocks: list[nn.Module] = [nn.Linear(width, width) for _ in range(depth)]
    blocks[0] = _WaitsBackwards(Path(ranks) / "rank-1.status", width)
    return blocks


class _WaitsBackwards(nn.Module):
    def __init__(self, status: Path, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.status = status

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y.register_hook(self._wait)  # type: ignore[no-untyped-call]
        return y

    def _wait(self, _gradient: Tensor) -> None:
        come_to(self.status, lambda status: status.instruction == ENDING)


def watched_data(*, ranks: str, microbatch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Data that are read slowly enough to see what the rank's status says of it meanwhile, and note that."""
    status = Path(ranks) / f"rank-{os.environ['RANK']}.status"

    class Watched(list[tuple[Tensor, Tensor]]):
        def __getitem__(self, index: Any) -> Any:
            seen = come_to(status, lambda status: status.instruction in (STARTING, status.finished))
            with status.with_suffix(".seen").open("a") as file:
                file.write(f"{seen.activity} {seen.instruction} {seen.finished}\n")
            return super().__getitem__(index)

    return Watched([(torch.ones(microbatch_size, 8), torch.ones(microbatch_size, 8)) for _ in range(2)])


def come_to(path: Path, there: Callable[[Status], bool]) -> Status:
    """A rank's status once it is as it should be. Raises TimeoutError if that does not come."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        status = read_status(path)
        if status is not None and there(status):
            return status
        time.sleep(0.01)
    raise TimeoutError(f"{path}: {status}")


def failing(*, how: str, block: int = 1, depth: int = 4, width: int = 8) -> list[nn.Module]:
    """Blocks of which one goes wrong in its forward number 3, or in its first backward."""
    if how == "factory":
        raise LookupError("no weights\nfor this model")
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    blocks[block] = Failing(how, width)
    return blocks


class Failing(nn.Module):
    """A linear layer, and after two microbatches something else."""

    def __init__(self, how: str, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.how = how
        self.left = 3

    def forward(self, x: Tensor) -> Any:
        """(B, width) -> (B, width), or whatever is no answer."""
        self.left -= 1
        y = self.linear(x)
        if self.how == "backward":
            return _FailsBackwards.apply(y)  # type: ignore[no-untyped-call]
        if self.left > 0:
            return y
        return self._wrong(y)

    def _wrong(self, y: Tensor) -> Any:
        answers: dict[str, Any] = {"list": [y], "dict": {"y": y}, "none": None, "nothing": (), "number": (y, 3)}
        if self.how in answers:
            return answers[self.how]
        match self.how:
            case "sparse":
                return y.to_sparse()
            case "raise":
                raise ValueError("the first line says what\n\n  and the last one \x1b[31mhow")
            case "key":
                return answers["no such key"]
            case "memory":
                return torch.empty(2**60)
            case "exit":
                sys.exit(0)
            case "ended":  # as torchrun ends a rank that has reported and takes long to end by itself
                atexit.register(os.kill, os.getpid(), signal.SIGTERM)
                raise LookupError("no more rows")
        os._exit(3 if self.how == "gone with 3" else 0)


class _FailsBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError("no way back")


def broken_data(*, microbatch_size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Data that cannot be read from its third microbatch on."""

    class Broken(list[tuple[Tensor, Tensor]]):
        def __getitem__(self, index: Any) -> Any:
            if index == 2:
                raise OSError("shard 2 is gone")
            return super().__getitem__(index)

    return Broken([(torch.ones(microbatch_size, 8), torch.ones(microbatch_size, 8)) for _ in range(9)])


def broken_loss(outputs: Tensor, targets: Tensor) -> Any:
    """No number."""
    return {"loss": outputs.sum()}


def many_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Not one number."""
    return (outputs - targets).square()


def overflowing(*, step: int, block: int = 0, depth: int = 4, width: int = 8) -> list[nn.Module]:
    """Blocks of which one gets an infinite gradient in a step (from 1) of four microbatches; its losses are finite."""
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    blocks[block] = _Overflowing(4 * step, width)
    return blocks


class _Overflowing(nn.Module):
    def __init__(self, microbatch: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.left = microbatch

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.left -= 1
        if self.left == 0:
            y.register_hook(lambda gradient: gradient * torch.inf)  # type: ignore[no-untyped-call]
        return y


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.embedding(torch.arange(len(x)), self.weight, sparse=True)


def untrainable(*, kind: str) -> list[nn.Module]:
    """Blocks with what no stage can train, exchange or keep."""
    plain: list[nn.Module] = [nn.Linear(8, 8) for _ in range(3)]
    odd = nn.Linear(8, 8)
    match kind:
        case "lazy":
            return [*plain, nn.LazyLinear(8)]
        case "complex":
            odd.turn = nn.Parameter(torch.ones(8, dtype=torch.complex64))
        case "buffer":
            odd.register_buffer("turn", torch.ones(8, dtype=torch.complex128))
        case "embedding":
            odd.table = nn.Embedding(4, 8, sparse=True)
        case "bag":
            odd.table = nn.EmbeddingBag(4, 8, sparse=True)
        case "gradient":
            return [*plain, _Sparse()]
    return [*plain, odd]
