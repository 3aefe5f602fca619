"""Gives readers in backward their own copy of a recomputed value: see [Note: copies] in `leangrad.policy.copies`.

Inductor computes a value inside the kernels that read it only as long as nothing requires it in memory and few of its
readers compute it again. So a reader that is to compute the value again gets nodes of its own, and each kernel has its
own copy of the ops between the value and itself. The nodes that nothing reads any more are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

__all__ = ["NamedCopy", "insert_copies"]


@dataclass(frozen=True)
class NamedCopy:
    """A `leangrad.policy.copies.Copy`, by the names of its nodes."""

    value: str
    ops: frozenset[str]
    readers: frozenset[str]
    inlined: frozenset[str]
    kernels: frozenset[str]

    def names(self) -> frozenset[str]:
        """Return the names of all nodes."""
        return self.ops | self.readers | self.inlined | self.kernels


def insert_copies(graph: fx.Graph, copies: Sequence[NamedCopy]) -> None:
    """Insert copies of recomputed values into the graph of backward; a copy that lacks one of its nodes is left out."""
    nodes = {node.name: node for node in graph.nodes if _may_be_copied(node)}
    copies = [copy for copy in copies if copy.names() <= nodes.keys()]
    if not copies:
        return
    readers = {copy.value: copy.readers for copy in copies}
    repeated = frozenset[str]().union(*(copy.ops | copy.inlined for copy in copies))
    for name in sorted(frozenset[str]().union(*(copy.kernels for copy in copies))):
        _copy_for(nodes[name], readers, repeated)
    graph.eliminate_dead_code()


def _may_be_copied(node: fx.Node) -> bool:
    """Whether the node is an op, and not one that defines a size: that may have one definition only."""
    return node.op == "call_function" and "unbacked_bindings" not in node.meta


def _copy_for(kernel: fx.Node, readers: dict[str, frozenset[str]], repeated: frozenset[str]) -> None:
    """Give one kernel its own copies of all ops in ``repeated`` that it is computed from.

    readers: for each copied value, the nodes that use a copy, each one of its own; other nodes read the value itself.
    """
    done: dict[tuple[fx.Node, fx.Node | None], fx.Node] = {}

    def own(node: fx.Node, reader: fx.Node, user: fx.Node | None) -> fx.Node:
        """Return the copy of ``node`` that its ``reader`` uses; ``user``: of the value it is computed for, if any."""
        if node.name not in repeated or reader.name not in readers.get(node.name, (reader.name,)):
            return node
        user = reader if node.name in readers else user
        if (node, user) not in done:
            inputs = {i: own(i, node, user) for i in node.all_input_nodes}
            with kernel.graph.inserting_before(kernel):
                done[node, user] = kernel.graph.node_copy(node, inputs.__getitem__)
        return done[node, user]

    for node in kernel.all_input_nodes:
        kernel.replace_input_with(node, own(node, kernel, None))
