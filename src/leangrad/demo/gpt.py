"""A GPT with the blocks of GPT-2, with dropout and the tanh form of GELU written out, on chained tokens."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.demo.case import Case, chained_tokens

__all__ = ["gpt"]


def tanh_gelu(x: Tensor) -> Tensor:
    """Return GELU of ``x`` in its tanh form, written out as in many model files: plain autograd keeps several maps."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each after a LayerNorm and before a dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to the same shape."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.dropout(self.out(tanh_gelu(self.fc(self.norm2(x)))))
        return out


class GPT(nn.Module):
    """Token and position embeddings, blocks, a last LayerNorm and a linear head."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("places", torch.arange(length), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (B, T) to logits (B, T, vocabulary)."""
        x = self.dropout(self.tokens(tokens) + self.positions(self.places))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def gpt(
    batch: int = 8, length: int = 128, *, layers: int = 4, width: int = 128, heads: int = 4, vocabulary: int = 64
) -> Case:
    """Return the case of this model, on chained tokens (batch, length)."""
    return Case(
        "GPT with dropout",
        lambda: GPT(layers, width, heads, length, vocabulary, dropout=0.1),
        lambda generator: chained_tokens(batch, length, vocabulary, generator),
    )
