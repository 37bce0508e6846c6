"""Recurrent: the papers' LSTM networks as chains: GNMT, S2VT and AWD-LM.

B samples of S source and T target tokens (F frames), H hidden features.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from pipeplan.errors import require
from worker_agent.models.batches import TokenInputs
from worker_agent.models.papers import require_sizes
from worker_agent.models.random_data import RandomData

RESIDUAL_FROM = 2
"""The first of GNMT's layers, counted from 0, that adds its input to its output."""


def gnmt(
    *, hidden: int = 1024, layers: int = 4, vocabulary: int = 32320, length: int = 50, dropout: float = 0.2
) -> list[nn.Module]:
    """GNMT (Wu et al. 2016, in NVIDIA's second version): `layers` LSTMs in the encoder and as many in the decoder.

    The first LSTM is bidirectional. All decoder LSTMs get the context of the first one's attention. Source
    and target share an embedding. A source (B, S) and a target (B, T) -> (B, T, vocabulary). `length` is of random
    sentences. PipeDream's GNMT-8 has 4 layers each (the default), GNMT-16 has 8.
    """
    require_sizes({"hidden": hidden, "layers": layers, "vocabulary": vocabulary, "length": length}, dropout)
    require(layers >= 2, "model.layers", "must be at least 2", layers)
    source = SourceEmbedding(vocabulary, hidden, length)
    target = TargetEmbedding(vocabulary, hidden)
    target.tokens.weight = source.tokens.weight
    encoder = [
        EncoderLayer(hidden * (2 if layer == 1 else 1), hidden, both_ways=layer == 0, layer=layer, dropout=dropout)
        for layer in range(layers)
    ]
    decoder = [DecoderLayer(hidden, layer=layer, dropout=dropout) for layer in range(1, layers)]
    return [source, *encoder, target, AttentionLayer(hidden, dropout), *decoder, First(nn.Linear(hidden, vocabulary))]


def s2vt(
    *,
    features: int = 4096,
    frames: int = 80,
    words: int = 20,
    vocabulary: int = 46168,
    embedding: int = 500,
    hidden: int = 1000,
) -> list[nn.Module]:
    """S2VT (Venugopalan et al. 2015, figure 2): an LSTM reads frames, a second one the first's outputs and words.

    Frames (B, F, features) and a sentence (B, T) -> (B, T, vocabulary). `frames` and `words` are of random videos.
    """
    sizes = {"features": features, "frames": frames, "words": words}
    require_sizes(sizes | {"vocabulary": vocabulary, "embedding": embedding, "hidden": hidden})
    query = f"features={features}&frames={frames}&vocabulary={vocabulary}&words={words}"
    takes = RandomData(
        data=f"preset:random_videos?{query}",
        description=f"random videos, {frames} frames of {features} features and {words} words",
    )
    return [
        FrameEmbedding(features, embedding, takes),
        FrameLSTM(embedding, hidden),
        WordLSTM(vocabulary, embedding, hidden),
        nn.Linear(hidden, vocabulary),
    ]


def awd_lm(
    *,
    vocabulary: int = 10000,
    embedding: int = 400,
    hidden: int = 1150,
    layers: int = 3,
    sequence_length: int = 70,
    dropout: float = 0.4,
) -> list[nn.Module]:
    """AWD-LM (Merity et al. 2017): an embedding, `layers` LSTMs and a head with the embedding's weight.

    (B, S) token numbers -> (B, S, vocabulary). Dropout between layers is the same for all tokens of a sequence; the
    dropout of the recurrent weights is left out, which changes neither shapes nor parameters.
    """
    sizes = {"vocabulary": vocabulary, "embedding": embedding, "hidden": hidden, "layers": layers}
    require_sizes(sizes | {"sequence_length": sequence_length}, dropout)
    first = TokenEmbedding(vocabulary, embedding, sequence_length)
    head = nn.Linear(embedding, vocabulary)
    head.weight = first.tokens.weight
    widths = [embedding, *[hidden] * (layers - 1), embedding]
    body = [LanguageLayer(before, after, dropout) for before, after in pairwise(widths)]
    return [first, *body, head]


