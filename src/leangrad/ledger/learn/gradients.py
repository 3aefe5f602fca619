"""Computes which gradients are alive while backward runs each node, including gradients that wait for another branch.

Autograd sums the gradient of a tensor over all readers of the tensor, and only then runs the node that made it. So at a
join a gradient waits: the gradient of a U-Net's skip connection waits from the end of the decoder to the encoder, and
the gradient of ``x`` in ``x + f(x)`` waits until backward has passed through ``f``. The recorder of a step adds the
nodes of each call to a ``Graph`` as plain data. ``Graph.alive`` runs them in the order of autograd's engine (among the
nodes whose gradients are complete, the one made last runs first) and counts the memory of their gradients.

[Note: gradients that share memory] Some nodes pass on the memory of the gradient that they receive: both branches of an
addition get the same gradient, and the branches of a concatenation get views that keep the whole of it alive. The sum
over two branches allocates new memory, unless the gradient that waits is not a view and is the only holder of its
memory.

A parameter's gradient is counted only while the node that wrote it runs, because in most steps it is added to an
existing ``.grad``. With ``leaves_stay`` no parameter has a ``.grad`` yet, and the first gradient of each one stays
counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from leangrad import _torch
from leangrad.ledger.values.node_metadata import AccumulateGrad

__all__ = ["Graph"]

# Nodes whose gradients are views of the gradient that they receive: see [Note: gradients that share memory].
_NAMES = "Alias Cat Permute ReshapeAlias Squeeze Stack Sum T Transpose UnsafeView Unsqueeze View"
VIEWS = {f"{name}Backward{n}" for name in _NAMES.split() for n in range(3)}
# Nodes that pass on the gradient that they receive, unchanged, to operands of the same size.
WHOLE = {"AddBackward0", "CloneBackward0", "ExpandBackward0", "SubBackward0"}
# Nodes that write their gradient over the saved tensor that they read, if it was rebuilt for them alone: see
# ``loss/in_parts.py``.
OVERWRITING = {"InPartsBackward"}


class Edge(NamedTuple):
    """An input of a node that needs a gradient."""

    node: int  # sequence number of the node that made the input; LEAF for a parameter
    nr: int  # the output number of that node; for a parameter, its id
    nbytes: int  # bytes of the gradient of the input
    # NEW: the gradient has memory of its own; SAME: it is the gradient that the node receives; VIEW: a view of that.
    gives: str


class Node(NamedTuple):
    """A node of autograd's graph, as sizes only."""

    given: int  # bytes of the gradients that the node receives, one for each of its outputs
    edges: tuple[Edge, ...]  # its inputs that need a gradient


LEAF = -1
NEW, SAME, VIEW = "new", "same", "view"


class Graph:
    """The autograd nodes of one region, by sequence number."""

    def __init__(self, first: int) -> None:
        """``first``: the sequence number of the first node that the region can make."""
        self._first = first
        self._nodes: dict[int, Node] = {}
        self.overwriting: set[int] = set()  # numbers of the nodes that write over the saved tensor that they read

    def add(self, out: Any) -> None:
        """Add the new nodes behind ``out``, the result of a call; nodes made before the region are left out."""
        stack = [t.grad_fn for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, Tensor)]
        while stack:
            node: Any = stack.pop()
            if node is None or type(node) is AccumulateGrad:
                continue
            number = node._sequence_nr()
            if number >= self._first and number not in self._nodes:
                given = _torch.outputs_nbytes(node)
                self._nodes[number] = Node(given, _edges(node, given))
                if node.name() in OVERWRITING:
                    self.overwriting.add(number)
                stack.extend(before for before, _ in node.next_functions)

    def outputs_nbytes(self) -> int:
        """Return the bytes of the region's results: the outputs of all nodes that are the input of no other node."""
        read = {edge.node for node in self._nodes.values() for edge in node.edges}
        return sum(node.given for number, node in self._nodes.items() if number not in read)

    def alive(self, without: Collection[int] = (), *, leaves_stay: bool = False) -> dict[int, int]:
        """Return, for each node by its number, the peak bytes of gradients that are alive while the node runs.

        without: nodes at which backward does not begin, although no node reads their outputs; they do not run unless
            they receive a gradient.
        leaves_stay: whether parameters have no ``.grad`` yet, so that their gradients are new memory and stay.
        """
        return dict(_Engine(self._nodes, leaves_stay).run(without))


