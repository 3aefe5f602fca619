"""Finds logits in a captured graph: a projection to a vocabulary, and the nodes that its result goes through.

`leangrad.loss.logit_ops` defines which ops are supported there, as it does for lazy logits. What is known of a node is
its example value, the tensor that stands for its result during capture: shape, dtype, device and ``requires_grad``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from leangrad._torch import compiler
from leangrad.compiled.side_outputs import writes
from leangrad.loss.logit_ops import RULES, Change, Logits, fit_dtypes, is_large, is_vocabulary

__all__ = ["Chain", "Projection", "known", "logits_of", "nodes_between", "place_of_logits", "requires_grad", "value_of"]

METADATA = ("size", "dim", "numel", "stride")  # methods that Dynamo calls on a tensor whose sizes are symbolic
OPERATORS: dict[Any, str] = {
    operator.getitem: "__getitem__",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.add: "add",
    operator.matmul: "matmul",
}
COMMUTES = ("mul", "multiply", "add")
PRODUCTS = ("matmul", "mm", "__matmul__")


@dataclass
class Projection:
    """A node that computes a projection to a vocabulary, and its operands x, W and b."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    @classmethod
    def of(cls, node: fx.Node) -> Projection | None:
        """Return a node's projection; None if it is none to a vocabulary, or the fused loss does not support it."""
        x, weight, bias = _operands(node)
        if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or not isinstance(bias, fx.Node | None):
            return None
        made, tensors = value_of(node), [value_of(one) for one in (x, weight, bias) if one is not None]
        if made is None or not all(one is not None and compiler.is_fake(one) for one in tensors):
            return None
        words, hidden = known(weight).shape if known(weight).dim() == 2 else (None, None)
        if type(hidden) is not int or type(words) is not int or made.dim() < 2:
            return None
        dtypes = {one.dtype for one in tensors if one is not None}
        is_taken = fit_dtypes(dtypes, is_autocast=dtypes != {made.dtype}) and is_vocabulary(words, hidden)
        return cls(node, x, weight, bias) if is_taken and is_large(compiler.bytes_of(made)) else None

    @property
    def is_autocast(self) -> bool:
        """Whether autocast casts an operand of the projection."""
        inputs = [one for one in (self.x, self.weight, self.bias) if one is not None]
        return any(known(one).dtype != self.dtype for one in inputs)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the projection was computed in while the graph was captured."""
        return known(self.node).dtype

    def logits(self) -> Logits:
        """Return what is known of the projection's result."""
        made, x = known(self.node), known(self.x)
        bias_dtype = None if self.is_autocast else x.dtype
        return Logits(tuple(made.shape), made.dtype, made.device, x.shape[-1], bias_dtype=bias_dtype)


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """Return x, W and b of `F.linear(x, W, b)` or `x @ W.t()`; three times None if the node is neither."""
    if node.op == "call_function" and node.target is F.linear and not node.kwargs:
        return (*node.args, None)[:3]  # type: ignore[return-value]
    if name_of(node) in PRODUCTS and len(node.args) == 2 and not node.kwargs:
        return node.args[0], _transposed(node.args[1]), None
    return None, None, None


def _transposed(node: Any) -> fx.Node | None:
    """Return the matrix that a node transposes; None if it does not transpose one."""
    if not isinstance(node, fx.Node) or not node.args:
        return None
    matrix, *dims = node.args
    is_property = node.target is getattr and dims in (["T"], ["mT"])
    is_call = (name_of(node), *dims) in (
        ("t",),
        *(("transpose", *pair) for pair in ((0, 1), (1, 0), (-2, -1), (-1, -2))),
    )
    value, made = value_of(matrix), value_of(node)
    if value is None or made is None or value.dim() != 2 or node.kwargs or not (is_property or is_call):
        return None
    return matrix if value.requires_grad == made.requires_grad else None  # type: ignore[return-value]


