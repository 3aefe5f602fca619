"""Finds the cheapest set of values to keep, as a minimum cut.

[Note: the cut] A value that backward reads is either kept, which costs its own size, or recomputed, which requires the
inputs of its op. A fixed value is never recomputed. A standing value costs nothing to keep. A view is never kept,
because that would hold the whole memory of its base. Recomputing a value may have a price, in bytes as well: then the
value is recomputed only where that saves more bytes. The caller may hold what forward returns. So of two values of
equal size the one that forward returns is kept, the logits for instance and not the probabilities.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from leangrad.policy.graph import Graph
from leangrad.policy.max_flow import ENDLESS, Network

__all__ = ["cheapest_cut", "remade"]

SCALE = 1024  # capacity of one byte in the network, so that a price may be a fraction of a byte
HANDED_OUT = 1000  # the same of a value that forward returns: slightly cheaper to keep


def cheapest_cut(
    graph: Graph, *, price: float = 0.0, pinned: AbstractSet[int] = frozenset(), early: bool = False
) -> frozenset[int]:
    """Return the values to keep so that backward has all it needs, with the fewest bytes.

    Of equal cuts it is the one nearest backward, which recomputes the fewest values. Raises OverflowError if a value
    can neither be kept nor recomputed.

    price: what one byte moved to recompute a value counts, in kept bytes.
    pinned: values that are not recomputed, as if they were fixed.
    early: of equal cuts return the one nearest the fixed values, whose ops a reader of the cut knows.

    >>> from leangrad.policy.graph import Value
    >>> product, gelu = Value(400, is_fixed=True), Value(400, (0,))
    >>> gradient = Value(400, (0, 1), is_backward=True)
    >>> sorted(cheapest_cut(Graph([product, gelu, gradient])))
    [0]
    """
    values = graph.values
    network = Network()
    source, sink = network.source, network.sink
    ends: dict[int, tuple[int, int]] = {}  # for each value, the nodes where its arc begins and ends
    frontier = list(graph.needed)
    for n in frontier:
        ends[n] = _arc(network, graph, n)
        network.connect(ends[n][1], sink)
    while frontier:
        n = frontier.pop()
        value, (begin, _) = values[n], ends[n]
        if value.is_forced:
            network.connect(begin, sink)
        elif value.is_fixed or value.is_standing or not value.inputs or n in pinned:
            if value.is_fixed or value.is_standing or n in pinned:
                network.connect(source, begin)
            continue
        elif price and value.price:
            network.connect(source, begin, int(price * value.price * SCALE))
        for i in dict.fromkeys(value.inputs):
            if i not in ends:
                ends[i] = _arc(network, graph, i)
                frontier.append(i)
            network.connect(ends[i][1], begin)
    after = network.cut(early=early)
    return frozenset(n for n, (begin, end) in ends.items() if not after[begin] and after[end])


def _arc(network: Network, graph: Graph, n: int) -> tuple[int, int]:
    """Add the arc of a value, and return its two nodes; a value that cannot be kept has only one node."""
    value = graph.values[n]
    begin = network.node()
    if not value.can_be_kept or value.view_of is not None:
        return begin, begin
    end = network.node()
    scale = HANDED_OUT if n in graph.handed_out else SCALE
    network.connect(begin, end, 0 if value.is_standing else min(value.nbytes * scale, ENDLESS))
    return begin, end


def remade(graph: Graph, kept: AbstractSet[int]) -> frozenset[int]:
    """Return the values of forward that backward recomputes if ``kept`` is kept."""
    values = graph.values
    found: set[int] = set()
    frontier = [n for n in graph.needed if n not in kept and not values[n].is_standing]
    while frontier:
        n = frontier.pop()
        if n not in found:
            found.add(n)
            frontier.extend(i for i in values[n].inputs if i not in kept and not values[i].is_standing)
    return frozenset(found)
