"""Models and data that vary: what crosses a cut, the modes of modules, which parameters a batch uses. For SPECs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


class Apply(nn.Module):
    """A linear layer, and a function of what it gives."""

    def __init__(self, function: Callable[[Tensor], Any], width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


class After(nn.Module):
    """A linear layer on a function of what it is given."""

    def __init__(self, function: Callable[..., Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.function = function

    def forward(self, *given: Tensor) -> Any:
        return self.linear(self.function(*given))


def spectra(*, kind: str = "plain") -> list[nn.Module]:
    """(B, 8) -> (B, 8) in four blocks; complex tensors, or lazy views of them, cross every cut but the last."""
    if kind == "plain":
        return [
            Apply(torch.fft.rfft),
            nn.Sequential(Real(), nn.Linear(10, 10), nn.Tanh(), Complex()),
            nn.Sequential(Real(), nn.Linear(10, 10), Complex()),
            After(lambda z: torch.fft.irfft(z, n=WIDTH)),
        ]
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "conjugate": lambda z: z.conj(),
        "negative": lambda z: z.conj().imag,
        "transposed": lambda z: z.t().conj(),
    }
    back: dict[str, Callable[[Tensor], Tensor]] = {
        "conjugate": lambda z: torch.fft.irfft(z, n=WIDTH),
        "negative": lambda y: y,
        "transposed": lambda z: torch.fft.irfft(z.t(), n=WIDTH),
    }
    return [
        Apply(lambda x: views[kind](torch.fft.fft(x) if kind == "negative" else torch.fft.rfft(x))),
        After(back[kind]),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
    ]


class Real(nn.Module):
    """(B, 5) complex -> (B, 10) real."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.view_as_real(z).flatten(1)


class Complex(nn.Module):
    """(B, 10) real -> (B, 5) complex."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(x.view(len(x), -1, 2).contiguous())


def over_positions(*, frozen: bool = False) -> list[nn.Module]:
    """(B, ..., 8) -> (B, 8), whatever is between: the mean over it, at the end. The first block may be frozen."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    blocks[0].requires_grad_(not frozen)
    return [*blocks, After(lambda x: x.flatten(1, -2).mean(1))]


class Shaped:
    """Inputs of the given shapes by turns, and targets (B, 8)."""

    def __init__(self, shapes: list[tuple[int, ...]], microbatch_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._items = [
            (torch.randn(microbatch_size, *shape, WIDTH, generator=generator), torch.randn(microbatch_size, WIDTH))
            for shape in shapes * 8
        ]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._items[index]


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "shorter and shorter": [(8,), (7,), (6,)],
    "longer and longer": [(1,), (2,), (5,), (13,), (40,)],
    "one long": [(3,), (3,), (3,), (300,), (3,)],
    "as many numbers": [(6, 6), (4, 9), (36,), (2, 3, 6)],
    "with none at all": [(4,), (4,), (4,)],
    "small until one is large": [(3,), (3,), (600,), (3,), (1300,)],
    "too large to ride": [(600,), (520,), (1300,), (600,)],
}


def shaped(*, microbatch_size: int, seed: int, kind: str) -> Shaped:
    torch.manual_seed(seed)
    return Shaped(SHAPES[kind.replace("_", " ")], microbatch_size, seed)


class Several(nn.Module):
    """As many tensors as the first number of the microbatch says, one of them empty."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(self.linear(x))
        return (y, y.new_empty(0, 3), *y.unbind(1)) if y.shape[1] % 2 else (y, torch.arange(y.shape[1]) > 2)


class Gathered(nn.Module):
    """The sum of whatever came that has numbers to train on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *given: Tensor) -> Tensor:
        sums = [t if t.dim() == 2 else t.mean(1) for t in given if t.is_floating_point() and t.numel()]
        return torch.as_tensor(self.linear(torch.stack(sums).sum(0)))


def changing_count() -> list[nn.Module]:
    """(B, S, 8) -> (B, 8) in two blocks; between them go more tensors where S is odd."""
    return [Several(), Gathered()]


