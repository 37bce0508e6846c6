"""A chain whose blocks hand on several tensors, drop out, and train parameters of several kinds. Named by SPECs."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def awkward(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width)."""
    return [Fork(width), Mix(width), Mix(width), Join(width)]


def forking_late(*, width: int = 8) -> list[nn.Module]:
    """Four blocks; the first hands on one tensor, the third three."""
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()), Fork(width), Mix(width), Join(width)]


class Fork(nn.Module):
    """(B, width) -> (B, width) twice, and numbers that are no floating-point ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, right = torch.tanh(self.norm(self.up(x))).chunk(2, dim=1)
        return left, right, torch.arange(len(x))


class Mix(nn.Module):
    """A weight used twice, dropout, and a scale that no layer holds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.25)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, left: Tensor, right: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left = self.drop(torch.tanh(self.linear(left))) + right[numbers] * self.scale
        return left, torch.tanh(self.linear(right)), numbers


class Join(nn.Module):
    """A convolution over what was handed on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(2, 1, 3, padding=1)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, left: Tensor, right: Tensor, numbers: Tensor) -> Tensor:
        joined = self.convolution(torch.stack([left, right[numbers]], dim=1)).squeeze(1)
        return torch.as_tensor(self.out(joined))


def branching(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width) of which the second and the third both read the first, the fourth both."""
    return [nn.Linear(width, width), Branch(width), OtherBranch(width), Sum(width)]


class Branch(nn.Module):
    """x -> x, which the other branch still has to read, and what this one makes of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.tanh(self.linear(x))


class OtherBranch(nn.Module):
    """x and what the first branch made of it -> what both made of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        return first, torch.sigmoid(self.linear(x))


class Sum(nn.Module):
    """What both branches made, added up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(first + second))


def tied(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width): the last has the first one's weight and the second one's bias."""
    blocks = [nn.Linear(width, width) for _ in range(4)]
    blocks[3].weight = blocks[0].weight
    blocks[3].bias = blocks[1].bias
    return [nn.Sequential(block, nn.Tanh()) for block in blocks]


def thrice(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width): one module is in three of them, and the two in the middle share a bias."""
    shared, middle = nn.Linear(width, width), nn.Linear(width, width)
    third = nn.Linear(width, width)
    third.bias = middle.bias
    return [
        nn.Sequential(shared, nn.Tanh()),
        nn.Sequential(middle, nn.Tanh()),
        nn.Sequential(third, nn.Tanh(), shared),
        nn.Sequential(nn.Tanh(), shared),
    ]


def untied(*, width: int = 8) -> list[nn.Module]:
    """The same to begin with, but every block has its own."""
    blocks = tied(width=width)
    last = blocks[3][0]  # type: ignore[index]
    last.weight, last.bias = (nn.Parameter(p.detach().clone()) for p in (last.weight, last.bias))
    return blocks


def frozen(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width): nothing of the first is trained, and of the third only the bias."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
    blocks[0].requires_grad_(False)
    blocks[2][0].weight.requires_grad_(False)
    return list(blocks)


class Adapter(nn.Module):
    """A frozen layer with a trained one of low rank beside it (Hu et al. 2021, "LoRA")."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapters(*, width: int = 64, rank: int = 2, blocks: int = 8) -> list[nn.Module]:
    """Blocks (B, width) -> (B, width) of which only the adapters are trained."""
    return [Adapter(width, rank) for _ in range(blocks)]


def extractor(*, width: int = 64, trained: int = 1) -> list[nn.Module]:
    """Eight blocks (B, width) -> (B, width), of which the last ones are trained; each has a buffer."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8)]
    for number, block in enumerate(blocks):
        block.requires_grad_(number >= 8 - trained)
        block.register_buffer("mask", torch.ones(width, width))
    return list(blocks)


class FrozenEmbedding(nn.Module):
    """Numbers (B, T) -> (B, T, width)."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width).requires_grad_(False)

    def forward(self, numbers: Tensor) -> Tensor:
        return torch.as_tensor(self.embedding(numbers))


