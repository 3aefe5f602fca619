"""Which activation a module, or a node of a trace, computes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from leangrad._torch import has_hooks, has_own_forward
from leangrad.nn.abn.converted import Act, act_of

__all__ = ["act_of_node", "bare_act_of"]

FUNCTIONS: dict[Any, str] = {
    F.relu: "relu", F.relu_: "relu", torch.relu: "relu", torch.relu_: "relu", "relu": "relu", "relu_": "relu",
    F.leaky_relu: "leaky_relu", F.leaky_relu_: "leaky_relu", F.elu: "elu", F.elu_: "elu",
    F.silu: "silu", F.gelu: "gelu",
}  # fmt: skip
CLASSES: dict[Any, type[nn.Module]] = {
    F.relu6: nn.ReLU6, F.hardswish: nn.Hardswish, F.hardsigmoid: nn.Hardsigmoid, F.mish: nn.Mish,
    torch.tanh: nn.Tanh, F.tanh: nn.Tanh, "tanh": nn.Tanh,
    torch.sigmoid: nn.Sigmoid, F.sigmoid: nn.Sigmoid, "sigmoid": nn.Sigmoid,
}  # fmt: skip
# The one argument of each function beside its input that ABN supports (and gelu's `approximate`), and its default.
OPTION = {"leaky_relu": ("negative_slope", 0.01), "elu": ("alpha", 1.0)}


def act_of_node(module: nn.Module, node: fx.Node, source: fx.Node) -> Act | None:
    """Returns the activation that `node` applies to `source`; None if it applies none that ABN supports."""
    if not node.args or node.args[0] is not source:
        return None
    if node.op == "call_module":
        return bare_act_of(module.get_submodule(str(node.target))) if len(node.args) == 1 and not node.kwargs else None
    if (kind := CLASSES.get(node.target)) is not None:
        return act_of(kind()) if len(node.args) == 1 and not node.kwargs.keys() - {"inplace"} else None
    name = FUNCTIONS.get(node.target)
    options = {k: v for k, v in node.kwargs.items() if k != "inplace"}
    if name is None or len(node.args) > 2 or any(isinstance(v, fx.Node) for v in options.values()):
        return None
    option, default = OPTION.get(name, ("", 0.01))
    param = options.pop(option, default)
    if len(node.args) == 2:
        if not option or isinstance(node.args[1], fx.Node):
            return None
        param = node.args[1]
    if name == "gelu" and options.pop("approximate", "none") == "tanh":
        name = "gelu_tanh"
    if options or not isinstance(param, (int, float)):
        return None
    return Act(name, (param,) if option else ())


def bare_act_of(module: nn.Module | None) -> Act | None:
    """Returns the activation that a call of `module` computes; None if it is none, or if it would run hooks too."""
    return None if module is None or has_hooks(module) or has_own_forward(module) else act_of(module)
