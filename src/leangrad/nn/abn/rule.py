"""Activated batch norm in the ledger: how its output is rebuilt, and which tensors a call changes in place.

Inside a region of a ledger a layer that keeps its input saves it like any other tensor, and makes no `Recipe` of its
own (`recipe.py`): the ledger rebuilds the output by the rule in this file, and cuts chains of residual blocks as it
cuts all others. Both ways replay the same pass, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from leangrad import _torch
from leangrad.ledger.observe.function_mode import FunctionMode
from leangrad.ledger.observe.handlers import HANDLERS
from leangrad.ledger.observe.mutation import before_change
from leangrad.ledger.origins.functions import Replay, register_rule
from leangrad.ledger.origins.graph_walk import Walk, noted
from leangrad.ledger.values.rebuild.inplace_variants import with_out
from leangrad.nn.abn.autograd import ABNFunction, Call, apply_abn
from leangrad.nn.abn.recipe import behind_hooks, note_region
from leangrad.ops import abn as ops

__all__ = ["DETERMINISTIC", "can_be_rebuilt"]

# Activation modules that the kernels do not have, and that give the same bits when they run again.
DETERMINISTIC = (nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Tanh, nn.Sigmoid, nn.Mish, nn.Softplus)


def _applies(node: Any) -> bool:
    """Whether a ledger can rebuild the output of `node`: the layer kept its input and its activation is deterministic.

    A layer that inverts keeps its output, which needs no recipe.
    """
    call: Call = node.call
    known = call.function is None or (type(call.function) in DETERMINISTIC and call.keeps_dtype)
    return known and not call.invert


def can_be_rebuilt(x: Tensor) -> bool:
    """Whether x is the output of a layer, and a ledger can rebuild it."""
    node = behind_hooks(x.grad_fn, x.output_nr)
    return type(node) is _torch.node_class(ABNFunction) and _applies(node)


def _replay(walk: Walk, node: Any) -> Replay:
    call: Call = node.call
    x = walk.operand(node, 0, place=1)
    residual = None
    if call.added:
        edge = 1 + sum(dtype is not None for dtype in call.dtypes)  # a node has no edge for a weight that is None
        residual = walk.operand(node, edge, place=2 if call.needs_residual else None)
    vectors = walk.saved_in(node, 0, private=True)
    return rebuild, (x, residual, vectors, call.activation, call.function, call.layer)


def rebuild(
    x: Tensor,
    residual: Tensor | None,
    vectors: Tensor,
    activation: ops.Activation,
    function: Any,
    layer: Any,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the output of a layer from its input, its residual and its vectors; `out` may be `x` or `residual`."""
    out = torch.empty_like(x) if out is None else out
    if layer is not None:
        layer.normalize(x, vectors, residual, out)
    elif out.numel():
        ops.normalize(x, vectors, activation, residual=residual, out=out)
    return out if function is None else function(out)


def _handle(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The handler of `apply_abn`: run it, and report that it changes the running statistics, and x if `in_place`."""
    note_region()
    call: Call = args[-1]
    running = call.running if call.training else None
    if running is not None:
        before_change(mode.region, running)
    if call.in_place:
        before_change(mode.region, args[0])
        mode.region.changing = args[0]
    try:
        out = func(*args, **kwargs)
    finally:
        mode.region.changing = None
    if running is not None and noted.are_any(*running):
        mode.region.distrust()
    return out


register_rule(ABNFunction, _replay, _applies)
with_out(rebuild)
HANDLERS[apply_abn] = _handle
