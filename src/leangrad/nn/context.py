"""`AttentionContext`: correlations of a mixer's input and output channels, averaged over steps and added to the input.

The context C is a constant to autograd. Each update changes it in place, usually between a forward that applied it and
the backward of that forward. So the autograd node that applies it keeps a copy.
"""

from contextlib import nullcontext
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn

from leangrad._torch import graph_task, has_memory
from leangrad.engine.ownership import owned
from leangrad.errors import ChangedError
from leangrad.functional import autocast_enabled, runs_plain
from leangrad.ops import context as ops
from leangrad.overridable import overridable

__all__ = ["AttentionContext", "apply_context", "update_context"]


def apply_context(x: Tensor, context: Tensor | None, strength: Tensor) -> Tensor:
    """Apply a context: X' = X + (s/D)·XC. Equals `x + strength / D * (x @ context)`.

    x: (..., D); context: (D, D), a constant; strength: one element. With no context, or one that is not (D, D), the
    result is x itself. Under autocast the product is in autocast's dtype, the result in that of x.

    Keeps for backward x, if the strength needs a gradient, and a copy of the context in the product's dtype: D·D
    elements. Plain PyTorch keeps x, x @ context and the context itself, which must then not change. The gradient of the
    strength is summed in float64.

    >>> x = torch.ones(2, 4, requires_grad=True)
    >>> strength = torch.zeros(1, requires_grad=True)
    >>> apply_context(x, torch.ones(4, 4), strength).sum().backward()
    >>> strength.grad, apply_context(x, None, strength) is x
    (tensor([8.]), True)
    """
    if context is None or x.dim() == 0 or context.shape != (x.shape[-1], x.shape[-1]):
        return x
    _check(x, context, strength)
    if runs_plain(x, context, strength):
        constant = context.detach().to(x.dtype, copy=True)
        return x + (strength.reshape(()) / x.shape[-1] * (x @ constant)).to(x.dtype)
    kind = x.device.type
    autocast = autocast_enabled(kind) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if autocast else x.dtype
    with torch.autocast(kind, enabled=False) if autocast else nullcontext():
        if torch.is_grad_enabled() and (x.requires_grad or strength.requires_grad):
            y: Tensor = _apply(x, strength, context, dtype)
            return y
        with torch.no_grad():  # torch refuses `out=` if an argument requires grad
            return _rows(ops.apply_context, x, context.detach(), strength, dtype=dtype)


def update_context(x: Tensor, y: Tensor, rate: float, context: Tensor | None = None) -> Tensor:
    """Move a context by `rate` towards tanh of the correlations of x and y; see `leangrad.ops.context`.

    x, y: (..., D), a block's input and its mixer's output. A context of (D, D) is updated in place and returned; for
    any other, or none, a new one is returned. Autograd does not record it, and nothing is kept for backward.

    >>> update_context(torch.randn(8, 4), torch.randn(8, 4), 0.01).shape
    torch.Size([4, 4])
    """
    if x.shape != y.shape or x.dim() == 0:
        raise ValueError(f"x and y: expected one shape (..., D), got {tuple(x.shape)} and {tuple(y.shape)}")
    if not x.is_floating_point() or not y.is_floating_point():
        raise TypeError(f"x and y: expected floating dtypes, got {x.dtype} and {y.dtype}")
    # A later training step could not change a context that was made in inference mode.
    inside = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    outside = torch.inference_mode(False) if inside else nullcontext()
    with outside, torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        return ops.update_context(x.detach(), y.detach(), rate, context)


