"""Max pooling after an activated batch norm: it finds its maxima again in backward.

Plain max pooling keeps its input and, for each output, the place of the maximum as a 64-bit integer: as much as four
bfloat16 maps of the output. After an ABN that kept its input, the pooling's input is rebuilt in backward anyway; one
more pass over it finds the same places.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.nn.abn_autograd import once
from leangrad.nn.abn_recipe import recipe_of

__all__ = ["RebuiltMaxPool2d"]


class RebuiltMaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` that keeps no places of maxima where its input is an output that an ABN can rebuild.

    Equals `nn.MaxPool2d` bit for bit. Made by `convert_abn` from a plain one.

    Keeps for backward: a recipe; elsewhere what `nn.MaxPool2d` keeps, its input and 8 bytes per output.

    >>> from leangrad.nn.abn import ABN
    >>> from leangrad.nn.abn_recipe import rebuilding
    >>> with rebuilding():
    ...     y = RebuiltMaxPool2d(2)(ABN(4, activation="relu")(torch.randn(2, 4, 8, 8, requires_grad=True)))
    >>> y.shape
    torch.Size([2, 4, 4, 4])
    """

    def forward(self, x: Tensor) -> Tensor:
        """The maximum of each window."""
        if torch.compiler.is_compiling() or self.return_indices or not torch.is_grad_enabled() or recipe_of(x) is None:
            plain: Tensor = super().forward(x)
            return plain
        window = (self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)
        y: Tensor = _PoolFunction.apply(x, window)
        return y


class _PoolFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.window = window
        y: Tensor = F.max_pool2d(x, *window)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = F.max_pool2d(x, *ctx.window)
        gradients = (*torch.autograd.grad(y, x, dy.detach()), None)
        return once(gradients) if torch.is_grad_enabled() else gradients
