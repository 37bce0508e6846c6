"""Blocks: language models of plain torch modules, in the shapes of GPT-2 and Llama, for machines without transformers.

B sequences of S tokens: token numbers (B, S) in, logits (B, S, vocabulary) out. Named by SPECs.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

DROPOUT = 0.1


def gpt2(
    *, n_layer: int = 24, n_embd: int = 1024, n_head: int = 16, vocab_size: int = 50257, n_positions: int = 1024
) -> list[nn.Module]:
    """Embedding, layers and head; the defaults are GPT-2 medium's."""
    layers = [Gpt2Layer(n_embd, n_head) for _ in range(n_layer)]
    head = nn.Sequential(nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False))
    return [Embedding(vocab_size, n_positions, n_embd), *layers, head]


def llama(
    *,
    num_hidden_layers: int = 22,
    hidden_size: int = 2048,
    num_attention_heads: int = 32,
    num_key_value_heads: int = 4,
    intermediate_size: int = 5632,
    vocab_size: int = 32000,
) -> list[nn.Module]:
    """Embedding, layers and head; the defaults are those of a Llama of 1.1 billion parameters."""
    layers = [
        LlamaLayer(hidden_size, num_attention_heads, num_key_value_heads, intermediate_size)
        for _ in range(num_hidden_layers)
    ]
    head = nn.Sequential(nn.RMSNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False))
    return [nn.Embedding(vocab_size, hidden_size), *layers, head]


class Embedding(nn.Module):
    """Of tokens and of positions, with dropout."""

    def __init__(self, vocab_size: int, positions: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(positions, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) -> (B, S, width)."""
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return functional.dropout(self.tokens(tokens) + positions, DROPOUT, self.training)


class Gpt2Layer(nn.Module):
    """Attention and four times as wide a perceptron, each after a norm and with a dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, S, width) -> (B, S, width)."""
        query, key, value = (_by_head(t, self.heads) for t in self.qkv(self.norms[0](hidden)).chunk(3, dim=-1))
        dropout = DROPOUT if self.training else 0.0
        seen = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        hidden = hidden + functional.dropout(self.out(_together(seen)), DROPOUT, self.training)
        wide = functional.gelu(self.up(self.norms[1](hidden)), approximate="tanh")
        return hidden + functional.dropout(self.down(wide), DROPOUT, self.training)


class LlamaLayer(nn.Module):
    """Attention with rotary positions and fewer keys than queries, and a gated perceptron, each after a norm."""

    def __init__(self, width: int, heads: int, key_heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        key_width = width // heads * key_heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_width, bias=False)
        self.value = nn.Linear(width, key_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, intermediate, bias=False)
        self.up = nn.Linear(width, intermediate, bias=False)
        self.down = nn.Linear(intermediate, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, S, width) -> (B, S, width)."""
        normed = self.norms[0](hidden)
        query = _rotated(_by_head(self.query(normed), self.heads))
        repeats = self.heads // self.key_heads
        key = _rotated(_by_head(self.key(normed), self.key_heads)).repeat_interleave(repeats, dim=1)
        value = _by_head(self.value(normed), self.key_heads).repeat_interleave(repeats, dim=1)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(_together(seen))
        normed = self.norms[1](hidden)
        down: Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return hidden + down


def _by_head(hidden: Tensor, heads: int) -> Tensor:
    """(B, S, heads x D) -> (B, heads, S, D)."""
    batch, length, width = hidden.shape
    return hidden.view(batch, length, heads, width // heads).transpose(1, 2)


def _together(hidden: Tensor) -> Tensor:
    """(B, heads, S, D) -> (B, S, heads x D)."""
    return hidden.transpose(1, 2).flatten(2)


def _rotated(hidden: Tensor) -> Tensor:
    """Pairs of entries turned by an angle that grows with the position (Su et al. 2021, RoFormer, section 3.2)."""
    length, width = hidden.shape[-2:]
    half = torch.arange(width // 2, device=hidden.device, dtype=torch.float32)
    angles = torch.arange(length, device=hidden.device)[:, None] * 10_000.0 ** (-2 * half / width)
    cosine, sine = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
    left, right = hidden.chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)
