"""A net with the RMSNorm and SwiGLU blocks of Llama, rotary positions and grouped queries, on chained tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.demo.case import Case, chained_tokens

__all__ = ["swiglu"]


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) * weight`, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    """Causal attention: `heads` query heads share `groups` heads of keys and values; positions are rotations."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        narrow = width // heads * groups
        self.q, self.k, self.v = (nn.Linear(width, out, bias=False) for out in (width, narrow, narrow))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x (B, T, width) to the same shape; cos and sin of the angles are (T, width / heads)."""
        q, k, v = (
            part(x).unflatten(-1, (count, -1)).transpose(1, 2)
            for part, count in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (part.repeat_interleave(self.heads // self.groups, dim=1) for part in (k, v))
        mixed: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return mixed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of channels of x (B, heads, T, channels) by its angle."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Block(nn.Module):
    """Attention and a SwiGLU layer, each after an RMSNorm."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads, groups)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (B, T, width) to the same shape."""
        x = x + self.attention(self.norm1(x), cos, sin)
        h = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class SwiGLUNet(nn.Module):
    """Token embeddings, blocks, a last RMSNorm and a linear head."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, layers: int, *, width: int, heads: int, groups: int, hidden: int, length: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        pairs = width // heads // 2
        angles = torch.outer(torch.arange(length), 10_000.0 ** (-torch.arange(pairs) / pairs)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (B, T) to logits (B, T, vocabulary)."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def swiglu(
    batch: int = 8,
    length: int = 128,
    *,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    groups: int = 2,
    hidden: int = 384,
    vocabulary: int = 64,
) -> Case:
    """Return the case of this model, on chained tokens (batch, length)."""
    return Case(
        "RMSNorm + SwiGLU",
        lambda: SwiGLUNet(
            layers, width=width, heads=heads, groups=groups, hidden=hidden, length=length, vocabulary=vocabulary
        ),
        lambda generator: chained_tokens(batch, length, vocabulary, generator),
    )
