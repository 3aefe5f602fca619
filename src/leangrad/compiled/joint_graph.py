"""Converts AOTAutograd's joint graph of forward and backward to a graph of the policy.

[Note: decisions of forward] Inductor may round a value differently, in its last bit, where it recomputes the value in
another kernel. For a derivative that is harmless. For a decision of forward (a comparison, a rounding, an index) it is
not: backward could decide differently. So a decision is recomputed only from inputs that are known to have forward's
bits: values that are never recomputed, and what ops that do not round compute from them. A comparison that only
backward computes, such as where ReLU was cut off, is no decision of forward: it chooses between two derivatives at a
kink, and either is correct. The exception is an `eq` or `ne` by which backward looks for the element that a maximum was
taken from: with another last bit it would find none. Such a mask counts as a decision too.

[Note: half precision] Inside a kernel Inductor computes in single precision: it rounds a value of half precision where
it writes it to memory, but not where another op of the same kernel reads it. So such a value, whether kept or
recomputed, may lack bits that a decision of forward has seen. Of half-precision values only the graph's inputs, and
what ops that do not round compute from them, have known bits. A cast with a single reader is never written to memory,
neither in forward nor in backward.

[Note: changed inputs] An input that forward writes into, for instance a buffer, holds another value in backward. Its
old value can neither be kept nor read again; only what was computed from it can be kept. Where backward reads the old
value itself, forward copies it first (`copy_changed_inputs`).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from leangrad._torch import compiler
from leangrad.compiled.convolutions import is_weight_of_one_channel
from leangrad.loss.graph_op import LOSS_OP
from leangrad.ops.linear_cross_entropy import chunk_bytes
from leangrad.policy.graph import Graph, Value
from leangrad.policy.kernels import WINDOWS
from leangrad.policy.ops import is_discrete, is_heavy, is_source, work_of

__all__ = ["copy_changed_inputs", "op_name", "read_joint_graph"]

VIEWS = {
    "alias", "as_strided", "broadcast_in_dim", "chunk", "detach", "diagonal", "expand", "lift_fresh", "movedim",
    "narrow", "permute", "real", "imag", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as", "view_as_complex", "view_as_real", "_unsafe_view",
}  # fmt: skip
# Ops that Inductor computes inside the kernels that read their result, beside those that are tagged pointwise.
INLINED = {
    "arange", "clone", "constant_pad_nd", "convert_element_type", "copy", "embedding", "empty", "expand", "eye", "flip",
    "full", "full_like", "gather", "index", "index_select", "inductor_lookup_seed", "inductor_random", "iota", "ones",
    "ones_like", "rev", "roll", "scalar_tensor", "select_scatter", "slice_scatter", "tril", "triu", "where", "zeros",
    "zeros_like", "_to_copy", "_unsafe_index", "repeat",
}  # fmt: skip
# Ops that do not round: from the same inputs they compute the same bits in any kernel.
EXACT = VIEWS | {
    "abs", "amax", "amin", "arange", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "cat", "clamp",
    "clamp_max", "clamp_min", "clone", "constant_pad_nd", "convert_element_type", "copy", "embedding", "eye", "flip",
    "full", "full_like", "gather", "index", "index_select", "inductor_lookup_seed", "inductor_random", "iota",
    "logical_and", "logical_not", "logical_or", "logical_xor", "max", "maximum", "min", "minimum", "neg", "ones",
    "ones_like", "relu", "repeat", "roll", "scalar_tensor", "select_scatter", "slice_scatter", "stack", "tril",
    "triu", "where", "zeros", "zeros_like", "_to_copy", "_unsafe_index",
}  # fmt: skip
POOLS = {"avg_pool2d", "avg_pool3d", "avg_pool2d_backward", "avg_pool3d_backward"}
MOVES = VIEWS | {"clone", "convert_element_type", "gather", "index", "index_select", "_to_copy", "_unsafe_index"}
OVERLAP = 4  # a pool reads by windows if an element lies in at least so many of them
SINGLE = 24  # bits of a float32's significand
REDUCES = 4  # an op that reads more than so many times the bytes of its result computes a statistic, which is kept
OP_DTYPE, OP_NEEDS_WEIGHT = 10, 12  # positions of two arguments of the fused loss
INLINE_SHARE = 20  # computing a value inside its reader costs about 1/20 of writing and reading it


def read_joint_graph(graph: fx.Graph, info: Any, *, fused: bool) -> tuple[Graph, list[fx.Node]]:
    """Return the policy's graph of a joint graph, and the node of each of its values.

    info: torch's own classification of the nodes.
    fused: True if pointwise ops are computed inside the kernels that read them, where they may round differently;
        False for a graph that runs op by op and computes the same bits each time.
    """
    reader = _Reader(graph, info, fused)
    return Graph([reader.value(node) for node in reader.nodes]), reader.nodes


def copy_changed_inputs(graph: fx.Graph) -> None:
    """Make readers of inputs that forward writes into read a copy of the old value: see [Note: changed inputs]."""
    changed = compiler.changed_inputs(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in (node for node in inputs if node in changed and not _is_strided_over(node)):
        with graph.inserting_after(inputs[-1]):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        node.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy and not _writes_into(user))


def _is_strided_over(node: fx.Node) -> bool:
    """Whether an op reads the memory of an input by strides and offsets that a copy of it would not have."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.is_contiguous() and value.storage_offset() == 0:
        return False
    views = [node]
    for view in views:
        views += [user for user in view.users if _is_one_of(user, VIEWS)]
    return any(_is_one_of(view, {"as_strided"}) for view in views)


