"""Which gradients are alive while backward runs a node: those that wait for another branch included.

Autograd sums the gradient of a tensor over all that read it, and only then runs the node that made the tensor. So at a
join a gradient waits: that of a U-Net's skip connection from the end of the decoder to the encoder, that of ``x`` in
``x + f(x)`` until backward has passed through ``f``. The recorded step notes the nodes of each call as plain data;
``alive`` runs them in the order of autograd's engine, which is the last made first among those whose gradient is
complete, and counts the memory of their gradients.

[Note: gradients that share memory] Some nodes hand on the very memory that they are given: both branches of an addition
get one gradient, those of a concatenation get views that hold the whole of it. A sum over branches takes new memory
unless what waits is no view and the only holder of its own.

A parameter's gradient is counted while the node that wrote it runs: in most steps it is added to one that is there.
Where none is there it stays, if it is asked for so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from leangrad import _torch
from leangrad.ledger.values.node_metadata import AccumulateGrad

__all__ = ["Graph"]

# These nodes write views of what they are given: see [Note: gradients that share memory].
_NAMES = "Alias Cat Permute ReshapeAlias Squeeze Stack Sum T Transpose UnsafeView Unsqueeze View"
VIEWS = {f"{name}Backward{n}" for name in _NAMES.split() for n in range(3)}
# These hand on the very thing, to operands of its size.
WHOLE = {"AddBackward0", "CloneBackward0", "ExpandBackward0", "SubBackward0"}


class Edge(NamedTuple):
    """An input of a node that needs a gradient."""

    node: int  # the number of the node that made it; LEAF: it is a parameter
    nr: int  # which of that node's outputs it is; of a parameter, what tells it from others
    nbytes: int  # of its gradient
    gives: str  # what the gradient is: NEW, or the SAME that the node is given, or a VIEW of that


class Node(NamedTuple):
    """A node of autograd's graph."""

    given: int  # the bytes of the gradients of its outputs
    edges: tuple[Edge, ...]


LEAF = -1
NEW, SAME, VIEW = "new", "same", "view"


class Graph:
    """The nodes of one region, by their number."""

    def __init__(self, first: int) -> None:
        """``first``: the number of the first node that the region can make."""
        self._first = first
        self._nodes: dict[int, Node] = {}

    def add(self, out: Any) -> None:
        """A call has made ``out``: note the nodes that are new."""
        stack = [t.grad_fn for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, Tensor)]
        while stack:
            node: Any = stack.pop()
            if node is None or type(node) is AccumulateGrad:
                continue
            number = node._sequence_nr()
            if number >= self._first and number not in self._nodes:
                given = _torch.outputs_nbytes(node)
                self._nodes[number] = Node(given, _edges(node, given))
                stack.extend(before for before, _ in node.next_functions)

    def outputs_nbytes(self) -> int:
        """The bytes of what the region handed out and nothing in it has read."""
        read = {edge.node for node in self._nodes.values() for edge in node.edges}
        return sum(node.given for number, node in self._nodes.items() if number not in read)

    def alive(self, without: Collection[int] = (), *, leaves_stay: bool = False) -> dict[int, int]:
        """For each node, by its number: the bytes of the gradients that are alive at most while it runs.

        without: nodes at which backward does not begin, although nothing has read what they made.
        leaves_stay: the gradients of parameters are new ones, and stay.
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
    """Whether the gradient of the second operand of a sum is another than that of the sum."""
    return name == "SubBackward0" or getattr(node, "_saved_alpha", 1) != 1


class _Memory:
    """The memory of one or more gradients."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.holders = nbytes, 0


class _Gradient(NamedTuple):
    """A gradient that waits, or that a node is given."""

    memory: _Memory
    is_view: bool = False


class _Engine:
    """Autograd's engine, with the sizes of gradients in their stead."""

    def __init__(self, nodes: dict[int, Node], leaves_stay: bool) -> None:
        self._nodes, self._leaves_stay = nodes, leaves_stay
        self._leaves: set[int] = set()  # the parameters that have a gradient
        self._waiting: dict[int, dict[int, _Gradient]] = {}  # by node and output
        self._alive = 0

    def run(self, without: Collection[int]) -> Iterator[tuple[int, int]]:
        """Run all nodes but those ``without`` a part in backward; of each, what was alive at most meanwhile.

        The node that was made last is next: all that read what it made were made after it.
        """
        for number in sorted(self._nodes, reverse=True):
            given = list(self._waiting.pop(number, {}).values())
            if given or number not in without:
                yield number, self._run(self._nodes[number], given)

    def _run(self, node: Node, given: list[_Gradient]) -> int:
        if not given:  # backward begins here
            given = [self._hold(_Gradient(_Memory(node.given)))]
        written = [self._hold(_written(edge, given[0])) for edge in node.edges]
        most = self._alive
        for gradient in given:
            self._let_go(gradient)
        for edge, gradient in zip(node.edges, written, strict=True):
            most = max(most, self._hand_on(edge, gradient))
        return most

    def _hand_on(self, edge: Edge, gradient: _Gradient) -> int:
        """Put a gradient where it waits; the bytes that are alive at most if it has to be added to another."""
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
