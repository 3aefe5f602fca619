"""Dropout in graphs that are run with eager's own kernels: what it gives is made again from its mask.

[Note: dropout's result] ``native_dropout`` gives its result and a mask of one byte per element, and is never run twice.
If its result were kept, backward would hold both. So its readers are told that it is ``x * mask * scale``, which is
what the op itself computes, bit for bit: a cut may then keep the mask alone, and ``x`` or what ``x`` is made from.
Forward gets the op's own result back after the cut. A mask of one bit, or the generator's state, would be smaller
still; the one would need ops that eager does not have, the other would draw from the generator again in backward.
"""

from __future__ import annotations

import operator
import struct

import torch
from torch import fx

__all__ = ["restore_dropout", "write_out_dropout"]

aten = torch.ops.aten


def write_out_dropout(graph: fx.Graph) -> list[str]:
    """Let the readers of each dropout read ``x * mask * scale``. Returns the names of these values."""
    written: list[str] = []
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = node.args
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if train is False or not isinstance(p, float) or not 0 < p < 1 or parts.keys() != {0, 1}:
            continue
        result, mask = parts[0], parts[1]
        result.append(mask)  # both stand before their readers
        with graph.inserting_after(mask):
            masked = graph.call_function(aten.mul.Tensor, (x, mask))
        with graph.inserting_after(masked):
            again = graph.call_function(aten.mul.Tensor, (masked, _scale(result, p)))
        result.replace_all_uses_with(again)
        masked.meta = dict(result.meta)
        again.meta = dict(result.meta)
        written.append(again.name)
    return written


def _scale(result: fx.Node, p: float) -> float:
    """What the op itself multiplies by: on an accelerator it takes the inverse of 1 - p rounded to a float32."""
    value = result.meta["val"]
    if value.device.type == "cpu" or value.dtype is torch.float64:
        return 1 / (1 - p)
    return _single(1 / _single(1 - p))


def _single(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


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