def _edges(node: Any, given: int) -> tuple[Edge, ...]:
    name = node.name()
    edges = []
    for place, (before, nr) in enumerate(node.next_functions):
        if before is not None:
            nbytes = _torch.output_nbytes(before, nr)
            whole = name in WHOLE and nbytes == given and not (place and _is_scaled(node, name))
            number = before._sequence_nr()
            if type(before) is AccumulateGrad:
                number, nr = LEAF, id(before.variable)
            edges.append(Edge(number, nr, nbytes, VIEW if name in VIEWS else SAME if whole else NEW))
    return tuple(edges)


def _is_scaled(node: Any, name: str) -> bool:
    """Whether the gradient of a sum's second operand differs from that of the sum: negated, or scaled by ``alpha``."""
    return name == "SubBackward0" or getattr(node, "_saved_alpha", 1) != 1


class _Memory:
    """Memory that one or more gradients hold; it is freed with its last holder."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.holders = nbytes, 0


class _Gradient(NamedTuple):
    """A gradient that waits for its node, or that a running node has received or written."""

    memory: _Memory
    is_view: bool = False


class _Engine:
    """Simulates autograd's engine on the sizes of gradients."""

    def __init__(self, nodes: dict[int, Node], leaves_stay: bool) -> None:
        self._nodes, self._leaves_stay = nodes, leaves_stay
        self._leaves: set[int] = set()  # ids of the parameters that have a gradient already
        self._waiting: dict[int, dict[int, _Gradient]] = {}  # gradients that wait, by node and output number
        self._alive = 0  # bytes of all gradients that are alive now

    def run(self, without: Collection[int]) -> Iterator[tuple[int, int]]:
        """Run the nodes, the one made last first; yield the number of each and the peak bytes alive while it ran.

        Nodes run in descending order of their numbers: all readers of a node's outputs were made after it. A node in
        ``without`` is skipped unless it has received a gradient.
        """
        for number in sorted(self._nodes, reverse=True):
            given = list(self._waiting.pop(number, {}).values())
            if given or number not in without:
                yield number, self._run(self._nodes[number], given)

    def _run(self, node: Node, given: list[_Gradient]) -> int:
        if not given:  # backward begins at this node
            given = [self._hold(_Gradient(_Memory(node.given)))]
        written = [self._hold(_written(edge, given[0])) for edge in node.edges]
        most = self._alive
        for gradient in given:
            self._let_go(gradient)
        for edge, gradient in zip(node.edges, written, strict=True):
            most = max(most, self._hand_on(edge, gradient))
        return most

    def _hand_on(self, edge: Edge, gradient: _Gradient) -> int:
        """Pass ``gradient`` to the node of ``edge``, where it waits or is added to one that waits.

        Returns the peak bytes alive during that addition; 0 if there was none.
        """
        if edge.node == LEAF:
            if not self._leaves_stay or edge.nr in self._leaves:
                self._let_go(gradient)
            self._leaves.add(edge.nr)
            return 0
        waiting = self._waiting.setdefault(edge.node, {})
        before = waiting.get(edge.nr)
        if before is None:
            waiting[edge.nr] = gradient
            return 0
        in_place = not before.is_view and before.memory.holders == 1 and before.memory.nbytes == edge.nbytes
        waiting[edge.nr] = self._hold(before if in_place else _Gradient(_Memory(edge.nbytes)))
        most = self._alive
        self._let_go(before)
        self._let_go(gradient)
        return most

    def _hold(self, gradient: _Gradient) -> _Gradient:
        memory = gradient.memory
        if not memory.holders:
            self._alive += memory.nbytes
        memory.holders += 1
        return gradient

    def _let_go(self, gradient: _Gradient) -> None:
        memory = gradient.memory
        memory.holders -= 1
        if not memory.holders:
            self._alive -= memory.nbytes


def _written(edge: Edge, given: _Gradient) -> _Gradient:
    if edge.gives == NEW:
        return _Gradient(_Memory(edge.nbytes))
    return _Gradient(given.memory, given.is_view or edge.gives == VIEW)
