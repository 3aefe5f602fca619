"""Dropout in graphs that are run with eager's own kernels: what it gives is made again from its mask.

[Note: dropout's result] ``native_dropout`` gives its result and a mask of one byte per element, and is never run twice.
If its result were kept, backward would hold both. So its readers are told that it is ``x * mask * scale``, which is
what the op itself computes, bit for bit: a cut may then keep the mask alone, and ``x`` or what ``x`` is made from.
Forward gets the op's own result back after the cut. A mask of one bit, or the generator's state, would be smaller
still; the one would need ops that eager does not have, the other would draw from the generator again in backward.

[Note: dropout on a CPU] AOTAutograd traces each dropout as ``native_dropout``. Eager PyTorch runs that on accelerators
only: on a CPU it multiplies by a factor, which is the mask divided by ``1 - p`` and rounded to the dtype of ``x``. The
product with the factor differs in the last bit, in half precision for most ``p``. So here readers and backward are told
of the mask and of a scale that is rounded like the factor, which is the same, and forward keeps to it.
"""

from __future__ import annotations

import operator
import struct

import torch
from torch import Tensor, fx

__all__ = ["restore_dropout", "write_out_dropout"]

aten = torch.ops.aten


def write_out_dropout(graph: fx.Graph) -> list[str]:
    """Let the readers of each dropout read what it is made of. Returns the names of values to restore in forward."""
    written: list[str] = []
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = node.args
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if train is False or not isinstance(p, float) or not 0 < p < 1 or parts.keys() != {0, 1}:
            continue
        result, mask = parts[0], parts[1]
        result.append(mask)  # both stand before their readers
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
    """What eager multiplies by, rounded as there: on a CPU to the dtype, see [Note: dropout on a CPU]."""
    if result.dtype is torch.float64:
        return 1 / (1 - p)
    scale = _rounded(1 / _rounded(1 - p, torch.float32), torch.float32)
    return _rounded(scale, result.dtype) if result.device.type == "cpu" else scale


def _rounded(number: float, dtype: torch.dtype) -> float:
    """A number rounded to a dtype: without a tensor, which would be a fake one while torch compiles."""
    if dtype is torch.bfloat16:
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        bits = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000  # to the nearest, halves to the even one
        return float(struct.unpack("<f", struct.pack("<I", bits))[0])
    form = "<e" if dtype is torch.float16 else "<f"
    return float(struct.unpack(form, struct.pack(form, number))[0])


def restore_dropout(forward: fx.GraphModule, written: list[str]) -> None:
    """Let forward read what the op itself gives."""
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