class AttentionContext(nn.Module):
    """A context of width D and its learned strength s, which is 0 at first, so that the module then has no effect.

    In a block with a mixer `mix`: `x = context(x); y = mix(norm(x)); context.update(x, y)`. The attribute `.context`
    holds the context of the last update, and is None before the first one. It is a buffer, in float32 or float64
    whatever the dtype of the module, and is part of the state_dict unless it is None. It is not updated in eval mode.
    A chain of blocks may pass one context along: `incoming` is used, and overwritten, instead of the module's own.

    Keeps for backward: see `apply_context`. Inside `torch.utils.checkpoint` the forward would run again with a context
    that has changed since; that raises ChangedError.

    >>> module = AttentionContext(4)
    >>> x = torch.randn(2, 8, 4)
    >>> module(x) is x
    True
    >>> context = module.update(x, x.tanh())
    >>> module(x).shape, list(module.state_dict())
    (torch.Size([2, 8, 4]), ['strength', 'context'])
    """

    strength: nn.Parameter
    context: Tensor | None

    def __init__(self, width: int, rate: float = 0.01, *, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        if width < 1:
            raise ValueError(f"width: expected 1 or more, got {width}")
        if isnan(rate):
            raise ValueError("rate: expected a number, got nan")
        self.width, self.rate = width, min(max(float(rate), 0.0), 1.0)
        # Shape (1,) and not (): FSDP cannot shard a parameter without a dimension.
        self.strength = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        self.register_buffer("context", None)

    def forward(self, x: Tensor, incoming: Tensor | None = None) -> Tensor:
        """Returns X + (s/D)·XC for x of (..., D), with C `incoming` or else the module's own; without C, x itself."""
        context = self.context if incoming is None else incoming
        if context is not None and self.training and self.rate > 0 and _in_backward():
            raise ChangedError(
                "AttentionContext was run again inside a backward, as torch.utils.checkpoint does, but its context has "
                "changed since the first run; leave it out of the checkpointed region, or put it into eval mode"
            )
        return apply_context(x, context, self.strength)

    def update(self, x: Tensor, y: Tensor, incoming: Tensor | None = None) -> Tensor | None:
        """Update the incoming context, or else the module's own, from x and y, and return it.

        x, y: (..., D). A context of (D, D) is overwritten in place; otherwise a new one is allocated. In eval mode the
        context is returned unchanged.
        """
        context = self.context if incoming is None else incoming
        if x.shape[-1:] != (self.width,):
            raise ValueError(f"x: expected (..., {self.width}), got {tuple(x.shape)}")
        if self.training and not _in_backward():  # a checkpoint's second run must not update it again
            self.context = context = update_context(x, y, self.rate, context)
        return context

    def reset(self) -> None:
        """Set the context to None. The strength stays."""
        self.context = None

    def extra_repr(self) -> str:
        """Show the width and the rate."""
        return f"{self.width}, rate={self.rate}"

    def _apply(self, fn: Any, recurse: bool = True) -> "AttentionContext":
        context = self.context
        super()._apply(fn, recurse)
        if context is not None and self.context is not None and self.context.dtype.itemsize < 4:
            # In a low precision, adding rate · tanh would be rounded away.
            self.context = context.to(self.context.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a saved context even if there is none of its shape yet; set it to None if `state_dict` has none."""
        saved = state_dict.get(f"{prefix}context")
        if saved is not None and (self.context is None or self.context.shape != saved.shape):
            self.context = torch.empty_like(saved, device=self.strength.device)
        elif saved is None and f"{prefix}strength" in state_dict:
            self.context = None
        super()._load_from_state_dict(state_dict, prefix, *args)


def _in_backward() -> bool:
    return not torch.compiler.is_compiling() and graph_task() >= 0


class _ApplyContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: Tensor, context: Tensor, dtype: torch.dtype) -> Tensor:
        needs_strength = ctx.needs_input_grad[1]
        # x is the caller's own, not a copy; only the gradient of the strength needs it.
        ctx.save_for_backward(x if needs_strength else None, strength, context.to(dtype, copy=True))
        return _rows(ops.apply_context, x, context, strength, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        batched = not has_memory(g)
        ours = not batched and owned(g)
        x, strength, context = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[0]
        if torch.is_grad_enabled() or batched:
            return (*_plain_backward(g, x, context, strength, needs_x), None, None)
        flat = g.reshape(-1, g.shape[-1])
        into = flat if ours or flat.data_ptr() != g.data_ptr() else None  # g if owned, or its copy by `reshape`
        flat_x = None if x is None else x.reshape(-1, x.shape[-1])
        dx, ds = ops.apply_context_backward(flat, flat_x, context, strength, needs_input=needs_x, into=into)
        dx = None if dx is None else dx.view(g.shape)
        return dx, None if ds is None else ds.to(strength.dtype).reshape(strength.shape), None, None


_apply = overridable(_ApplyContext.apply, product=True)


def _plain_backward(
    g: Tensor, x: Tensor | None, context: Tensor, strength: Tensor, needs_x: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the backward on autograd's own ops, which can be differentiated again."""
    product = (g.to(context.dtype) @ context.t()).to(g.dtype)
    dx = g + (strength.reshape(()) / context.shape[0]).to(g.dtype) * product if needs_x else None
    if x is None:
        return dx, None
    ds = (x.double() * product.double()).sum() / context.shape[0]
    return dx, ds.to(strength.dtype).reshape(strength.shape)


def _rows(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run `op`, which expects a matrix, on x of any number of dimensions."""
    y: Tensor = op(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), *args, **kwargs)
    return y if x.dim() == 2 else y.view(x.shape)


def _check(x: Tensor, context: Tensor, strength: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"x: expected a floating dtype, got {x.dtype}; convert it with x.float()")
    if strength.numel() != 1:
        raise ValueError(f"strength: expected one element, got {tuple(strength.shape)}")
    if not x.device == context.device == strength.device:
        raise ValueError(
            f"expected x, context and strength on one device, got {x.device}, {context.device} and {strength.device}; "
            "move the module, or the incoming context"
        )
