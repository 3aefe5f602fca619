"""Memory formats: of what is made again for a convolution's backward, and of what is kept in a net that has one.

[Note: formats of convolutions] If its weight is channels_last, a convolution runs in that format, and Inductor has
forward write the input in it, whatever strides were traced. What is kept so has it in backward too. What is made again
has the traced strides, and if these are of another format, cuDNN copies the whole map before it begins (seen on
PoolFormer). So the value is made again in the weight's format; the copy that says so is computed inside the kernel that
makes the value, and takes no pass of its own.

Where a convolution reads one channel at a time, its weight has a dimension of size one, whose stride says nothing to
Inductor and all to cuDNN: the weight looks contiguous, and maps are copied again. A cast of such a weight is small and
is kept, with the strides that it has.

[Note: kept in four dimensions] In a graph with convolutions Inductor writes what forward hands out in channels_last if
it has four dimensions, also heads of an attention. A product then reads across their rows: they were copied twice
before each (DaViT, whose kernels took 1.19 times as long as with torch's own choice). Where all readers see such a
value through one view of other dimensions, that view is handed out: the same memory, with the strides that were traced.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import fx

from leangrad._torch import compiler

__all__ = ["handed_out", "is_weight_of_one_channel", "lay_out_convolutions"]

_CONVOLUTION, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
_ITS_OWN = ("tensor_meta", "unbacked_bindings")  # what a node says of itself: strides, sizes that it makes known
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def lay_out_convolutions(backward: fx.Graph) -> None:
    """Have what is made again for a convolution's backward made in the format of its weight."""
    for node in backward.find_nodes(op="call_function", target=_BACKWARD):
        given, weight = node.args[1], node.args[2]
        if given.op == "placeholder" or not compiler.is_channels_last(weight) or compiler.is_channels_last(given):
            continue
        memory_format = _FORMATS[given.meta["val"].dim()]
        with backward.inserting_before(node):
            copy = backward.call_function(torch.ops.aten.clone.default, (given,), {"memory_format": memory_format})
        copy.meta = {key: value for key, value in given.meta.items() if key not in _ITS_OWN}
        copy.meta["val"] = given.meta["val"].clone(memory_format=memory_format)
        node.replace_input_with(given, copy)


def is_weight_of_one_channel(node: fx.Node) -> bool:
    """Whether some convolution has it as its weight, and reads one channel at a time; by hints, without a guard."""
    shape = compiler.shape_of(node)
    if len(shape) not in _FORMATS or shape[1] != 1:
        return False
    return any(user.target is _CONVOLUTION and user.args[1] is node for user in node.users)


def handed_out(node: fx.Node, views: AbstractSet[fx.Node]) -> fx.Node:
    """What forward hands to backward of a value that is kept: see [Note: kept in four dimensions]."""
    view = node
    while len(compiler.shape_of(view)) in _FORMATS:
        readers = list(view.users)
        if len(readers) != 1 or readers[0] not in views or compiler.size_of(readers[0]) != compiler.size_of(node):
            return node
        (view,) = readers
    return view