def _writes_into(user: fx.Node) -> bool:
    is_mutable = isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable
    return user.op == "output" or is_mutable


class _Reader:
    def __init__(self, graph: fx.Graph, info: Any, fused: bool) -> None:
        self.info, self.fused = info, fused
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.number = {node: n for n, node in enumerate(self.nodes)}
        (output,) = (node for node in graph.nodes if node.op == "output")
        self.outputs = set(output.all_input_nodes)
        self.changed = compiler.changed_inputs(graph)
        self.exact: dict[fx.Node, bool] = {}

    def value(self, node: fx.Node) -> Value:
        is_backward = node in self.info.tangents_closure
        is_view = self._is_view(node)
        is_standing = self._is_standing(node)
        policy = compiler.user_policy(node)
        is_fixed = not is_view and policy != "recompute" and (policy == "save" or self._is_fixed(node))
        self.exact[node] = (is_fixed and not self._may_be_unrounded(node)) or is_standing or self._is_exact(node)
        nbytes = _size(node) if compiler.can_be_kept(node) else 0  # the elements of a tuple have their own
        can_inline = self.fused and self._can_inline(node)
        moved = 0 if is_view or node.target is operator.getitem else _size(node) + sum(map(_size, node.all_input_nodes))
        windows = node.all_input_nodes[:1] if can_inline and _has_windows(node) else []
        price = moved + WINDOWS * sum(map(_size, windows))  # a value read by windows is written to memory first
        return Value(
            nbytes=nbytes,
            inputs=tuple(self.number[i] for i in node.all_input_nodes),
            is_backward=is_backward,
            is_fixed=is_fixed,
            is_forced=policy == "recompute" and not is_view,
            can_be_kept=compiler.can_be_kept(node) and node not in self.changed,
            view_of=self.number[node.all_input_nodes[0]] if is_view else None,
            is_inlined=self.fused and _is_inlined(node) and not is_view,
            can_inline=can_inline,
            is_standing=is_standing,
            is_output=node in self.outputs and (is_backward or self.info.is_required_fw(node)),
            is_asked_for=not is_backward and node in self.info.required_bw_nodes,
            price=price if self._is_written_in_backward(node) else price // INLINE_SHARE,
            work=0 if can_inline else _work(node, moved),
            scratch=_scratch(node),
            across=() if is_view or not can_inline else self._read_across(node),
            windows=tuple(self.number[i] for i in windows),
        )

    def _read_across(self, node: fx.Node) -> tuple[int, ...]:
        """Return the inputs of the node's own shape whose rows lie along another dimension: another memory format."""
        shape, rows = compiler.shape_of(node), compiler.dimension_of_rows(node)
        inputs = [i for i in node.all_input_nodes if compiler.shape_of(i) == shape]
        return tuple(self.number[i] for i in inputs if compiler.dimension_of_rows(i) != rows)

    def _is_standing(self, node: fx.Node) -> bool:
        """Whether the node's memory is held outside of the step anyway: a parameter, or an input without gradient.

        Any other input that requires a gradient was made by an earlier graph, and lives on only if this one keeps it.
        """
        if node.op != "placeholder":
            return node.op == "get_attr" and compiler.can_be_kept(node)  # both graphs contain the body of a branch
        value = node.meta.get("val")
        needs_gradient = isinstance(value, Tensor) and value.requires_grad
        is_held = node in self.info.static_lifetime_input_nodes or not needs_gradient
        return is_held and node not in self.changed and node not in self.info.tangents_closure

    def _is_fixed(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return True
        if node.op != "call_function" or node.target is operator.getitem or compiler.is_symbol(node):
            return False
        if not isinstance(node.target, torch._ops.OpOverload):
            return True  # a higher-order op, a user-defined kernel
        if torch.Tag.nondeterministic_seeded in node.target.tags or is_source(op_name(node)):
            return True
        if self.fused and self._is_decision(node):
            return not all(self.exact[i] for i in node.all_input_nodes)  # see [Note: decisions of forward]
        if not self.info.is_required_fw(node):
            return False  # it runs once, in forward or in backward
        if not _is_torchs(node.target):
            return True  # a custom op, a collective
        if self.fused and is_weight_of_one_channel(node):
            return True  # see [Note: formats of convolutions]
        pointwise = torch.Tag.pointwise in node.target.tags
        if is_heavy(op_name(node)) and not pointwise:
            return True
        return _size(node) * REDUCES < sum(map(_size, node.all_input_nodes)) and not pointwise

    def _is_decision(self, node: fx.Node) -> bool:
        """Whether a difference in the last bit of its inputs may matter: see [Note: decisions of forward]."""
        if node in self.info.tangents_closure:
            return False
        if not self.info.is_required_fw(node):
            return op_name(node) in ("eq", "ne") and any(map(_is_reduced, node.all_input_nodes))
        if is_heavy(op_name(node)):
            return False  # it is fixed anyway
        rounds_to_integer = _is_integer(node) and isinstance(node.meta.get("val"), Tensor)
        return is_discrete(op_name(node)) or (rounds_to_integer and not all(map(_is_integer, node.all_input_nodes)))

    def _is_exact(self, node: fx.Node) -> bool:
        """Whether the value has forward's bits if it is recomputed."""
        if not self.fused or node.op in ("placeholder", "get_attr"):
            return True
        if _is_integer(node) and all(_is_integer(i) for i in node.all_input_nodes):
            return all(self.exact[i] for i in node.all_input_nodes)
        known = node.target is operator.getitem or compiler.is_symbol(node) or _is_one_of(node, EXACT)
        return known and all(self.exact[i] for i in node.all_input_nodes) and not self._loses_bits(node)

    def _may_be_unrounded(self, node: fx.Node) -> bool:
        """Whether a reader in forward may see more bits than are kept: see [Note: half precision]."""
        is_made = node.op == "call_function" and not _is_one_of(node, EXACT)
        return self.fused and is_made and 0 < _precision(node) < SINGLE

    def _loses_bits(self, node: fx.Node) -> bool:
        """Whether the node rounds to half precision, and only some of its readers may see the rounded value."""
        given = max(map(_precision, node.all_input_nodes), default=0)
        return 0 < _precision(node) < min(given, SINGLE) and len(node.users) > 1

    def _is_view(self, node: fx.Node) -> bool:
        """Whether the node's result, or each tensor of it, is a view of the node's first input."""
        if node.op != "call_function" or not node.all_input_nodes:
            return False
        first = node.all_input_nodes[0]
        if node.target is operator.getitem:
            return _is_one_of(first, VIEWS)
        if not _is_one_of(node, {"reshape"}):  # a reshape may copy: below
            return _is_one_of(node, VIEWS)
        mine, base = compiler.storage_of(node), compiler.storage_of(first)
        return mine is None or base is None or mine == base

    def _can_inline(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return False
        return _is_torchs(node.target) and not is_heavy(op_name(node))

    def _is_written_in_backward(self, node: fx.Node) -> bool:
        """Whether the value, if it is recomputed in backward, is written to memory, not computed inside its readers."""
        frontier, seen = [node], {node}
        while frontier:
            for user in frontier.pop().users:
                if user.op == "output" or user in seen:
                    continue
                seen.add(user)
                if self._is_view(user) or user.target is operator.getitem:
                    frontier.append(user)
                elif not self.info.is_required_fw(user) and not self._can_inline(user):
                    return True
        return not (self.fused and _is_inlined(node))


def _is_reduced(node: fx.Node) -> bool:
    """Whether a value is the result of a reduction, or of one over given indices, up to the ops in ``MOVES``."""
    while _is_one_of(node, MOVES) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    if node.op != "call_function":
        return False
    elements = compiler.elements_of
    is_smaller = elements(node) < max(map(elements, node.all_input_nodes), default=0)
    return is_smaller or _is_one_of(node, {"scatter_reduce", "index_reduce", "segment_reduce"})


def _is_one_of(node: fx.Node, names: set[str]) -> bool:
    """Whether a node calls one of torch's own ops with one of these names, not a library's op of the same name."""
    return isinstance(node.target, torch._ops.OpOverload) and _is_torchs(node.target) and op_name(node) in names


def _is_torchs(op: torch._ops.OpOverload) -> bool:
    return op.namespace in ("aten", "prims", "inductor_prims")


def op_name(node: fx.Node) -> str:
    """Return the name of a node's op without namespace and overload."""
    target: Any = node.target
    return target._opname if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def _is_inlined(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or _is_one_of(node, INLINED)


def _has_windows(node: fx.Node) -> bool:
    """Whether the node is a pool, forward or backward, that reads each element in ``OVERLAP`` windows or more."""
    if not _is_one_of(node, POOLS):
        return False
    first = 2 if "backward" in op_name(node) else 1
    window, steps = [*node.args[first : first + 2], ()][:2]
    return bool(steps) and math.prod(window) >= OVERLAP * math.prod(steps)  # type: ignore[arg-type]


def _is_integer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex())


def _precision(node: fx.Node) -> int:
    """Return the bits of the significand of a float tensor; 0 for anything else."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or _is_integer(node):
        return 0
    return round(-math.log2(torch.finfo(value.dtype).eps)) + 1


def _size(node: fx.Node) -> int:
    return compiler.size_of(node)


def _work(node: fx.Node, moved: int) -> int:
    if node.op != "call_function":
        return moved
    shapes = [compiler.shape_of(i) for i in node.all_input_nodes]
    return work_of(op_name(node), shapes, compiler.elements_of(node), moved)


def _scratch(node: fx.Node) -> int:
    """Return the bytes that the fused loss allocates while it runs, with its results, which are elements of a tuple.

    These are the logits of a chunk, casts of its inputs, and the results. Of any other op: 0.
    """
    if node.target is not LOSS_OP:
        return 0
    x, weight, dtype = node.args[0], node.args[1], node.args[OP_DTYPE]
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    (tokens, hidden), (words, _) = compiler.shape_of(x), compiler.shape_of(weight)
    needs_weight = bool(node.args[OP_NEEDS_WEIGHT])
    chunk = chunk_bytes(tokens, hidden, words, x.meta["val"].device.type, dtype, needs_weight=needs_weight)  # type: ignore[arg-type]
    casts = [_size(one) for one in (x, weight) if one.meta["val"].dtype != dtype]
    return chunk + sum(casts) // 2 + _size(node)
