"""`linear_cross_entropy` in torch's own ops: all logits at once, differentiable any number of times."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Options", "Tensors", "plain_linear_cross_entropy"]


class Tensors(NamedTuple):
    """The tensors of one call of `linear_cross_entropy`.

    input: (..., D); linear_weight: (V, D); linear_bias: (V,); logit_scale: (); weight: (V,), of the classes;
    target: (...).
    """

    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    logit_scale: Tensor | None
    weight: Tensor | None
    target: Tensor


class Options(NamedTuple):
    """The arguments of one call of `linear_cross_entropy` that are not tensors."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None


def plain_linear_cross_entropy(tensors: Tensors, options: Options) -> Tensor:
    """Compute the loss with `F.linear` and `F.cross_entropy`."""
    target = tensors.target.reshape(-1)
    z = F.linear(tensors.input, tensors.linear_weight, tensors.linear_bias)
    z = z.reshape(len(target), len(tensors.linear_weight))
    if tensors.logit_scale is not None:
        z = tensors.logit_scale.reshape(()) * z
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    z = z if z.dtype == torch.float64 else z.float()
    loss = F.cross_entropy(
        z,
        target,
        None if tensors.weight is None else tensors.weight.to(z.dtype),
        reduction=options.reduction,
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
    )
    if options.z_loss != 0:
        valid = target != options.ignore_index
        square = torch.where(valid, torch.logsumexp(z, 1).square(), 0)
        if options.reduction == "mean":
            square = square.sum() / valid.sum()
        elif options.reduction == "sum":
            square = square.sum()
        loss = loss + options.z_loss * square
    return loss.reshape(tensors.target.shape) if options.reduction == "none" else loss
