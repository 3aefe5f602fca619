"""Replaces losses of a captured graph: a projection to a vocabulary and its cross entropy become one op without logits.

[Note: the pattern] A graph that Dynamo has captured calls `F.cross_entropy`, or `F.nll_loss` of a log-softmax, on the
result of a projection, perhaps after a cast, a shift, a view, a scale or a softcap. `fuse_losses` replaces such a loss
by ``torch.ops.leangrad.linear_cross_entropy``, at the place where the loss stood. The op computes in the dtype that the
projection had while it was captured, so autocast takes effect wherever it was switched on. The loss is left as it is
if anything else reads the logits, another loss for example, if the graph writes to a tensor after the projection, or
if gradients are switched off for a part of the pattern.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from leangrad._torch import compiler
from leangrad.compiled.lazy_outputs import LazyOutputs
from leangrad.compiled.logits_chain import Chain, known, nodes_between, place_of_logits, requires_grad, value_of
from leangrad.loss.graph_op import LOSS_OP
from leangrad.loss.logit_ops import softcap_and_scale, takes_loss

__all__ = ["fuse_losses"]

LOSSES = (F.cross_entropy, F.nll_loss)
REDUCTIONS = ("mean", "sum")


def fuse_losses(gm: fx.GraphModule) -> LazyOutputs | None:
    """Rewrite the losses of ``gm`` that need no logits. Returns a wrapper that adds logits, if ``gm`` returned any."""
    (output,) = gm.graph.find_nodes(op="output")
    if not isinstance(output.args[0], tuple | list):
        return None
    nodes = [node for kind in LOSSES for node in gm.graph.find_nodes(op="call_function", target=kind)]
    losses = [one for one in map(_Loss.of, nodes) if one is not None]
    patterns = [one for one in losses if one.chain.is_alone(output, one.reader, one.node)]
    chains = [one.chain for one in patterns]
    ends = _ends_of(output, chains) if compiler.ends_at_a_break() else []
    ends = [chain for chain in ends if chain.projection.x.op != "placeholder"]  # else it may be all of the graph
    if not chains and not ends:
        return None
    lazy = LazyOutputs(gm.graph, output)
    for chain in (*chains, *ends):
        lazy.put_off(chain, has_loss=chain in chains)
    lazy.finish()
    for pattern in patterns:
        pattern.fuse(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return lazy if lazy.projections else None


def _ends_of(output: fx.Node, others: Sequence[Chain]) -> list[Chain]:
    """Return the chains of logits with a gradient that a graph ends with: see [Note: broken graphs].

    others: the chains that end in a loss; their projections are left out.
    """
    returned = [node for node in output.args[0] if requires_grad(node)]  # type: ignore[union-attr]
    chains = [
        chain for chain in map(Chain.to, returned) if chain is not None and chain.is_alone(output, output, output)
    ]
    taken = {chain.projection.node for chain in others}
    found: dict[fx.Node, Chain] = {}
    for chain in sorted(chains, key=lambda chain: -len(chain.between)):  # the longest contains its other ends
        found.setdefault(chain.projection.node, chain)
    return [chain for node, chain in found.items() if node not in taken]


class _Loss:
    """A node that computes the cross entropy of the logits at the end of a chain."""

    def __init__(self, node: fx.Node, reader: fx.Node, chain: Chain, given: dict[str, Any]) -> None:
        self.node, self.reader, self.chain, self.given = node, reader, chain, given

    @classmethod
    def of(cls, node: fx.Node) -> _Loss | None:
        """Return the loss of a node; None if it is no loss of logits, or one that the fused loss does not support."""
        try:
            bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
        except TypeError:
            return None
        bound.apply_defaults()
        given = {"label_smoothing": 0.0} | bound.arguments
        is_whole = node.target is F.cross_entropy
        reader = node if is_whole else given["input"]
        chain = Chain.to(given["input"] if is_whole else _read_by_log_softmax(reader))
        if chain is None:
            return None
        found = cls(node, reader, chain, given)
        return found if found._is_taken() else None

    def _is_taken(self) -> bool:
        given, logits = self.given, self.chain.logits
        target, weight = value_of(given["target"]), value_of(given["weight"])
        return (
            value_of(self.node) is not None
            and target is not None
            and (given["weight"] is None or (weight is not None and weight.device == logits.device))
            and target.device == logits.device
            and given["reduction"] in REDUCTIONS
            and type(given["ignore_index"]) is int
            and type(given["label_smoothing"]) in (int, float)
            and 0 <= given["label_smoothing"] <= 1
            and takes_loss(
                logits, target.dtype, size_average=given["size_average"], reduce=given["reduce"], weight=weight
            )
        )

    def fuse(self, graph: fx.Graph) -> None:
        """Replace the loss by the fused op."""
        chain, loss, given, made = self.chain, self.node, self.given, known(self.node)
        projection, added = chain.projection, chain.bias
        softcap, scale = softcap_and_scale(chain.logits)
        before = loss.prev
        with graph.inserting_before(loss):
            x = fx.Proxy(projection.x, fx.proxy.GraphAppendingTracer(graph))
            for change in chain.changes:
                x = x if change.pick is None else change.pick(x)
            bias = projection.bias
            if added is not None:
                bias = graph.call_method("reshape", (added, -1))
                bias = bias if projection.bias is None else graph.call_function(operator.add, (projection.bias, bias))
            readers = ((projection.x,), (projection.weight,), (projection.bias, added))
            needs = (made.requires_grad and any(map(requires_grad, nodes)) for nodes in readers)
            arguments = (
                x.reshape(-1, chain.logits.hidden).node,
                projection.weight,
                bias,
                given["weight"],
                graph.call_method("reshape", (given["target"], -1)),
                given["reduction"],
                given["ignore_index"],
                float(given["label_smoothing"]),
                softcap,
                scale,
                projection.dtype,
                *needs,
            )
            op = graph.call_function(LOSS_OP, arguments)
            fused = graph.call_function(operator.getitem, (op, 0))
            fused = graph.call_method("to", (fused, made.dtype))
        for node in nodes_between(before, loss):
            _note_value(node)
        fused.meta = dict(loss.meta)
        loss.replace_all_uses_with(fused)
        for node in (loss, *([] if self.reader is loss else [self.reader]), *reversed(chain.nodes)):
            if not node.users:
                graph.erase_node(node)


def _read_by_log_softmax(node: Any) -> fx.Node | None:
    """Return the logits whose log-softmax over the second dimension ``node`` computes for one reader; else None."""
    if not isinstance(node, fx.Node) or len(node.users) != 1 or place_of_logits(node) != 0:
        return None
    is_function = node.op == "call_function" and node.target in (F.log_softmax, torch.log_softmax)
    if not is_function and not (node.op == "call_method" and node.target == "log_softmax"):
        return None
    logits, value = node.args[0], value_of(node.args[0])
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    is_over_words = value is not None and type(dim) is int and value.dim() > 1 and dim % value.dim() == 1
    return logits if is_over_words and not _rounds(node) else None  # type: ignore[return-value]


def _rounds(node: fx.Node) -> bool:
    """Whether a log-softmax, which the loss is computed from, is rounded to less than single precision."""
    return known(node).dtype not in (torch.float32, torch.float64)


def _note_value(node: fx.Node) -> None:
    """Set the example value of a new node: torch's caches accept a method call only if they know its tensor."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["example_value"])
    with torch.no_grad():
        if node.op == "call_method":
            value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            value = node.target(*args, **kwargs)  # type: ignore[operator]
    node.meta["example_value"] = value
