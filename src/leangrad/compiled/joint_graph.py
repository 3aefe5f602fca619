"""AOTAutograd's joint graph of forward and backward, written down as a graph of the policy.

[Note: decisions of forward] Inductor may round a value that is made again in another kernel differently in its last
bit. For a derivative that is harmless. For a decision that forward has taken (a comparison, a rounding, an index) it is
not: backward would take another. So a decision is made again only from inputs whose bits are known to be forward's:
what is never made again, and what ops that do not round make of it. A comparison that only backward asks, such as where
ReLU was cut off, chooses between two derivatives at a kink, and either is one. But where backward looks for the element
that a maximum was taken from, by `eq`, it would find none: such a mask is a decision too.

[Note: half precision] Inside a kernel Inductor computes in single precision: a value of half precision is rounded where
it is written, not where another op of the same kernel reads it. So what is kept of such a value, or made again, may
lack bits that a decision of forward has seen: only what was given, and what ops that do not round make of that, has
known bits. A cast that one reader alone has is never written, neither in forward nor in backward.

[Note: changed inputs] What forward writes into, a buffer for instance, holds something else in backward: its old value
can neither be kept nor be read again, only what was made of it. Where backward reads the old value itself, forward
makes a copy first (`copy_changed_inputs`).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from leangrad._torch import compiler
from leangrad.compiled.layouts import is_weight_of_one_channel
from leangrad.loss.graph_op import LOSS_OP
from leangrad.ops.linear_cross_entropy import chunk_bytes
from leangrad.policy.graph import Graph, Value
from leangrad.policy.kernels import WINDOWS
from leangrad.policy.ops import is_discrete, is_heavy, is_source
from leangrad.policy.work import work_of

__all__ = ["copy_changed_inputs", "op_name", "read_joint_graph"]

VIEWS = {
    "alias", "as_strided", "broadcast_in_dim", "chunk", "detach", "diagonal", "expand", "lift_fresh", "movedim",
    "narrow", "permute", "real", "imag", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as", "view_as_complex", "view_as_real", "_unsafe_view",
}  # fmt: skip
# Beside the ops that are tagged pointwise: what Inductor computes inside the kernels that read it.
INLINED = {
    "arange", "clone", "constant_pad_nd", "convert_element_type", "copy", "embedding", "empty", "expand", "eye", "flip",
    "full", "full_like", "gather", "index", "index_select", "inductor_lookup_seed", "inductor_random", "iota", "ones",
    "ones_like", "rev", "roll", "scalar_tensor", "select_scatter", "slice_scatter", "tril", "triu", "where", "zeros",
    "zeros_like", "_to_copy", "_unsafe_index", "repeat",
}  # fmt: skip
# Ops that do no arithmetic that rounds: of the same inputs they give the same bits in any kernel.
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
OVERLAP = 4  # windows that an element is in, from which on reading it so often counts
SINGLE = 24  # bits of a float32's significand
REDUCES = 4  # an op that reads so many times what it gives makes a statistic, which is kept
OP_DTYPE, OP_NEEDS_WEIGHT = 10, 12  # the places of two arguments of the fused loss
INLINE_SHARE = 20  # a value computed inside its reader costs about the 20th part of one that is written and read


def read_joint_graph(graph: fx.Graph, info: Any, *, fused: bool) -> tuple[Graph, list[fx.Node]]:
    """The graph of the policy, and the node of each of its values.

    info: torch's own classification of the nodes.
    fused: whether pointwise ops are computed inside the kernels that read them and may round otherwise there; a graph
        that is run op by op gives the same bits each time.
    """
    reader = _Reader(graph, info, fused)
    return Graph([reader.value(node) for node in reader.nodes]), reader.nodes


def copy_changed_inputs(graph: fx.Graph) -> None:
    """Let all read a copy of what forward writes into, so that the old value can be kept: [Note: changed inputs]."""
    changed = compiler.changed_inputs(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in (node for node in inputs if node in changed and not _is_strided_over(node)):
        with graph.inserting_after(inputs[-1]):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        node.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy and not _writes_into(user))


def _is_strided_over(node: fx.Node) -> bool:
    """Whether something reads the memory of an input by strides and offsets that a copy of it does not have."""
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
        nbytes = _size(node) if compiler.can_be_kept(node) else 0  # the parts of a tuple have their own
        can_inline = self.fused and self._can_inline(node)
        moved = 0 if is_view or node.target is operator.getitem else _size(node) + sum(map(_size, node.all_input_nodes))
        windows = node.all_input_nodes[:1] if can_inline and _has_windows(node) else []
        price = moved + WINDOWS * sum(map(_size, windows))  # what they read is written before
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
        """The inputs of its own shape whose rows are along another dimension than its own: another memory format."""
        shape, rows = compiler.shape_of(node), compiler.dimension_of_rows(node)
        inputs = [i for i in node.all_input_nodes if compiler.shape_of(i) == shape]
        return tuple(self.number[i] for i in inputs if compiler.dimension_of_rows(i) != rows)

    def _is_standing(self, node: fx.Node) -> bool:
        """A parameter, or what the caller holds anyway; not what an earlier graph made, which has a gradient."""
        if node.op != "placeholder":
            return node.op == "get_attr" and compiler.can_be_kept(node)  # the body of a branch is in both graphs
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
            return True  # a higher-order op, a kernel of the user's
        if torch.Tag.nondeterministic_seeded in node.target.tags or is_source(op_name(node)):
            return True
        if self.fused and self._is_decision(node):
            return not all(self.exact[i] for i in node.all_input_nodes)  # see [Note: decisions of forward]
        if not self.info.is_required_fw(node):
            return False  # it runs once, wherever that is
        if not _is_torchs(node.target):
            return True  # a custom op, a collective
        if self.fused and is_weight_of_one_channel(node):
            return True  # see [Note: formats of convolutions]
        pointwise = torch.Tag.pointwise in node.target.tags
        if is_heavy(op_name(node)) and not pointwise:
            return True
        return _size(node) * REDUCES < sum(map(_size, node.all_input_nodes)) and not pointwise

    def _is_decision(self, node: fx.Node) -> bool:
        """Whether a last bit of difference in its inputs may matter: see [Note: decisions of forward]."""
        if node in self.info.tangents_closure:
            return False
        if not self.info.is_required_fw(node):
            return op_name(node) in ("eq", "ne") and any(map(_is_reduced, node.all_input_nodes))
        if is_heavy(op_name(node)):
            return False  # it is fixed anyway
        rounds_to_integer = _is_integer(node) and isinstance(node.meta.get("val"), Tensor)
        return is_discrete(op_name(node)) or (rounds_to_integer and not all(map(_is_integer, node.all_input_nodes)))

    def _is_exact(self, node: fx.Node) -> bool:
        """Whether a value that is made again has the bits of forward."""
        if not self.fused or node.op in ("placeholder", "get_attr"):
            return True
        if _is_integer(node) and all(_is_integer(i) for i in node.all_input_nodes):
            return all(self.exact[i] for i in node.all_input_nodes)
        known = node.target is operator.getitem or compiler.is_symbol(node) or _is_one_of(node, EXACT)
        return known and all(self.exact[i] for i in node.all_input_nodes) and not self._loses_bits(node)

    def _may_be_unrounded(self, node: fx.Node) -> bool:
        """Whether a reader of forward may see more bits than are kept: see [Note: half precision]."""
        is_made = node.op == "call_function" and not _is_one_of(node, EXACT)
        return self.fused and is_made and 0 < _precision(node) < SINGLE

    def _loses_bits(self, node: fx.Node) -> bool:
        """Whether it rounds to half precision, and that may take place for one reader and not for another."""
        given = max(map(_precision, node.all_input_nodes), default=0)
        return 0 < _precision(node) < min(given, SINGLE) and len(node.users) > 1

    def _is_view(self, node: fx.Node) -> bool:
        """Whether a tensor, or each of several, shows the memory of its first input."""
        if node.op != "call_function" or not node.all_input_nodes:
            return False
        first = node.all_input_nodes[0]
        if node.target is operator.getitem:
            return _is_one_of(first, VIEWS)
        if not _is_one_of(node, {"reshape"}):  # which copies where it must
            return _is_one_of(node, VIEWS)
        mine, base = compiler.storage_of(node), compiler.storage_of(first)
        return mine is None or base is None or mine == base

    def _can_inline(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return False
        return _is_torchs(node.target) and not is_heavy(op_name(node))

    def _is_written_in_backward(self, node: fx.Node) -> bool:
        """Whether some kernel of backward reads it from memory, if it is made again."""
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
    """Whether a value is, but for its shape and place, the result of a reduction, also of one over given indices."""
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
    """Whether a node calls an op of torch's own with one of these names; a library's op of that name is another."""
    return isinstance(node.target, torch._ops.OpOverload) and _is_torchs(node.target) and op_name(node) in names


def _is_torchs(op: torch._ops.OpOverload) -> bool:
    return op.namespace in ("aten", "prims", "inductor_prims")


def op_name(node: fx.Node) -> str:
    """The name of an op without namespace and overload."""
    target: Any = node.target
    return target._opname if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def _is_inlined(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or _is_one_of(node, INLINED)


def _has_windows(node: fx.Node) -> bool:
    """Whether it is a pool, forward or backward, that reads each element in several windows."""
    if not _is_one_of(node, POOLS):
        return False
    first = 2 if "backward" in op_name(node) else 1
    window, steps = [*node.args[first : first + 2], ()][:2]
    return bool(steps) and math.prod(window) >= OVERLAP * math.prod(steps)  # type: ignore[arg-type]


def _is_integer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex())


def _precision(node: fx.Node) -> int:
    """The bits of the significand of a float tensor; 0 of anything else."""
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
    """What the fused loss takes while it runs: logits of a chunk, and its results, which are parts of a tuple."""
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