def modes() -> list[nn.Module]:
    """Four blocks (B, 8) -> (B, 8), with drop-out and batch norm that their maker has put into evaluation mode."""
    norm = nn.BatchNorm1d(WIDTH)
    norm.running_mean = torch.linspace(-1.0, 1.0, WIDTH)
    still = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm.eval(), nn.Dropout(0.5).eval())
    return [nn.Linear(WIDTH, WIDTH), still, nn.Tanh(), nn.Linear(WIDTH, WIDTH)]


class Choosing(nn.Module):
    """A linear layer with two gains: one that no batch uses, and one that only microbatches of some kind do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Parameter(torch.ones(WIDTH))
        self.sometimes = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return y * self.sometimes if float(x.detach()[0, 0]) > 0.5 else y


def choosing() -> list[nn.Module]:
    """Four blocks (B, 8) -> (B, 8)."""
    return [Choosing() for _ in range(4)]


def tied_and_idle() -> list[nn.Module]:
    """Four blocks; the first and the last share a parameter that nothing uses."""
    blocks = [Choosing() for _ in range(4)]
    blocks[-1].idle = blocks[0].idle
    return list(blocks)


def spectral() -> list[nn.Module]:
    """Four blocks whose weights are scaled by buffers that every forward changes."""
    return [nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in "1234"]


class Recurrent(nn.Module):
    """A recurrent network over (B, 8) as 4 steps of 2 numbers, with the states of all steps one after the other."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], **options: Any) -> None:
        super().__init__()
        self.network = kind(2, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.network(x.view(len(x), 4, 2))[0]).flatten(1) + x


def recurrent() -> list[nn.Module]:
    """Four blocks (B, 8) -> (B, 8): recurrent ones, and some whose weights are computed of parameters."""
    parametrize = nn.utils.parametrizations
    return [
        nn.Sequential(parametrize.weight_norm(nn.Linear(WIDTH, WIDTH)), Recurrent(nn.LSTM, num_layers=2)),
        nn.Sequential(Recurrent(nn.GRU), nn.Tanh(), parametrize.weight_norm(nn.Linear(WIDTH, WIDTH))),
        Recurrent(nn.LSTM),
        nn.Sequential(parametrize.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    ]


class Packed(Recurrent):
    """The same on packed sequences, whose backward is not split."""

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x.view(len(x), 4, 2), torch.full((len(x),), 4), batch_first=True)
        return torch.as_tensor(nn.utils.rnn.pad_packed_sequence(self.network(packed)[0], True)[0]).flatten(1) + x


def packed() -> list[nn.Module]:
    """Four blocks (B, 8) -> (B, 8)."""
    return [Packed(nn.LSTM) for _ in range(4)]


class Moving(nn.Module):
    """Scales by a mean of what it has seen, which it keeps in one of several ways."""

    mean: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.way = way
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.as_tensor(self.linear(x)) * self.mean.clone()
        seen = 0.9 * self.mean + 0.1 * x.detach().abs().mean(0)
        match self.way:
            case "in_place":
                self.mean.copy_(seen)
            case "uncounted":
                self.mean.data.copy_(seen)
            case _:
                self.mean = seen
        return torch.tanh(y)


def moving(*, way: str) -> list[nn.Module]:
    """Four blocks (B, 8) -> (B, 8)."""
    return [Moving(way) for _ in range(4)]


class LaidOut(nn.Module):
    """Weights that are transposed, that are in channels_last, and between whose rows there are gaps."""

    def __init__(self, transposed: nn.Parameter) -> None:
        super().__init__()
        self.transposed = transposed
        self.convolution = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.gaps = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.transposed + torch.as_tensor(self.convolution(x.view(-1, 2, 2, 2))).flatten(1)
        return torch.tanh(y @ self.gaps)


def laid_out(*, tied: bool = False) -> list[nn.Module]:
    """Four blocks (B, 8) -> (B, 8); they may share a weight."""
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH).t()) for _ in range(4)]
    return [LaidOut(weights[0] if tied else weight) for weight in weights]
