"""Language models of the papers, in full size: BERT-Large, GPTs, LLaMA-7B and Mamba-1.4B. Options make them smaller.

PipeDream-2BW (Narayanan et al. 2021, section 5) gives its GPTs' parameters and sequences (512 tokens) but no widths:
1.3B has those of GPT-3 XL (Brown et al. 2020, table 2.1); 2.2B and 3.8B have 32 layers, as wide as makes them so large.

B sequences of S tokens, H hidden features; Mamba: D inner features with N states each.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeplan.errors import require
from worker_agent.models.batches import TokenInputs
from worker_agent.models.papers import require_sizes
from worker_agent.models.transformer import EMBEDDING_DEVIATION, Attention, FeedForward, transformer

_gpt = partial(transformer, vocabulary=50257, sequence_length=512, dropout=0.1, tied=True)

gpt_1_3b = partial(_gpt, hidden=2048, layers=24, heads=16)
gpt_2_2b = partial(_gpt, hidden=2304, layers=32, heads=24)
gpt_3_8b = partial(_gpt, hidden=3072, layers=32, heads=24)

llama_7b = partial(
    transformer,
    hidden=4096,
    layers=32,
    heads=32,
    ffn=11008,
    vocabulary=32000,
    sequence_length=2048,
    positions="rotary",
    norm="rms",
    activation="swiglu",
    bias=False,
)
"""Touvron et al. 2023, table 2."""

BERT_EPSILON = 1e-12


def bert_large(
    *,
    hidden: int = 1024,
    layers: int = 24,
    heads: int = 16,
    vocabulary: int = 30522,
    sequence_length: int = 512,
    dropout: float = 0.1,
) -> list[nn.Module]:
    """BERT-Large with its masked language model (Devlin et al. 2018, section 3): (B, S) -> (B, S, vocabulary).

    All tokens are of the first sentence. The head has the embedding's weight. Pooler and next-sentence head are left
    out. Raises InvalidInputError for sizes that do not fit.
    """
    counts = {"hidden": hidden, "layers": layers, "heads": heads, "vocabulary": vocabulary}
    require_sizes(counts | {"sequence_length": sequence_length}, dropout)
    require(hidden % heads == 0, "model.heads", f"must divide the {hidden} hidden features", heads)
    embedding = BertEmbedding(vocabulary, hidden, sequence_length, dropout)
    body = [BertLayer(hidden, heads, dropout) for _ in range(layers)]
    output = nn.Linear(hidden, vocabulary)
    output.weight = embedding.tokens.weight
    norm = nn.LayerNorm(hidden, eps=BERT_EPSILON)
    return [embedding, *body, nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), norm, output)]


class BertEmbedding(nn.Module):
    """Embeddings of tokens, positions and the sentence, with a norm and dropout."""

    def __init__(self, vocabulary: int, hidden: int, length: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(length, hidden)
        self.sentences = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=BERT_EPSILON)
        self.dropout = nn.Dropout(dropout)
        self.takes = TokenInputs(vocab_size=vocabulary, positions=length)
        for embedding in (self.tokens, self.positions, self.sentences):
            nn.init.normal_(embedding.weight, std=EMBEDDING_DEVIATION)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) -> (B, S, H)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        sentence = self.sentences(torch.zeros_like(places))
        return self.dropout(self.norm(self.tokens(tokens) + self.positions(places) + sentence))  # type: ignore[no-any-return]


class BertLayer(nn.Module):
    """Attention to all tokens and feed-forward, each with dropout, a residual and then a norm."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(
            hidden, heads, heads, rotary=False, bias=True, dropout=dropout, fused=False, causal=False
        )
        self.mlp = FeedForward(hidden, 4 * hidden, gated=False, bias=True, fused=False)
        self.attention_norm = nn.LayerNorm(hidden, eps=BERT_EPSILON)
        self.mlp_norm = nn.LayerNorm(hidden, eps=BERT_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))  # type: ignore[no-any-return]


