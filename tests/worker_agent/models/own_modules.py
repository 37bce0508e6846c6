"""Modules as people write them, which know nothing of pipelines; and their data."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker_agent.models.samples import Samples

WIDTH = 8
TOKENS = 19


class Plain(nn.Module):
    """A container whose forward calls it."""

    def __init__(self) -> None:
        super().__init__()
        rows = ((nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)) for _ in range(3))
        self.body = nn.Sequential(*(part for row in rows for part in row), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Convolutions in lists, a skip around each and one around all, and sums in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        self.skips = nn.ModuleList((nn.Identity(), nn.Conv2d(4, 4, 1), nn.Identity(), nn.Conv2d(4, 4, 1)))
        self.activation = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 5)

    def forward(self, image: Tensor) -> Tensor:
        first = x = self.stem(image)
        for convolution, norm, skip in zip(self.convolutions, self.norms, self.skips, strict=True):
            y = norm(convolution(x))
            y += skip(x)
            x = self.activation(y)
        x = torch.cat((x[:, :2] * 0.3, first[:, 2:].relu()), dim=1)
        return self.head(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """A layer that takes a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor, *, mask: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        mixed, seen = self.mixed(y, y, y, attn_mask=mask, key_padding_mask=padding)
        return x + mixed + self.mlp(y), seen


class Masked(nn.Module):
    """A causal mask made of sizes, a mask of padding made of the tokens, positions, and weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Parameter(torch.randn(32, WIDTH))
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.positions[:length]
        mask = torch.zeros(length, length, dtype=torch.bool, device=tokens.device)
        mask[torch.triu_indices(length, length, 1).unbind()] = True
        padding = tokens == 0
        for layer in self.layers:
            x, _ = layer(x, mask=mask, padding=padding)
        return self.scale * functional.linear(self.norm(x), self.embed.weight)


class TorchsEncoder(nn.Module):
    """torch's own encoder: it looks into the mask, which follows from sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embed(tokens), mask=mask))  # type: ignore[no-any-return]


class Group(nn.Module):
    """A layer of layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(layers))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=torch.bool)
        for block in self.blocks:
            x = block(x, mask=mask, padding=padding)[0]
        return x


class Nested(nn.Module):
    """Containers in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "embed": nn.Sequential(nn.Embedding(TOKENS, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
                "groups": nn.ModuleList((Group(1), Group(2))),
                "head": nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)),
            }
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.parts["embed"](tokens)
        groups = self.parts["groups"]
        assert isinstance(groups, nn.ModuleList)
        for group in groups:
            x = group(x, tokens == 0)
        return self.parts["head"](x)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """The first layer's weight is the last one's, and a weight of none is used by two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.middle = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.gain
        for layer in self.middle:
            x = layer(x).tanh()
        return self.last(x * self.gain)  # type: ignore[no-any-return]


class Dropping(nn.Module):
    """Dropout as a module, as a function around which a block begins, and as noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        kept = functional.dropout(x, 0.4, self.training)
        for layer in self.layers:
            x = self.drop(layer(functional.dropout(x, 0.2, self.training)))
            x = x + 0.1 * torch.randn(x.shape[1]) + kept
        return x


class Twice(nn.Module):
    """A layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x).sigmoid()
        return self.head(x)  # type: ignore[no-any-return]


class Scaled(torch.autograd.Function):
    """A backward of one's own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 5


class Varied(nn.Module):
    """Two inputs and results, a recurrent layer, one without gradients, views, and a function of one's own."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))
        self.values = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        with torch.no_grad():
            fixed = self.frozen(x)
        x, (state, _) = self.recurrent(Scaled.apply(x + fixed))  # type: ignore[no-untyped-call]
        rows = [row * (i + 1) for i, row in enumerate(x.transpose(0, 1))]
        mixed = self.values(torch.stack(rows).transpose(0, 1) + features[:, None] + self.shift)
        return mixed, state.squeeze(0)


class Routed(nn.Module):
    """A layer that looks into what it computes: which expert takes which token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if bool((chosen == number).any()):
                y[chosen == number] = expert(x[chosen == number])
        return x + y


class Experts(nn.Module):
    """Layers that look into their own tensors: no matter, they are blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Routed() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Branching(nn.Module):
    """What comes after the first layer depends on what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if x.sum() > 0:
            x = self.layers[1](x)
        return self.layers[2](x)  # type: ignore[no-any-return]


class Remembering(nn.Module):
    """Keeps a tensor from one forward to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.layers[0](x if self.state is None else x + self.state)
        return self.layers[1](self.state)  # type: ignore[no-any-return]


class Hooked(nn.Module):
    """Has a backward look at a tensor between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
        return self.layers[1](x)  # type: ignore[no-any-return]


class Single(nn.Module):
    """One layer: there is nothing to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Named(nn.Module):
    """Gives its results by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layers(x)}


MADE = Single()


def with_cuts(*, cuts: list[str]) -> nn.Module:
    """The masked model, with blocks that begin as one says."""
    model = Masked()
    model.cuts = cuts  # type: ignore[assignment]
    return model


def twice_with_cuts(*, cuts: list[str]) -> nn.Module:
    """The model that calls a layer three times, with blocks that begin as one says."""
    model = Twice()
    model.cuts = cuts  # type: ignore[assignment]
    return model


def tokens(*, microbatch_size: int, seed: int, length: int = 6) -> Samples:
    """Tokens (B, S) of which some are padding, and tokens (B, S) to predict."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(1, TOKENS, (24, length), generator=generator)
    drawn[::3, -2:] = 0
    return Samples(lambda numbers: (drawn[numbers], drawn[numbers]), count=24, microbatch_size=microbatch_size)
