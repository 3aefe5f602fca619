"""The fused loss as a custom op that a captured graph can call: ``torch.ops.leangrad.linear_cross_entropy``.

[Note: one op] The op returns the loss and the gradients of input, weight and bias in float32, which are known in
forward but for a factor (see [Note: gradients in forward] in `fused`). Its backward multiplies them by one number and
casts them, in torch's own ops, which a compiler may fuse into other kernels. A gradient that is not needed is not
computed, and its output is empty: without any gradient only one product runs. The caller must say which gradients are
needed: a compiler traces the op with fake tensors, and may use the compiled graph for many calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leangrad.errors import LeangradError
from leangrad.loss.fused import loss_and_gradients
from leangrad.loss.reference import Options, Tensors

__all__ = ["LOSS_OP"]


@torch.library.custom_op("leangrad::linear_cross_entropy", mutates_args=())
def _op(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    target: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float | None,
    dtype: torch.dtype,
    needs_input: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`leangrad.linear_cross_entropy` of input (N, D) and target (N,), with the projection in ``dtype``.

    Returns the loss; a factor; and the gradients of input, weight and bias, which have yet to be multiplied by that
    factor and by the gradient of the loss. The gradients are float32, or float64 if ``dtype`` is. One that is not
    needed is an empty tensor.
    """
    wide = _wide(dtype)
    scale = None if logit_scale is None else torch.full((), logit_scale, dtype=wide, device=input.device)
    tensors = Tensors(input, linear_weight, linear_bias, scale, weight, target)
    options = Options(reduction, ignore_index, label_smoothing, 0.0, softcap)
    nothing = [torch.empty(0, dtype=wide, device=input.device) for _ in range(3)]
    loss, factor, found = loss_and_gradients(tensors, options, dtype, (needs_input, needs_weight, needs_bias))
    dx, dW, db = (empty if one is None else one for one, empty in zip(found[:3], nothing, strict=True))
    return loss, factor, dx, dW, db


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@_op.register_fake
def _shapes(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    target: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float | None,
    dtype: torch.dtype,
    needs_input: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, ...]:
    def empty(needed: bool, *shape: Any) -> Tensor:
        return input.new_empty(shape if needed else (0,), dtype=_wide(dtype))

    loss, factor = empty(True), empty(True)
    vocabulary, hidden = linear_weight.shape
    return (
        loss,
        factor,
        empty(needs_input, input.shape[0], hidden),
        empty(needs_weight, vocabulary, hidden),
        empty(needs_bias, vocabulary),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, factor, dx, dW, db = output
    ctx.mark_non_differentiable(factor, dx, dW, db)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(factor, dx, dW, db)
    ctx.dtypes = [None if t is None else t.dtype for t in inputs[:3]]
    ctx.needed = inputs[-3:]


def _backward(ctx: Any, g: Tensor | None, *of_others: None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise LeangradError(
            "the gradients of linear_cross_entropy were computed in its forward and cannot be differentiated again "
            '(create_graph=True); compile with options={"leangrad.fused_loss": False}'
        )
    found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if g is None:
        return tuple(found)
    factor, *gradients = ctx.saved_tensors
    by = g.to(factor.dtype) * factor
    for place, (gradient, dtype) in enumerate(zip(gradients, ctx.dtypes, strict=True)):
        if ctx.needs_input_grad[place]:
            if not ctx.needed[place]:
                raise LeangradError("linear_cross_entropy: a gradient is asked for that was said not to be needed")
            found[place] = (gradient * by).to(dtype)
    return tuple(found)


_op.register_autograd(_backward, setup_context=_setup)

LOSS_OP = torch.ops.leangrad.linear_cross_entropy.default
