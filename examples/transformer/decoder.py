"""A small decoder as blocks: token numbers in, logits out."""

import torch
from torch import Tensor, nn


class Embedding(nn.Module):
    """Tokens (B, T) -> (B, T, width), with their positions."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """The sum of what token and place stand for."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.tokens(tokens) + self.positions(places)
        return embedded


class Layer(nn.Module):
    """One layer that sees earlier places alone: (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and the two matrices after it."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        result: Tensor = self.layer(x, src_mask=mask, is_causal=True)
        return result


def blocks(
    *, vocabulary: int = 64, length: int = 16, width: int = 32, heads: int = 2, layers: int = 4
) -> list[nn.Module]:
    """The blocks in order. A plan cuts between them, and options of the SPEC arrive as these arguments."""
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
    return [Embedding(vocabulary, length, width), *(Layer(width, heads) for _ in range(layers)), head]
