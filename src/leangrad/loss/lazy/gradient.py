"""The gradient of logits in the form of those of x, W and b; see [Note: the graph] in `logits`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from leangrad.errors import LeangradError

__all__ = ["Parts", "ProjectedGradient", "projected", "without_memory"]


class ProjectedGradient(Tensor):
    """A tensor with the shape of logits and no memory, which carries ``parts``."""

    parts: Parts

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor and not kwargs:  # autograd adds up the gradients of several readers
            a, b = (one.parts if type(one) is ProjectedGradient else Parts(dense=one) for one in args)
            shape = args[0].shape
            return projected(a.plus(b), shape, args[0].dtype, args[0].device)
        if func is torch.ops.aten.detach.default:
            return projected(args[0].parts, args[0].shape, args[0].dtype, args[0].device)
        if func is torch.ops.aten.isnan.default:  # anomaly detection asks this of all gradients
            parts = [part.isnan().any() for part in args[0].parts if part is not None]
            return torch.stack(parts).any().expand(args[0].shape)
        if func is torch.ops.aten.record_stream.default:  # the next node runs on another stream
            for part in args[0].parts:
                if part is not None:
                    part.record_stream(args[1])
            return None
        raise LeangradError(
            "the gradient of these logits has no values: the loss was computed without them. Register hooks on logits "
            "before the loss is computed, or use leangrad.lean(model, exact=True)"
        )


class Parts(NamedTuple):
    """Gradients of x, W and b, and of the logits themselves: the sum of what they say is meant."""

    x: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    dense: Tensor | None = None

    def plus(self, other: Parts) -> Parts:
        """Both together."""
        return Parts(*(_sum(a, b) for a, b in zip(self, other, strict=True)))


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def projected(parts: Parts, shape: Any, dtype: torch.dtype, device: torch.device) -> ProjectedGradient:
    """A gradient of ``parts`` for logits of this shape."""
    gradient: ProjectedGradient = without_memory(ProjectedGradient, shape, dtype, device)
    gradient.parts = parts
    return gradient


def without_memory(cls: Any, shape: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of class ``cls`` that is nothing but its shape, dtype and device."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
