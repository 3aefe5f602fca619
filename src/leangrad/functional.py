"""Autograd Functions over `ops/`. Each overwrites its incoming gradient if nothing else can see it, and else copies.

The saved tensors are never overwritten, so `retain_graph=True` works as usual; with `create_graph=True` the same
formulas run on autograd's own ops and can be differentiated again.
"""

from typing import Any

import torch
from torch import Tensor

from leangrad._torch import autocast_enabled, has_memory, is_watched
from leangrad.engine.ownership import owned
from leangrad.ledger.origins.functions import Replay, register_rule
from leangrad.ops.activation import Activation, resolve
from leangrad.overridable import overridable

__all__ = ["LOW_OR_SINGLE", "activate", "are_ordinary", "autocast_enabled", "runs_plain"]


def activate(x: Tensor, activation: str | Activation, parameter: float | None = None) -> Tensor:
    """Apply an activation whose backward writes into the gradient it owns.

    Equals `F.relu(x)`, `F.gelu(x)`, `torch.softmax(x, -1)`, ... bit for bit, and for the gated ones, on x of (..., 2N),
    `a, b = x.chunk(2, -1); F.silu(a) * b` (swiglu) and `F.gelu(a) * b` (geglu). Every name is in
    `leangrad.ops.activation.ACTIVATIONS`; `parameter` is the slope, alpha or beta of those that have one.

    Keeps one map for backward: the output (relu, leaky_relu, sigmoid, tanh, softmax) or the input (all others). Plain
    swiglu and geglu keep three times the bytes of the output, this keeps twice.

    >>> x = torch.tensor([-1.0, 2.0], requires_grad=True)
    >>> activate(x, "leaky_relu", 0.5).square().sum().backward()
    >>> x.grad
    tensor([-0.5000,  4.0000])
    """
    record = resolve(activation, parameter)
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"x: expected a floating dtype, got {x.dtype}; convert it with x.float()")
    if record.gated and (x.dim() == 0 or x.shape[-1] % 2):
        raise ValueError(f"x: {record.name} needs an even last dimension (gate and value), got {tuple(x.shape)}")
    plain = runs_plain(x) or (record.float32_in_autocast and autocast_enabled(x.device.type))
    if plain or not (torch.is_grad_enabled() and x.requires_grad):
        return record.forward(x, record.parameter, None)
    y: Tensor = _apply_activate(x, record)
    return y


def runs_plain(*tensors: Tensor | None) -> bool:
    """Whether torch's own ops must run: for a compiler, tracer or transform, a subclass, or `LEANGRAD_DISABLE`."""
    return is_watched() or not are_ordinary(*tensors)


_ORDINARY = frozenset((Tensor, torch.nn.Parameter, type(None)))


def are_ordinary(*tensors: Tensor | None) -> bool:
    """Whether each of these is None, a Tensor or a Parameter, and not a subclass, which may override ops."""
    return _ORDINARY.issuperset(map(type, tensors))


LOW_OR_SINGLE = frozenset((torch.float32, torch.bfloat16, torch.float16))  # dtypes that autocast casts; float64 stays


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, record: Activation) -> Tensor:
        y = record.forward(x, record.parameter, None)
        ctx.record = record
        ctx.save_for_backward(x if record.keeps == "input" else y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        into = g if owned(g) else None
        record: Activation = ctx.record
        (kept,) = ctx.saved_tensors
        if record.gated and not torch.is_grad_enabled() and has_memory(g):  # not for a batch of gradients
            into = torch.empty_like(kept)
        return record.backward(g, kept, record.parameter, into), None


_apply_activate = overridable(_Activate.apply)


def _replay(walk: Any, node: Any) -> Replay:
    record: Activation = node.record
    return record.forward, (walk.operand(node, 0, place=0 if record.keeps == "input" else None), record.parameter, None)


register_rule(_Activate, _replay)