class SourceEmbedding(nn.Module):
    """Embeds the source; the target passes through."""

    def __init__(self, vocabulary: int, hidden: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        nn.init.uniform_(self.tokens.weight, -0.1, 0.1)
        self.takes = RandomData(
            data=f"preset:random_translations?vocabulary={vocabulary}&length={length}",
            description=f"random sentences, {length} tokens each",
        )

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S) and (B, T) -> (B, S, H) and (B, T)."""
        return self.tokens(source), target


class EncoderLayer(nn.Module):
    """An LSTM over the source; the target passes through."""

    def __init__(self, before: int, hidden: int, *, both_ways: bool, layer: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(before, hidden, batch_first=True, bidirectional=both_ways)
        self.residual = layer >= RESIDUAL_FROM
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, before) and (B, T) -> (B, S, H), or 2 H both ways, and (B, T)."""
        y, _ = self.lstm(self.dropout(x))
        return (y + x if self.residual else y), target


class TargetEmbedding(nn.Module):
    """Embeds the target, whose LSTMs come next."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)

    def forward(self, context: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, H) and (B, T) -> (B, S, H) and (B, T, H)."""
        return context, self.tokens(target)


class AttentionLayer(nn.Module):
    """The decoder's first LSTM, and its outputs' contexts by normalised attention over the source.

    Bahdanau et al. 2014, section 3.1, with the normalised weight of Salimans and Kingma 2016.
    """

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Parameter(torch.empty(hidden).uniform_(-0.1, 0.1))
        self.scale = nn.Parameter(torch.full((1,), hidden**-0.5))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.dropout = nn.Dropout(dropout)

    def forward(self, context: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, H) and (B, T, H) -> the LSTM's outputs and contexts, (B, T, H) each."""
        x, _ = self.lstm(self.dropout(x))
        sums = self.query(x).unsqueeze(2) + self.key(context).unsqueeze(1) + self.bias
        scores = sums.tanh() @ (self.score / self.score.norm() * self.scale)
        return x, scores.softmax(dim=-1) @ context


class DecoderLayer(nn.Module):
    """An LSTM over the target, which also takes attention's contexts."""

    def __init__(self, hidden: int, *, layer: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2 * hidden, hidden, batch_first=True)
        self.residual = layer >= RESIDUAL_FROM
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, H) and (B, T, H) -> (B, T, H), and the second as it was."""
        y, _ = self.lstm(self.dropout(torch.cat((x, found), dim=-1)))
        return (y + x if self.residual else y), found


class First(nn.Module):
    """A module that takes the first of several values."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, first: Tensor, *_: Tensor) -> Tensor:
        """The module's output for the first value."""
        return self.module(first)  # type: ignore[no-any-return]


class FrameEmbedding(nn.Module):
    """A linear layer over frames; the sentence passes through."""

    def __init__(self, features: int, embedding: int, takes: RandomData) -> None:
        super().__init__()
        self.linear = nn.Linear(features, embedding)
        self.takes = takes

    def forward(self, frames: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """(B, F, features) and (B, T) -> (B, F, embedding) and (B, T)."""
        return self.linear(frames), words


class FrameLSTM(nn.Module):
    """An LSTM over the frames and, while the second one speaks, over zeros; the sentence passes through."""

    def __init__(self, embedding: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)

    def forward(self, frames: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """(B, F, embedding) and (B, T) -> (B, F + T, H) and (B, T)."""
        return self.lstm(nn.functional.pad(frames, (0, 0, 0, words.shape[1])))[0], words


class WordLSTM(nn.Module):
    """An LSTM over the first one's outputs and, after the frames, the words' embeddings."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(hidden + embedding, hidden, batch_first=True)

    def forward(self, seen: Tensor, words: Tensor) -> Tensor:
        """(B, F + T, H) and (B, T) -> (B, T, H)."""
        frames = seen.shape[1] - words.shape[1]
        said = nn.functional.pad(self.tokens(words), (0, 0, frames, 0))
        outputs: Tensor = self.lstm(torch.cat((seen, said), dim=-1))[0]
        return outputs[:, frames:]


class TokenEmbedding(nn.Module):
    """Embeds tokens."""

    def __init__(self, vocabulary: int, embedding: int, sequence_length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, embedding)
        nn.init.uniform_(self.tokens.weight, -0.1, 0.1)
        self.takes = TokenInputs(vocab_size=vocabulary, positions=sequence_length)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) -> (B, S, embedding)."""
        return self.tokens(tokens)  # type: ignore[no-any-return]


class LanguageLayer(nn.Module):
    """An LSTM over tokens after a dropout that is the same for all of a sequence (Gal and Ghahramani 2016)."""

    def __init__(self, before: int, after: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(before, after, batch_first=True)
        self.dropout = nn.Dropout1d(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, before) -> (B, S, after)."""
        dropped = self.dropout(x.transpose(1, 2)).transpose(1, 2)
        return self.lstm(dropped)[0]  # type: ignore[no-any-return]
