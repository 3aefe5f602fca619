"""The ops on lazy logits that leave them lazy: the rules of `logit_ops`, detach, argmax and the cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leangrad.functional import autocast_enabled
from leangrad.loss.fused import linear_cross_entropy
from leangrad.loss.lazy.logits import HANDLERS, LazyLogits, derive, is_hooked
from leangrad.loss.logit_ops import RULES, Logits, Rule, softcap_and_scale, takes_loss


def _handler(rule: Rule) -> Callable[..., Any]:
    """Return the handler that applies ``rule`` to lazy logits."""

    def handle(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        change = rule(_known(logits), *args, **kwargs)
        if change is None or type(change.bias) not in (type(None), Tensor, torch.nn.Parameter):
            return NotImplemented
        if change.is_same:
            return logits
        shape = change.shape
        if shape is None and change.pick is not None:
            shape = _picked_shape(logits, change.pick)
        return derive(
            logits,
            change.op,
            shape=shape,
            dtype=change.dtype,
            pick=change.pick,
            before=change.before,
            after=change.after,
            bias=change.bias,
            is_transposed=change.is_transposed,
        )

    return handle


def _known(logits: LazyLogits) -> Logits:
    """Return what a rule of `logit_ops` may know of ``logits``."""
    rows, source = logits._rows, logits._rows.source
    return Logits(
        tuple(logits.shape),
        logits.dtype,
        logits.device,
        source.x.shape[-1],
        rows.before,
        rows.after,
        rows.is_transposed,
        bool(rows.picks),
        None if rows.bias is not None or source.is_autocast else source.x.dtype,
    )


def _picked_shape(logits: LazyLogits, pick: Callable[[Tensor], Tensor]) -> tuple[int, ...]:
    """Return the shape of the logits after ``pick`` has selected their rows."""
    with torch.no_grad():
        x = torch.empty((), device="meta").expand(*logits.shape[:-1], logits._rows.source.x.shape[-1])
        return (*pick(x).shape[:-1], logits.shape[-1])


def _detach(logits: LazyLogits) -> LazyLogits:
    return derive(logits, Tensor.detach, is_detached=True)


def _argmax(logits: LazyLogits, *args: Any, **kwargs: Any) -> Tensor:
    """Compute the argmax from temporary values: a metric that is often read beside the loss."""
    logits._rows.check_writes()
    return torch.argmax(logits._rows.compute(), *args, **kwargs)


def _cross_entropy(
    input: LazyLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    rows, source, known = input._rows, input._rows.source, _known(input)
    if (
        type(target) is not Tensor
        or type(weight) not in (type(None), Tensor)
        or not takes_loss(known, target.dtype, size_average=size_average, reduce=reduce, weight=weight)
        or target.shape != (*input.shape[:1], *input.shape[2:])
        or target.device != input.device
        or is_hooked(input)
    ):
        return NotImplemented
    is_graded = torch.is_grad_enabled() and input.requires_grad
    softcap, scale = softcap_and_scale(known)
    with torch.set_grad_enabled(is_graded):
        x, table, bias = rows.open(input)
        for pick in rows.picks:
            x = pick(x)
        if rows.bias is not None:
            rows.check_bias()
            own = rows.bias.reshape(-1)
            bias = own if bias is None else bias + own
        is_autocast = autocast_enabled(x.device.type)
        with source.autocast():
            loss = linear_cross_entropy(
                x,
                table,
                target,
                linear_bias=bias,
                weight=weight,
                reduction=reduction,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                softcap=softcap,
                logit_scale=scale,
            )
    if is_graded:
        source.asked(True)
    return loss if is_autocast else loss.to(input.dtype)


HANDLERS.update({name: _handler(rule) for name, rule in RULES.items()})
HANDLERS.update({"detach": _detach, "argmax": _argmax, "cross_entropy": _cross_entropy})
