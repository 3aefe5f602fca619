"""Dropout in graphs that run with eager's own kernels: backward recomputes its result from the mask.

[Note: dropout's result] ``native_dropout`` returns its result and a mask of one byte per element, and never runs twice.
If its result were kept, backward would hold both. So `write_out_dropout` replaces the result by ``x * mask * scale``,
which is bit for bit what the op itself computes. A cut may then keep only the mask, and ``x`` or what ``x`` is computed
from. After the cut `restore_dropout` makes forward read the op's own result again. A mask of one bit per element, or
the generator's state, would be smaller still; but eager has no ops for the one, and the other would draw from the
generator again in backward.

[Note: dropout on a CPU] AOTAutograd traces each dropout as ``native_dropout``. Eager PyTorch runs that op only on
accelerators. On a CPU it multiplies ``x`` by a factor: the mask divided by ``1 - p`` and rounded to the dtype of ``x``.
The result differs from that of ``native_dropout`` in the last bit, in half precision for most ``p``. So on a CPU
forward and backward multiply by the mask and by a scale that is rounded like the factor, which gives eager's bits, and
forward does not return to the op's own result.
"""

from __future__ import annotations

import operator
import struct

import torch
from torch import Tensor, fx

__all__ = ["restore_dropout", "write_out_dropout"]

aten = torch.ops.aten


def write_out_dropout(graph: fx.Graph) -> list[str]:
    """Replace each dropout's result by the ops that compute it. Returns the names of values to restore in forward."""
    written: list[str] = []
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = node.args
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if train is False or not isinstance(p, float) or not 0 < p < 1 or parts.keys() != {0, 1}:
            continue
        result, mask = parts[0], parts[1]
        result.append(mask)  # moves the mask up: both precede all readers of the result
        scale = _scale(result.meta["val"], p)
        with graph.inserting_after(mask):
            masked = graph.call_function(aten.mul.Tensor, (x, mask))
        with graph.inserting_after(masked):
            again = graph.call_function(aten.mul.Tensor, (masked, scale))
        result.replace_all_uses_with(again)
        masked.meta = dict(result.meta)
        again.meta = dict(result.meta)
        if result.meta["val"].device.type != "cpu":
            written.append(again.name)
            continue
        for user in list(mask.users):
            if user.target is aten.native_dropout_backward.default:
                user.update_arg(2, scale)
    return written


def _scale(result: Tensor, p: float) -> float:
    """Return the scale of eager, rounded as in eager: on a CPU to the result's dtype, see [Note: dropout on a CPU]."""
    if result.dtype is torch.float64:
        return 1 / (1 - p)
    scale = _rounded(1 / _rounded(1 - p, torch.float32), torch.float32)
    return _rounded(scale, result.dtype) if result.device.type == "cpu" else scale


def _rounded(number: float, dtype: torch.dtype) -> float:
    """Round a number to a dtype, without a tensor, which would be a fake one while torch compiles."""
    if dtype is torch.bfloat16:
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        bits = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000  # to nearest, ties to even
        return float(struct.unpack("<f", struct.pack("<I", bits))[0])
    form = "<e" if dtype is torch.float16 else "<f"
    return float(struct.unpack(form, struct.pack(form, number))[0])


def restore_dropout(forward: fx.GraphModule, written: list[str]) -> None:
    """Make forward read the op's own result. ``written``: the names that `write_out_dropout` returned."""
    nodes = {node.name: node for node in forward.graph.nodes}
    for again in (nodes[name] for name in written if name in nodes):
        (masked, _) = again.args
        (_, mask) = masked.args
        op = mask.args[0]
        with forward.graph.inserting_after(op):
            result = forward.graph.call_function(operator.getitem, (op, 0))
        result.meta = dict(again.meta)
        again.replace_all_uses_with(result)
    forward.graph.eliminate_dead_code()
    forward.recompile()
