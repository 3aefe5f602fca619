"""Attention by torch's own kernels, with everything that it keeps for backward in the caller's hands; rotary positions.

    out = softmax(q kᵀ/√d + mask) v         q (B, H, T, d), k and v (B, K, S, d) with K dividing H, out (B, H, T, d)

[Note: whose memory] Torch has half a dozen kernels for attention and chooses among them by device, dtype, shape and
mask; each keeps other tensors, and their backwards are private. So the attention is recorded on a small autograd graph
of its own, and hooks take every tensor that it would keep out of that graph and hand it to the caller, who gives
them back for backward. Whoever holds them may share them, as the outputs of the products around it are, and nothing
is kept twice. The graph itself holds no memory: its sources are nodes without a tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

__all__ = ["Recorded", "attend", "record_attention", "rotary_tables", "rotate", "rotate_"]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float) -> Tensor:
    """Softmax attention. Equals `F.scaled_dot_product_attention`, with grouped queries where k has fewer heads.

    >>> attend(torch.ones(1, 4, 3, 2), torch.ones(1, 2, 3, 2), torch.ones(1, 2, 3, 2), None, True, 0.0).shape
    torch.Size([1, 4, 3, 2])
    """
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
    )


class Recorded:
    """An attention that ran forward and can run backward, given what it wanted to keep; see [Note: whose memory]."""

    __slots__ = ("_kept", "_output", "_sources")

    def __init__(self, output: GradientEdge, sources: list[GradientEdge], kept: list[Tensor | None]):
        self._output, self._sources, self._kept = output, sources, kept

    def backward(self, g: Tensor, kept: Sequence[Tensor], *, again: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v; `again` says that another backward may follow."""
        self._kept[:] = kept
        try:
            dq, dk, dv = torch.autograd.grad([self._output], self._sources, [g], retain_graph=again)
        finally:
            self._kept.clear()
        return dq, dk, dv


def record_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> tuple[Tensor, Recorded, list[Tensor]]:
    """`attend`, the record of it, and the tensors that `Recorded.backward` has to be given again.

    >>> q = torch.ones(1, 1, 3, 2)
    >>> out, recorded, kept = record_attention(q, q, q, None, False, 0.0)
    >>> [gradient.shape for gradient in recorded.backward(torch.ones_like(out), kept)] == [q.shape] * 3
    True
    """
    # The graph reaches this list through its hooks, and nothing in the list reaches the graph: no cycle.
    kept: list[Tensor | None] = []

    def take(tensor: Tensor) -> int:
        kept.append(tensor.detach())
        return len(kept) - 1

    def give_back(place: int) -> Tensor:
        tensor = kept[place]
        assert tensor is not None
        return tensor

    with torch.enable_grad():
        sources = _Sources.apply(torch.empty(0, device="cpu", requires_grad=True), q, k, v)
        q, k, v = sources
        with saved_tensors_hooks(take, give_back):
            out = attend(q, k, v, mask, causal, dropout)
        recorded = Recorded(_edge(out), [_edge(q), _edge(k), _edge(v)], kept)
    taken = [t for t in kept if t is not None]
    kept.clear()
    return out.detach(), recorded, taken


def _edge(tensor: Tensor) -> GradientEdge:
    """`get_gradient_edge`, at a fifth of its cost: the output's node keeps the sources alive, so no token has to."""
    assert tensor.grad_fn is not None
    return GradientEdge(tensor.grad_fn, tensor.output_nr)


class _Sources(torch.autograd.Function):
    """Tensors that require a gradient and whose node holds none of them, as a leaf's would."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise AssertionError("gradients are taken at the outputs of this node, not through it")


# Rotary positions: each pair (a, b) of (x[..., i], x[..., i + d/2]) is turned by the angle t θ^(-2i/d) at position t:
#
#     a' = a cos − b sin        b' = b cos + a sin
#
# The gradient is turned back: the same with −sin.


def rotary_tables(length: int, width: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines for `length` positions and heads of `width`, each (length, 1, width/2), in float32 first.

    >>> rotary_tables(4, 8, 10_000.0, torch.empty(0))[0].shape
    torch.Size([4, 1, 4])
    """
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    positions = torch.arange(length, device=like.device, dtype=wide)
    powers = torch.arange(0, width, 2, device=like.device, dtype=wide) / -width
    angles = torch.outer(positions, theta**powers).unsqueeze(1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x of (B, T, heads, d), turned.

    >>> rotate(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1), torch.ones(1, 1, 1)).flatten()
    tensor([-1.,  1.])
    """
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in place, with the same bits; on a CPU one sequence at a time, so that little else is allocated."""
    for row in x.split(1) if x.device.type == "cpu" else (x,):
        a, b = row.chunk(2, -1)
        from_a, from_b = a * sin, b * sin
        a.mul_(cos).sub_(from_b)
        b.mul_(cos).add_(from_a)
    return x
