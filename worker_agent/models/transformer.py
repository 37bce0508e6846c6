"""Transformer: decoders by their sizes, as GPT, MPT and Llama have them, independent of Hugging Face.

Layers are those of Megatron-LM (Narayanan et al. 2021; Korthikanti et al. 2022, figure 2): queries, keys and values of
one product, grouped by key; attention; a projection; two products with an activation; norms before each half. With
`fused` the activation takes the bias, and the residual the bias and dropout, in one kernel each.

B sequences of S tokens, H hidden features.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.errors import require, require_amount, require_count
from worker_agent.models.batches import TokenInputs
from worker_agent.models.fused import bias_dropout_add, bias_gelu, swiglu
from worker_agent.models.sharding import BareLinear, Sharding

POSITIONS = ("learned", "rotary", "none")
NORMS = ("layer", "rms")
ACTIVATIONS = ("gelu", "swiglu")

ROTARY_BASE = 10000.0
EMBEDDING_DEVIATION = 0.02


def transformer(
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    ffn: int | None = None,
    vocabulary: int = 256,
    sequence_length: int = 128,
    positions: str = "learned",
    norm: str = "layer",
    activation: str = "gelu",
    bias: bool = True,
    dropout: float = 0.0,
    tied: bool = False,
    fused: bool = False,
) -> list[nn.Module]:
    """An embedding, `layers` layers and a head: (B, S) token numbers -> (B, S, vocabulary).

    `kv_heads` are as many as `heads` by default, `ffn` 4 times `hidden`. `sequence_length` is that of the longest
    sequence. `tied`: the head's weight is the embedding's. Raises InvalidInputError for sizes that do not fit.
    """
    counts = {"hidden": hidden, "layers": layers, "heads": heads, "vocabulary": vocabulary}
    kv_heads, ffn = kv_heads or heads, ffn or 4 * hidden
    counts |= {"sequence_length": sequence_length, "kv_heads": kv_heads, "ffn": ffn}
    for name, count in counts.items():
        require_count(f"model.{name}", count)
    require(hidden % heads == 0, "model.heads", f"must divide the {hidden} hidden features", heads)
    require(heads % kv_heads == 0, "model.kv_heads", f"must divide the {heads} heads", kv_heads)
    known = {"positions": (positions, POSITIONS), "norm": (norm, NORMS), "activation": (activation, ACTIVATIONS)}
    for name, (value, values) in known.items():
        require(value in values, f"model.{name}", f"must be one of {', '.join(values)}", value)
    even = positions != "rotary" or hidden // heads % 2 == 0
    require(even, "model.heads", "must leave an even number of features each for rotary positions", heads)
    require_amount("model.dropout", dropout)
    require(dropout < 1, "model.dropout", "must be below 1", dropout)

    def make_norm() -> nn.Module:
        return nn.LayerNorm(hidden, bias=bias) if norm == "layer" else nn.RMSNorm(hidden, eps=1e-5)

    plan = Sharding(
        styles={
            "attention.qkv": "colwise",
            "attention.projection": "rowwise",
            "mlp.up": "packed 2" if activation == "swiglu" else "colwise",
            "mlp.down": "rowwise",
        },
        divided={"heads": heads, "kv_heads": kv_heads, "ffn": ffn},
    )
    embedding = TransformerEmbedding(
        vocabulary=vocabulary, hidden=hidden, length=sequence_length, learned=positions == "learned", dropout=dropout
    )
    head = TransformerHead(make_norm(), nn.Linear(hidden, vocabulary, bias=False))
    if tied:
        head.output.weight = embedding.tokens.weight
    body = []
    for _ in range(layers):
        attention = Attention(
            hidden, heads, kv_heads, rotary=positions == "rotary", bias=bias, dropout=dropout, fused=fused
        )
        mlp = FeedForward(hidden, ffn, gated=activation == "swiglu", bias=bias, fused=fused)
        norms = make_norm(), make_norm()
        body.append(TransformerLayer(norms, attention, mlp, dropout=dropout, fused=fused, sharding=plan))
    return [embedding, *body, head]


class TransformerEmbedding(nn.Module):
    """Embeddings of tokens and, where they are learned, of positions, with dropout."""

    def __init__(self, *, vocabulary: int, hidden: int, length: int, learned: bool, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(length, hidden) if learned else None
        self.dropout = nn.Dropout(dropout)
        self.takes = TokenInputs(vocab_size=vocabulary, positions=length)
        self.sharding = Sharding(styles={"tokens": "vocabulary", "positions": "positions"}, divided={})
        for embedding in (self.tokens, self.positions):
            if embedding is not None:
                nn.init.normal_(embedding.weight, std=EMBEDDING_DEVIATION)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) -> (B, S, H)."""
        hidden = self.tokens(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0))
        return self.dropout(hidden)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention, causal if not said otherwise. Where it is fused, the projection's bias is for the caller to add."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        *,
        rotary: bool,
        bias: bool,
        dropout: float,
        fused: bool,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.width = hidden // heads
        self.queries = heads // kv_heads
        self.rotary = rotary
        self.dropout = dropout
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.width, bias=bias)
        self.projection = (BareLinear if fused else nn.Linear)(hidden, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        grouped = self.qkv(x).unflatten(-1, (-1, self.queries + 2, self.width))
        query, key, value = grouped.split((self.queries, 1, 1), dim=-2)
        query, key, value = (each.flatten(2, 3).transpose(1, 2) for each in (query, key, value))
        if self.rotary:
            query, key = rotated(query, key)
        attended = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
            enable_gqa=self.queries > 1,
        )
        return self.projection(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def rotated(*values: Tensor) -> list[Tensor]:
    """Queries and keys (..., S, D), turned by their positions (Su et al. 2021, "RoFormer", section 3.4.2)."""
    length, width = values[0].shape[-2:]
    options: dict[str, Any] = {"device": values[0].device, "dtype": torch.float32}
    frequencies = ROTARY_BASE ** -(torch.arange(0, width, 2, **options) / width)
    angles = torch.outer(torch.arange(length, **options), frequencies).repeat(1, 2)
    cosines, sines = angles.cos().to(values[0].dtype), angles.sin().to(values[0].dtype)
    halves = (value.chunk(2, dim=-1) for value in values)
    turned = (torch.cat((-second, first), dim=-1) for first, second in halves)
    return [value * cosines + other * sines for value, other in zip(values, turned, strict=True)]


class FeedForward(nn.Module):
    """Two products with an activation between them. Where it is fused, the last bias is for the caller to add."""

    def __init__(self, hidden: int, ffn: int, *, gated: bool, bias: bool, fused: bool) -> None:
        super().__init__()
        self.gated = gated
        self.fused = fused
        takes_bias = fused and bias and not gated  # the activation's kernel adds it
        self.up = (BareLinear if takes_bias else nn.Linear)(hidden, (1 + gated) * ffn, bias=bias)
        self.down = (BareLinear if fused else nn.Linear)(ffn, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        x = self.up(x)
        if self.gated and self.fused:
            x = swiglu(x)
        elif self.gated:
            gate, up = x.chunk(2, dim=-1)
            x = functional.silu(gate) * up
        elif self.fused and self.up.bias is not None:
            x = bias_gelu(x, self.up.bias)
        else:
            x = functional.gelu(x)
        return self.down(x)  # type: ignore[no-any-return]


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each after a norm and with dropout and a residual."""

    def __init__(
        self,
        norms: tuple[nn.Module, nn.Module],
        attention: Attention,
        mlp: FeedForward,
        *,
        dropout: float,
        fused: bool,
        sharding: Sharding,
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention = attention
        self.mlp = mlp
        self.dropout = dropout
        self.fused = fused
        self.sharding = sharding

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        x = self._added(x, self.attention(self.attention_norm(x)), self.attention.projection)
        return self._added(x, self.mlp(self.mlp_norm(x)), self.mlp.down)

    def _added(self, residual: Tensor, x: Tensor, layer: Any) -> Tensor:
        """The residual plus dropout of a layer's output, to which the layer has added its bias, or leaves it."""
        p = self.dropout if self.training else 0.0
        if self.fused:
            return bias_dropout_add(x, layer.bias, residual, p)[0]  # type: ignore[no-any-return]
        return residual + functional.dropout(x, p)


class TransformerHead(nn.Module):
    """A norm, and the product that gives logits."""

    def __init__(self, norm: nn.Module, output: nn.Linear) -> None:
        super().__init__()
        self.norm = norm
        self.output = output
        self.sharding = Sharding(styles={"output": "vocabulary"}, divided={})

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, vocabulary)."""
        return self.output(self.norm(x))  # type: ignore[no-any-return]