class FrozenHead(nn.Module):
    """A trained norm, and the embedding's weights again: (B, T, width) -> (B, T, vocabulary)."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.norm = embedding, nn.LayerNorm(embedding.embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.embedding.weight)


def frozen_embedding(*, vocabulary: int = 256, width: int = 32) -> list[nn.Module]:
    """Six blocks; the first and the last have the same frozen weights."""
    first = FrozenEmbedding(vocabulary, width)
    inner = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
    return [first, *inner, FrozenHead(first.embedding)]


def batch_norms(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width), two with batch norm: one with momentum, one that averages all."""
    return [
        nn.Sequential(nn.BatchNorm1d(width, momentum=0.3), nn.Linear(width, width), nn.Tanh()),
        nn.Sequential(nn.Linear(width, width), nn.Tanh()),
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width, momentum=None), nn.Tanh()),
        nn.Linear(width, width),
    ]


class Loud(nn.Module):
    """A linear layer that works with large inputs and small weights: its weight's gradient is the first to overflow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.normal_(self.linear.weight, std=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        return torch.as_tensor(self.linear(2000.0 * x))


def loud(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width), of which the second is loud."""
    quiet = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
    return [quiet[0], Loud(width), *quiet[1:]]


Sentences = tuple[Tensor, Tensor, Tensor]
"""Hidden states (B, S, width), token numbers (B, S), and which of them count (B, S), bool."""


def sentences(*, microbatch_size: int, seed: int) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    """Token numbers and which of them count; the targets are tokens."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(32):
        tokens = torch.randint(11, (microbatch_size, 6), generator=generator)
        counts = torch.rand(microbatch_size, 6, generator=generator) < 0.7
        made.append(((tokens, counts), torch.randint(11, (microbatch_size, 5), generator=generator)))
    return made


def reader(*, width: int = 8) -> list[nn.Module]:
    """Four blocks from token numbers to logits; the first hands on whole numbers alone, the last shares a weight."""
    embed, head = Embed(width), Head(width)
    head.out.weight = embed.tokens.weight
    return [Shift(), embed, Attend(width), head]


class Shift(nn.Module):
    """Nothing to train, and no gradient to come back."""

    def forward(self, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (tokens + 1) % 11, tokens[:, :-1], counts


class Embed(nn.Module):
    """Two sums of embeddings beside what was handed on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, shifted: Tensor, tokens: Tensor, counts: Tensor) -> Sentences:
        return self.drop(self.tokens(shifted)[:, :-1] + self.tokens(tokens)), tokens, counts[:, :-1]


class Attend(nn.Module):
    """Looks at the tokens that count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, hidden: Tensor, tokens: Tensor, counts: Tensor) -> Sentences:
        scores = (hidden @ self.mix(hidden).transpose(1, 2)).masked_fill(~counts[:, None, :], -30.0)
        return hidden + self.drop(scores.softmax(dim=2) @ hidden), tokens, counts


class Head(nn.Module):
    """Logits, but for a token itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 11, bias=False)

    def forward(self, hidden: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        logits: Tensor = self.out(hidden)
        return logits.scatter_add(2, tokens[..., None], counts[..., None].to(logits.dtype))


class Bend(nn.Module):
    """Changes what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        return torch.as_tensor(self.linear(x.mul_(0.5).tanh_()))


def in_place(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width), which change what they are given."""
    return [Bend(width) for _ in range(4)]


def kept_and_changed(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width): the second keeps its output for its backward, the third changes it."""
    return [nn.Linear(width, width), nn.Sequential(nn.Linear(width, width), nn.Tanh()), Bend(width), Bend(width)]


class Twice(nn.Module):
    """A layer used in two parts that are each computed again in the backward: its gradient is added to twice there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        for _ in range(2):
            x = torch.tanh(checkpoint(self.linear, x, use_reentrant=True))
        return x


class Sometimes(nn.Module):
    """A layer of which the data says which half is used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        return torch.tanh(torch.as_tensor(self.halves[int(x.sum() > 0)](x)))


def uneven(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width), of which not every parameter has a gradient once in a backward."""
    return [nn.Linear(width, width), Twice(width), Sometimes(width), nn.Linear(width, width)]


class Seeing(nn.Linear):
    """Keeps its weight by another name as well, as recurrent modules of torch do, and computes with that."""

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["seen"] = value

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.__dict__["seen"], self.bias)


def seeing(*, width: int = 8) -> list[nn.Module]:
    """`mlp` of depth 4, with modules that want to see their weights change."""
    return [*(nn.Sequential(Seeing(width, width), nn.Tanh()) for _ in range(3)), Seeing(width, width)]


class Casting(nn.Module):
    """A layer that computes in bfloat16 whoever calls it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x)
        return torch.tanh(y.float())


def casting(*, width: int) -> list[nn.Module]:
    """(B, width) -> (B, width) in four blocks."""
    return [Casting(width) for _ in range(4)]
