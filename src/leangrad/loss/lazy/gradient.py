"""The gradient of lazy logits, stored as the gradients of x, W and b; see [Note: the graph] in `logits`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from leangrad.errors import LeangradError

__all__ = ["Parts", "ProjectedGradient", "projected", "without_memory"]


class ProjectedGradient(Tensor):
    """A gradient with the shape of logits and no memory, whose value is given by ``parts``."""

    parts: Parts

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor and not kwargs:  # autograd sums the gradients of several readers
            a, b = (one.parts if type(one) is ProjectedGradient else Parts(dense=one) for one in args)
            shape = args[0].shape
            return projected(a.plus(b), shape, args[0].dtype, args[0].device)
        if func is torch.ops.aten.detach.default:
            return projected(args[0].parts, args[0].shape, args[0].dtype, args[0].device)
        if func is torch.ops.aten.isnan.default:  # anomaly detection checks every gradient
            parts = [part.isnan().any() for part in args[0].parts if part is not None]
            return torch.stack(parts).any().expand(args[0].shape)
        if func is torch.ops.aten.record_stream.default:  # the next autograd node runs on another stream
            for part in args[0].parts:
                if part is not None:
                    part.record_stream(args[1])
            return None
        raise LeangradError(
            "the gradient of these logits has no values: the loss was computed without them. Register hooks on logits "
            "before the loss is computed, or use leangrad.lean(model, exact=True)"
        )


class Parts(NamedTuple):
    """The summands of a gradient of logits; None: that summand is zero.

    x, weight, bias: gradients of the projection's arguments. dense: an ordinary gradient of the logits, which the
    projection's backward still has to propagate to these arguments.
    """

    x: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    dense: Tensor | None = None

    def plus(self, other: Parts) -> Parts:
        """Return the sum of both gradients."""
        return Parts(*(_sum(a, b) for a, b in zip(self, other, strict=True)))


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def projected(parts: Parts, shape: Any, dtype: torch.dtype, device: torch.device) -> ProjectedGradient:
    """Return a gradient with these ``parts``, for logits of this shape, dtype and device."""
    gradient: ProjectedGradient = without_memory(ProjectedGradient, shape, dtype, device)
    gradient.parts = parts
    return gradient


def without_memory(cls: Any, shape: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of class ``cls`` with this shape, dtype and device, and no memory."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
