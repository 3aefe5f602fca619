"""Functions of another module for forward code that a trace must not be taken of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SETTINGS = {"negative": False}


def settled(x: Tensor) -> Tensor:
    """Returns x or -x, by a setting of this module."""
    return -x if SETTINGS["negative"] else x


def forward_of_a_closure(factors: list[float]) -> Callable[[Any, Tensor], Tensor]:
    """Returns a forward that depends on a list that it holds."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.bn(self.conv(x))) * factors[0]
        return out

    return forward


def halved(x: Tensor) -> Tensor:
    """Returns x / 2."""
    return x / 2


class Reverse(torch.autograd.Function):
    """Returns its argument, and the gradient with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


def reversed_gradient(x: Tensor) -> Tensor:
    """Returns x; its gradient is reversed."""
    out: Tensor = apply_function(Reverse, x)
    return out


def apply_function(function: Any, x: Tensor) -> Any:
    """Apply an autograd function."""
    return function.apply(x)
