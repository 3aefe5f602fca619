"""Attention with torch's own backward, whose saved tensors the caller keeps.

[Note: whose memory] Torch has half a dozen kernels for attention and chooses among them by device, dtype, shape and
mask. Each saves other tensors, and their backwards are private. So the attention is recorded in a small autograd graph
of its own. Saved-tensor hooks take every tensor that this graph would save and pass it to the caller, who passes the
tensors back for backward. The caller can share them with other kept tensors, such as the outputs of the products
around the attention, so nothing is kept twice. The graph itself holds no memory: its inputs are outputs of a node that
saves no tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from leangrad.ops.attention import attend

__all__ = ["Recorded", "record_attention"]


class Recorded:
    """An attention that ran forward, and runs backward if it gets its saved tensors; see [Note: whose memory]."""

    __slots__ = ("_kept", "_output", "_sources")

    def __init__(self, output: GradientEdge, sources: list[GradientEdge], kept: list[Tensor | None]):
        self._output, self._sources, self._kept = output, sources, kept

    def backward(self, g: Tensor, kept: Sequence[Tensor], *, again: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and v.

        g: gradient of the output. kept: the tensors that `record_attention` returned. again: another backward may
        follow.
        """
        self._kept[:] = kept
        try:
            dq, dk, dv = torch.autograd.grad([self._output], self._sources, [g], retain_graph=again)
        finally:
            self._kept.clear()
        return dq, dk, dv


def record_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> tuple[Tensor, Recorded, list[Tensor]]:
    """Run `attend`; returns its output, the record, and the saved tensors, which `Recorded.backward` needs.

    >>> q = torch.ones(1, 1, 3, 2)
    >>> out, recorded, kept = record_attention(q, q, q, None, False, 0.0)
    >>> [gradient.shape for gradient in recorded.backward(torch.ones_like(out), kept)] == [q.shape] * 3
    True
    """
    # The hooks of the graph refer to this list, and nothing in the list refers to the graph: no cycle.
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
    """Does as `get_gradient_edge` at a fifth of its cost: it needs no token, as the output's node keeps the sources."""
    assert tensor.grad_fn is not None
    return GradientEdge(tensor.grad_fn, tensor.output_nr)


class _Sources(torch.autograd.Function):
    """Returns tensors that require grad, and whose node holds none of them, unlike the AccumulateGrad of a leaf."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise AssertionError("gradients are taken at the outputs of this node, not through it")