class Chain:
    """A projection, and the nodes that its logits go through."""

    def __init__(self, projection: Projection, between: list[fx.Node]) -> None:
        self.projection, self.between = projection, between
        self.changes: list[Change] = []
        self.bias: fx.Node | None = None  # a bias that is added after the projection; None if there is none
        self.logits = projection.logits()

    @classmethod
    def to(cls, end: Any) -> Chain | None:
        """Return the chain that ends in the result of a node; None if it has none, or an op on the way needs values."""
        between: list[fx.Node] = []
        while isinstance(end, fx.Node):
            projection = Projection.of(end)
            if projection is not None:
                chain = cls(projection, between[::-1])
                return chain if all(map(chain._take, chain.between)) else None
            between.append(end)
            end = logits_of(end)
        return None

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes whose results are logits."""
        return [self.projection.node, *self.between]

    def _take(self, node: fx.Node) -> bool:
        """Add a node to what is known of the logits; False if no rule covers its op."""
        rule, made, place = RULES.get(name_of(node)), value_of(node), place_of_logits(node)
        if rule is None or made is None or place is None:
            return False
        others = [one for one in node.all_input_nodes if one is not logits_of(node)]
        rest = (*node.args[:place], *node.args[place + 1 :])
        try:
            change = rule(self.logits, *fx.map_arg(rest, _argument), **fx.map_arg(node.kwargs, _argument))
        except TypeError:  # arguments that the rule does not know
            return False
        if change is None:
            return False
        if change.bias is not None:
            (self.bias,) = others
        self.changes.append(change)
        before = self.logits
        self.logits = replace(
            before,
            shape=tuple(made.shape),
            dtype=made.dtype,
            before=before.before if change.before is None else change.before,
            after=before.after if change.after is None else change.after,
            is_transposed=before.is_transposed or change.is_transposed,
            is_part=before.is_part or change.pick is not None,
            bias_dtype=None if change.bias is not None else before.bias_dtype,
        )
        words = made.shape[1 if self.logits.is_transposed else -1] if made.dim() > 1 else None
        return type(words) is int and words == known(self.projection.node).shape[-1]

    def is_alone(self, output: fx.Node, reader: fx.Node, end: fx.Node) -> bool:
        """Whether only ``reader`` reads logits in the graph, and those that it returns can be computed outside of it.

        end: the loss; the fused op in its place reads what the projection reads.
        """
        for node, after in zip(self.nodes, [*self.between, reader], strict=True):
            if any(user not in (after, output) and not _reads_nothing(user) for user in node.users):
                return False
        returned = [place for place, node in enumerate(self.nodes) if node in output.all_input_nodes]
        until = output if returned else end
        if self._stops_gradients(end) or any(map(writes, nodes_between(self.projection.node, until))):
            return False
        before = self.between[: max(returned, default=0)]
        read = [one for node in before for one in node.all_input_nodes if one is not logits_of(node)]
        needed = [self.projection.weight, self.projection.bias, *read] if returned else []
        return all(one is None or one.op == "placeholder" for one in needed)

    def _stops_gradients(self, end: fx.Node) -> bool:
        """Whether ``end`` requires a gradient, and some node of the chain does not although one of its inputs does."""
        read = (self.projection.x, self.projection.weight, self.projection.bias)
        is_graded = any(map(requires_grad, read))
        nodes = self.nodes if requires_grad(end) else []
        for node in nodes:
            is_graded = is_graded or any(map(requires_grad, node.all_input_nodes))
            if is_graded != requires_grad(node):
                return True
        return False


def nodes_between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes after ``first`` and before ``last``."""
    while (first := first.next) is not last:
        yield first


def value_of(node: Any) -> Tensor | None:
    """Return the tensor that stands for a node's result during capture; None if the result is no tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def known(node: fx.Node) -> Tensor:
    """Return the same as `value_of`, for a node whose result is a tensor."""
    value = value_of(node)
    assert value is not None
    return value


def requires_grad(node: Any) -> bool:
    """Whether ``node`` is a node whose result is a tensor that requires a gradient."""
    value = value_of(node)
    return value is not None and value.requires_grad


def name_of(node: fx.Node) -> str:
    """Return the name of the method or function that a node calls, as in `RULES`; empty if it is not known."""
    target: Any = node.target
    if node.op == "call_method":
        return str(target)
    name = OPERATORS.get(target, getattr(target, "__name__", ""))
    is_known = node.op == "call_function" and (target in OPERATORS or target is getattr(torch, name, None))
    return name if is_known else ""


def place_of_logits(node: fx.Node) -> int | None:
    """Return the position of the operand that would be logits: the first, or the second of `0.5 * logits`."""
    operands = node.args[: 2 if name_of(node) in COMMUTES else 1]
    return next((place for place, one in enumerate(operands) if value_of(one) is not None), None)


def logits_of(node: fx.Node) -> fx.Node | None:
    """Return the node whose result ``node`` would read as logits; None if it reads no tensor there."""
    place = place_of_logits(node)
    return None if place is None else node.args[place]  # type: ignore[return-value]


def _argument(node: fx.Node) -> Any:
    """Return what a rule gets for a node: its tensor, or a proxy of an unknown number, which it may only pass on."""
    value = value_of(node)
    return fx.Proxy(node, fx.proxy.GraphAppendingTracer(node.graph)) if value is None else value


def _reads_nothing(node: fx.Node) -> bool:
    """Whether a node reads no values: it reads sizes, which are known in tracing, or its result has no reader."""
    return (node.op == "call_method" and node.target in METADATA) or (not node.users and name_of(node) in RULES)
