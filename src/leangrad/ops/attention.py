"""Attention by torch's own kernels, and rotary positions.

out = softmax(q kᵀ/√d + mask) v         q (B, H, T, d), k and v (B, K, S, d) with K dividing H, out (B, H, T, d)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attend", "rotary_tables", "rotate", "rotate_"]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float) -> Tensor:
    """Softmax attention. Equals `F.scaled_dot_product_attention`, with grouped queries where k has fewer heads.

    >>> attend(torch.ones(1, 4, 3, 2), torch.ones(1, 2, 3, 2), torch.ones(1, 2, 3, 2), None, True, 0.0).shape
    torch.Size([1, 4, 3, 2])
    """
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
    )


# Rotary positions: each pair (a, b) of (x[..., i], x[..., i + d/2]) is turned by the angle t θ^(-2i/d) at position t:
#
#     a' = a cos − b sin        b' = b cos + a sin
#
# The gradient is turned back: by the same formula with −sin.


def rotary_tables(length: int, width: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines for `length` positions and heads of `width`, each (length, 1, width/2).

    They are computed in float32, or float64 if `like` is, and returned in the dtype of `like`.

    >>> rotary_tables(4, 8, 10_000.0, torch.empty(0))[0].shape
    torch.Size([4, 1, 4])
    """
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    positions = torch.arange(length, device=like.device, dtype=wide)
    powers = torch.arange(0, width, 2, device=like.device, dtype=wide) / -width
    angles = torch.outer(positions, theta**powers).unsqueeze(1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x of (B, T, heads, d), turned by its positions' angles.

    >>> rotate(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1), torch.ones(1, 1, 1)).flatten()
    tensor([-1.,  1.])
    """
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` in place, with the same bits; on a CPU one sequence at a time, so that little else is allocated."""
    for row in x.split(1) if x.device.type == "cpu" else (x,):
        a, b = row.chunk(2, -1)
        from_a, from_b = a * sin, b * sin
        a.mul_(cos).sub_(from_b)
        b.mul_(cos).add_(from_a)
    return x
