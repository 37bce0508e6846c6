"""Models that misbehave."""

import os
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn


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
