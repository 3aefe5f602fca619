"""The activations of activated batch norm in plain PyTorch: in place, backward into a given buffer, and inverted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

__all__ = ["Activation", "activate_", "activation_backward", "invert"]

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An activation that both the eager code and the kernels implement; `param` is the slope or alpha."""

    name: str = "leaky_relu"
    param: float = 0.01

    NAMES = ("leaky_relu", "elu", "identity", "relu", "silu", "gelu", "gelu_tanh")

    @cached_property
    def inverts(self) -> bool:
        """Whether y can be computed from z alone."""
        return self.name == "identity" or (self.name in ("leaky_relu", "elu") and self.param > 0)


def activate_(y: Tensor, act: Activation) -> Tensor:
    """act(y), in place."""
    match act.name:
        case "leaky_relu":
            return torch.nn.functional.leaky_relu_(y, act.param)
        case "elu":
            return torch.nn.functional.elu_(y, act.param)
        case "relu":
            return y.relu_()
        case "silu":
            return torch.nn.functional.silu(y, inplace=True)
        case "gelu" | "gelu_tanh":
            return aten.gelu_(y, approximate="tanh" if act.name == "gelu_tanh" else "none")  # type: ignore[no-any-return]
        case "identity":
            return y
    raise ValueError(f"expected an activation of {Activation.NAMES}, got {act.name!r}")


def activation_backward(dz: Tensor, y: Tensor, act: Activation, is_result: bool, out: Tensor | None = None) -> Tensor:
    """Returns dz·act'(y), written into `out` if given; for the identity `dz` itself. If `is_result`, `y` is z."""
    if act.name == "identity":
        return dz
    dy = torch.empty_like(dz) if out is None else out
    match act.name:
        case "leaky_relu":
            aten.leaky_relu_backward.grad_input(dz, y, act.param, is_result, grad_input=dy)
        case "elu":
            aten.elu_backward.grad_input(dz, act.param, 1.0, 1.0, is_result, y, grad_input=dy)
        case "relu":
            aten.threshold_backward.grad_input(dz, y, 0.0, grad_input=dy)
        case "silu":
            aten.silu_backward.grad_input(dz, y, grad_input=dy)
        case "gelu" | "gelu_tanh":
            approximate = "tanh" if act.name == "gelu_tanh" else "none"
            aten.gelu_backward.grad_input(dz, y, approximate=approximate, grad_input=dy)
    return dy


def invert(z: Tensor, act: Activation) -> Tensor:
    """act⁻¹(z)."""
    if act.name == "leaky_relu":
        return torch.nn.functional.leaky_relu(z, 1.0 / act.param)
    if act.name == "elu":
        # z → −α means y → −∞: the clamp keeps it finite, at the y whose z is the last one above −α.
        negative = (z / act.param).clamp_(-1.0 + torch.finfo(z.dtype).eps, 0.0).log1p_()
        return negative.add_(z.clamp(min=0.0))
    return z
