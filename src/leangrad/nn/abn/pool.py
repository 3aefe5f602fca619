"""Max pooling after an activated batch norm: backward finds the maxima again.

`nn.MaxPool2d` keeps its input and, for each output, the index of the maximum as a 64-bit integer: as many bytes as four
bfloat16 maps of the output. After an ABN that kept its input, the pooling's input is rebuilt in backward anyway, by the
layer's recipe or by a ledger; one more pass over it finds the same indices.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.ledger.observe.active_region import ledger_saves
from leangrad.ledger.origins.functions import Replay, register_rule
from leangrad.nn.abn.autograd import once
from leangrad.nn.abn.recipe import recipe_of
from leangrad.nn.abn.rule import can_be_rebuilt
from leangrad.overridable import overridable

__all__ = ["RebuiltMaxPool2d"]


class RebuiltMaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` that keeps no indices of maxima if its input is the output of an ABN that can be rebuilt.

    Equals `nn.MaxPool2d` bit for bit. `convert_abn` makes it from an `nn.MaxPool2d`.

    Keeps for backward: only a recipe of its input; if that cannot be rebuilt, the same as `nn.MaxPool2d`: its input and
    8 bytes per output.

    >>> from leangrad.nn.abn import ABN
    >>> from leangrad.nn.abn.recipe import rebuilding
    >>> with rebuilding():
    ...     y = RebuiltMaxPool2d(2)(ABN(4, activation="relu")(torch.randn(2, 4, 8, 8, requires_grad=True)))
    >>> y.shape
    torch.Size([2, 4, 4, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Returns the maximum of each window."""
        x = input
        if torch.compiler.is_compiling() or self.return_indices or not torch.is_grad_enabled() or not _is_rebuilt(x):
            plain: Tensor = super().forward(x)
            return plain
        window = (self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)
        y: Tensor = _apply_pool(x, window)
        return y


def _is_rebuilt(x: Tensor) -> bool:
    """Whether the saved-tensor hooks in force, of `rebuilding()` or of a ledger, rebuild x if it is saved now."""
    return recipe_of(x) is not None or (ledger_saves() and can_be_rebuilt(x))


class _PoolFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.window = window
        y: Tensor = F.max_pool2d(x, *window)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        with torch.enable_grad():
            x = saved.detach().requires_grad_()
            y = F.max_pool2d(x, *ctx.window)
        gradients = (*torch.autograd.grad(y, x, dy.detach()), None)
        return once(gradients, dy, saved) if torch.is_grad_enabled() else gradients


_apply_pool = overridable(_PoolFunction.apply)


def _replay(walk: Any, node: Any) -> Replay:
    return _pool, (walk.operand(node, 0), node.window)


def _pool(x: Tensor, window: tuple[Any, ...]) -> Tensor:
    y: Tensor = F.max_pool2d(x, *window)
    return y


register_rule(_PoolFunction, _replay)
