"""How a model that `convert_abn` has converted is compared with the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from leangrad.nn.convert import convert_abn

Use = Callable[[nn.Module, Tensor], Tensor]


def image() -> Tensor:
    return torch.randn(4, 3, 6, 6, dtype=torch.float64)


def shaken(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.double()


def assert_alike(plain: nn.Module, converted: nn.Module, use: Use, x: Tensor | None = None) -> None:
    """Outputs, gradients and running statistics of two steps."""
    for _ in range(2):
        x = image() if x is None else x
        found = []
        for model in (plain, converted):
            leaf = x.clone().requires_grad_()
            out = use(model, leaf)
            weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
            inputs = [leaf, *model.parameters()]
            gradients = torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True)
            found.append((out, gradients, list(model.buffers())))
        torch.testing.assert_close(found[1], found[0])
        x = None


def plain_and_converted(model: nn.Module, *, fused: bool | None = True) -> tuple[nn.Module, nn.Module]:
    """fused: whether the first norm must have been fused with something; None: it does not matter."""
    plain = shaken(model)
    converted = convert_abn(copy.deepcopy(plain))
    if fused is not None:
        first = converted.abn_conversions[0]  # type: ignore[index]
        assert (first.activation not in (None, "identity")) == fused, converted.abn_conversions
    return plain, converted


def is_fused(model: nn.Module, use: Use) -> bool:
    """Whether a step runs the layer of norm and activation."""
    return has_layer(use(copy.deepcopy(model), image().requires_grad_()))


def has_layer(out: Tensor) -> bool:
    """Whether the layer of norm and activation is in the graph of a tensor."""
    todo: list[Any] = [out.grad_fn]
    names = set()
    while todo:
        node = todo.pop()
        names.add(node.name())
        todo += [other for other, _ in node.next_functions if other is not None]
    return "ABNFunctionBackward" in names


def call(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
        self.last = nn.Conv2d(3, 3, 1)
        self.alpha, self.wide, self.scale = 0.5, False, None
        self.many = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(2))
        self.seen: list[Tensor] = []
        self.options = {"double": False}
