"""Convolutions: the memory formats of what they read in backward, and their two gradients as two ops.

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

[Note: two gradients] ATen has one op for both gradients of a convolution. Its input must be in memory before it begins,
though only the weight's gradient reads it. If the input is recomputed, a pass over memory is made for that alone: the
gradient, which the derivative of the norm before the convolution reads with the very same memories, is not there yet.
So the op becomes two, as the gradients of a linear layer are: first the input's gradient, then the weight's. Inductor
then recomputes the input in the kernel that computes the derivative of a batch norm, between the two. The one op calls
two kernels, so none is added.

The first op reads only the input's shape, strides and dtype. So it is given another value of these, which forward has
kept: one from which the input is recomputed, and from which something near the gradient is computed too, so that it is
in memory until then in any case. If the weight is frozen, the first op is the only one, and the input is not recomputed
for it.

A gradient with symbolic strides has them checked by Inductor once it has two readers, and torch 2.13 fails at some of
these checks (`Mod` of a size that a stride has divided). Its op stays whole. A batch of any size has no such strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import fx

from leangrad._torch import compiler

__all__ = ["handed_out", "is_weight_of_one_channel", "lay_out_convolutions", "split_convolutions"]

_CONVOLUTION, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
_ITS_OWN = ("tensor_meta", "unbacked_bindings")  # meta of one node alone: its strides, the sizes that it defines
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# Each search sees so many nodes, the nearest first: a norm's derivative is near the gradient that it reads, and what it
# is computed from is a few nodes above each of its ops.
_BELOW, _ABOVE = 64, 512


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


def split_convolutions(backward: fx.Graph) -> None:
    """Split the backward of each convolution whose input is recomputed into two ops: see [Note: two gradients]."""
    for node in backward.find_nodes(op="call_function", target=_BACKWARD):
        gradient, given, mask = node.args[0], node.args[1], node.args[-1]
        readers = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        is_known = len(readers) == len(node.users) and mask[0] and 0 in readers
        if given.op == "placeholder" or not is_known or not compiler.has_known_strides(gradient):
            continue
        like = _kept_like(given, readers[0])
        if like is not None and mask[1]:
            _split(node, like, readers)
        elif like is not None:
            node.update_arg(1, like)


def _kept_like(given: fx.Node, gradient: fx.Node) -> fx.Node | None:
    """Return a kept value laid out like ``given``; ``given`` and a reader of ``gradient`` are both computed from it."""
    similar = [node for node in _kept_for([given]) if compiler.is_laid_out_like(node, given)]
    if not similar:
        return None
    reached = dict.fromkeys(_near([gradient], lambda node: node.users, _BELOW))
    found = set(_kept_for(i for node in reached for i in node.all_input_nodes if i not in reached))
    return next((node for node in similar if node in found), None)


def _kept_for(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the inputs of the graph from which ``nodes`` are computed, the nearest first, up to `_ABOVE` nodes."""
    above = _near(nodes, lambda node: node.all_input_nodes, _ABOVE)
    return [node for node in above if node.op == "placeholder"]


def _near(start: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]], most: int) -> list[fx.Node]:
    """Return ``start`` and the nodes that are reached from there, the nearest first, about ``most`` of them."""
    seen = dict.fromkeys(start)
    frontier = [*seen]
    for node in frontier:
        if len(seen) > most:
            break
        new = dict.fromkeys(i for i in neighbours(node) if i not in seen)
        seen.update(new)
        frontier += new
    return frontier


def _split(node: fx.Node, like: fx.Node, readers: dict[int, fx.Node]) -> None:
    arguments: tuple[Any, ...] = node.args
    gradient, given, *rest, mask = arguments
    results = node.meta["val"]
    for its_input, its_mask in ((like, [True, False, False]), (given, [False, *mask[1:]])):
        with node.graph.inserting_before(node):
            half = node.graph.call_function(_BACKWARD, (gradient, its_input, *rest, its_mask))
        half.meta = {key: value for key, value in node.meta.items() if key not in _ITS_OWN}
        half.meta["val"] = tuple(one if is_made else None for one, is_made in zip(results, its_mask, strict=True))
        for n in (n for n in readers if its_mask[n]):
            readers[n].replace_input_with(node, half)
    node.graph.erase_node(node)


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
