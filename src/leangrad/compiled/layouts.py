"""Memory formats: of values recomputed for a convolution's backward, and of values kept in a network that has one.

[Note: formats of convolutions] If its weight is channels_last, a convolution runs in that format, and Inductor makes
forward write the convolution's input in that format, whatever strides were traced. An input that is kept therefore has
the format in backward too. An input that is recomputed has the traced strides. If these are of another format, cuDNN
copies the whole feature map before it begins (seen on PoolFormer). So such an input is recomputed in the weight's
format, by a copy that is inserted into the graph. Inductor computes the copy inside the kernel that computes the value,
without a pass of its own.

The weight of a convolution that reads one channel at a time has a dimension of size one. The stride of that dimension
does not matter to Inductor, but to cuDNN it makes the weight look contiguous, and feature maps are copied again. A cast
of such a weight is small. It is kept, with the strides that it has.

[Note: kept in four dimensions] In a graph with convolutions Inductor writes an output of forward in channels_last if it
has four dimensions, even the heads of an attention. A product then reads across their rows: they were copied twice
before each product (DaViT, whose kernels took 1.19 times as long as with torch's own choice). Where all readers see
such a value through one view with another number of dimensions, forward returns that view: the same memory, with the
strides that were traced.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import fx

from leangrad._torch import compiler

__all__ = ["handed_out", "is_weight_of_one_channel", "lay_out_convolutions"]

_CONVOLUTION, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
_ITS_OWN = ("tensor_meta", "unbacked_bindings")  # meta of one node alone: its strides, the sizes that it defines
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def lay_out_convolutions(backward: fx.Graph) -> None:
    """Insert copies, so that inputs recomputed for a convolution's backward have the memory format of its weight."""
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
    """Whether ``node`` is the weight of a convolution that reads one channel at a time; by size hints, no guards."""
    shape = compiler.shape_of(node)
    if len(shape) not in _FORMATS or shape[1] != 1:
        return False
    return any(user.target is _CONVOLUTION and user.args[1] is node for user in node.users)


def handed_out(node: fx.Node, views: AbstractSet[fx.Node]) -> fx.Node:
    """Return what forward saves of a kept value: itself or one of its ``views``. [Note: kept in four dimensions]"""
    view = node
    while len(compiler.shape_of(view)) in _FORMATS:
        readers = list(view.users)
        if len(readers) != 1 or readers[0] not in views or compiler.size_of(readers[0]) != compiler.size_of(node):
            return node
        (view,) = readers
    return view
