"""A linear map by heads that computes gates, and a product with an activated gate that is not kept for backward."""

from typing import Any

import torch
from torch import Tensor, nn

from leangrad.functional import runs_plain
from leangrad.ledger.origins.functions import Replay, register_rule
from leangrad.ops.activation import Activation, resolve
from leangrad.overridable import overridable

__all__ = ["HeadLinear", "gated"]


def gated(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Multiply x by an activated gate.

    Equals `x * F.silu(gate)`, `x * F.gelu(gate)`, ... Both tensors have one shape. Keeps x and the gate for backward;
    plain PyTorch keeps the activated gate as well. The activation must be one whose backward reads its input.

    >>> gated(torch.tensor([2.0]), torch.tensor([30.0]), "silu")
    tensor([60.])
    """
    record = resolve(activation)
    if runs_plain(x, gate) or not (torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad)):
        return _multiply(x, gate, record)
    y: Tensor = _apply_gated(x, gate, record)
    return y


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, record: Activation) -> Tensor:
        ctx.save_for_backward(x, gate)
        ctx.record = record
        return _multiply(x, gate, record)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, gate = ctx.saved_tensors
        record: Activation = ctx.record
        dx = dgate = None
        if ctx.needs_input_grad[0]:
            dx = (g * record.forward(gate, record.parameter, None)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dgate = record.backward((g * x).to(gate.dtype), gate, record.parameter, None)
        return dx, dgate, None


_apply_gated = overridable(_Gated.apply)


def _multiply(x: Tensor, gate: Tensor, record: Activation) -> Tensor:
    return x * record.forward(gate, record.parameter, None)


def _replay(walk: Any, node: Any) -> Replay:
    return _multiply, (walk.operand(node, 0, place=0), walk.operand(node, 1, place=1), node.record)


register_rule(_Gated, _replay)


class HeadLinear(nn.Module):
    """A linear map with one matrix per head, applied to that head's part of the input, and a bias.

    Equals `F.linear(x, torch.block_diag(*weight), bias)`. Keeps its input for backward.

    >>> HeadLinear(2, 6)(torch.ones(4, 6)).shape
    torch.Size([4, 6])
    """

    def __init__(self, heads: int, width: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads: expected a divisor of the width {width}, got {heads}")
        size = width // heads
        self.weight = nn.Parameter(torch.empty(heads, size, size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as an `nn.Linear` of the size of one head."""
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (..., width) for x of (..., width)."""
        parts = x.unflatten(-1, (self.weight.shape[0], -1))
        return torch.einsum("...hi,hoi->...ho", parts, self.weight).flatten(-2) + self.bias