def mamba_1_4b(
    *,
    hidden: int = 2048,
    layers: int = 48,
    states: int = 16,
    kernel: int = 4,
    vocabulary: int = 50280,
    sequence_length: int = 2048,
) -> list[nn.Module]:
    """Mamba-1.4B (Gu and Dao 2023, section 3.4): (B, S) -> (B, S, vocabulary). The head has the embedding's weight.

    The scan is in plain torch, and runs again in the backward: a profile is of that, and not of the paper's kernel.
    """
    counts = {"hidden": hidden, "layers": layers, "states": states, "kernel": kernel, "vocabulary": vocabulary}
    require_sizes(counts | {"sequence_length": sequence_length})
    embedding = MambaEmbedding(vocabulary, hidden, sequence_length)
    output = nn.Linear(hidden, vocabulary, bias=False)
    output.weight = embedding.tokens.weight
    body = [MambaLayer(hidden, states=states, kernel=kernel) for _ in range(layers)]
    return [embedding, *body, nn.Sequential(nn.RMSNorm(hidden, eps=1e-5), output)]


class MambaEmbedding(nn.Module):
    """Embeds tokens."""

    def __init__(self, vocabulary: int, hidden: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.takes = TokenInputs(vocab_size=vocabulary, positions=length)
        nn.init.normal_(self.tokens.weight, std=EMBEDDING_DEVIATION)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) -> (B, S, H)."""
        return self.tokens(tokens)  # type: ignore[no-any-return]


class MambaLayer(nn.Module):
    """A norm and a selective state space, with a residual (algorithm 2 and figure 3)."""

    def __init__(self, hidden: int, *, states: int, kernel: int) -> None:
        super().__init__()
        inner, self.rank, self.states = 2 * hidden, -(-hidden // 16), states
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.into = nn.Linear(hidden, 2 * inner, bias=False)
        self.convolution = nn.Conv1d(inner, inner, kernel, padding=kernel - 1, groups=inner)
        self.selection = nn.Linear(inner, self.rank + 2 * states, bias=False)
        self.step = nn.Linear(self.rank, inner)
        decays = torch.arange(1, states + 1, dtype=torch.float32)
        self.decay_log = nn.Parameter(decays.log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        u, gate = self.into(self.norm(x)).chunk(2, dim=-1)  # (B, S, D) each
        u = functional.silu(self.convolution(u.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        low, write, read = self.selection(u).split((self.rank, self.states, self.states), dim=-1)  # (B, S, N) the last
        step = functional.softplus(self.step(low))
        scanned: Tensor = checkpoint(_selected, u, step, write, read, self.decay_log, use_reentrant=False)
        return x + self.out((scanned + self.skip * u) * functional.silu(gate))  # type: ignore[no-any-return]


def _selected(u: Tensor, step: Tensor, write: Tensor, read: Tensor, decay_log: Tensor) -> Tensor:
    """(B, S, D). Run again in the backward, as in section 3.3.2: the states are N times as large as the output.

    The decays are an argument, because a stage may hold another version of its weights by then.
    """
    decay = (step.unsqueeze(-1) * -decay_log.exp()).exp()  # (B, S, D, N)
    states = scan(decay, (step * u).unsqueeze(-1) * write.unsqueeze(2))
    return (states * read.unsqueeze(2)).sum(-1)


def scan(decay: Tensor, added: Tensor) -> Tensor:
    """The states h_t = decay_t h_(t-1) + added_t for all t of dimension 1, with h_(-1) = 0."""
    states: Tensor = _Scan.apply(decay, added)  # type: ignore[no-untyped-call]
    return states


class _Scan(torch.autograd.Function):
    """The scan, whose backward is the scan from the other end: g_t = gradient_t + decay_(t+1) g_(t+1)."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, added: Tensor) -> Tensor:
        states = _states(decay, added)
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        decay, states = ctx.saved_tensors
        of_added = _states(_later(decay.flip(1), 1), gradient.flip(1)).flip(1)
        return of_added * _later(states, 1), of_added


def _states(decay: Tensor, added: Tensor) -> Tensor:
    """In log2(S) steps, each of which lets every state reach twice as far back (Hillis and Steele 1986)."""
    reach = 1
    while reach < added.shape[1]:
        added = added + decay * _later(added, reach)
        decay = decay * _later(decay, reach)
        reach *= 2
    return added


def _later(values: Tensor, steps: int) -> Tensor:
    """The values shifted along dimension 1, with zeros before them."""
    return functional.pad(values[:, :-steps], (0,) * (2 * (values.dim() - 2)) + (steps, 0))
