"""The cheapest set of values to keep, as a minimum cut.

[Note: the cut] A value that backward reads is kept, at its own size, or made again, which takes the inputs of its op. A
fixed value is never made again. What stands anyway costs nothing to keep. A view is never kept: it shows the memory of
its base, which would be held whole. Making a value again may have a price, in bytes as well: then it is made again only
where that saves more. What forward hands out may be held by the caller, or not: of two like values it is the one to
keep, logits for instance and not the probabilities.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from leangrad.policy.graph import Graph
from leangrad.policy.max_flow import ENDLESS, Network

__all__ = ["cheapest_cut", "remade"]

SCALE = 1024  # of a byte: so that a price may be a fraction of one
HANDED_OUT = 1000  # what a byte of a value counts that forward hands out


def cheapest_cut(
    graph: Graph, *, price: float = 0.0, pinned: AbstractSet[int] = frozenset(), early: bool = False
) -> frozenset[int]:
    """The values to keep so that backward has all it needs, at the fewest bytes.

    Of equal cuts it is the one nearest backward, which makes the fewest values again. An OverflowError says that some
    value can neither be kept nor made again.

    price: what a byte moved to make a value again counts, in kept bytes.
    pinned: values that are not made again, as if they were fixed.
    early: of equal cuts take the one nearest the fixed values, which names the ops that a reader of the cut knows.

    >>> from leangrad.policy.graph import Value
    >>> product, gelu = Value(400, is_fixed=True), Value(400, (0,))
    >>> gradient = Value(400, (0, 1), is_backward=True)
    >>> sorted(cheapest_cut(Graph([product, gelu, gradient])))
    [0]
    """
    values = graph.values
    network = Network()
    source, sink = network.source, network.sink
    ends: dict[int, tuple[int, int]] = {}  # of each value: the nodes where its arc begins and ends
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
    """The arc of a value; what cannot be kept is one node."""
    value = graph.values[n]
    begin = network.node()
    if not value.can_be_kept or value.view_of is not None:
        return begin, begin
    end = network.node()
    scale = HANDED_OUT if n in graph.handed_out else SCALE
    network.connect(begin, end, 0 if value.is_standing else min(value.nbytes * scale, ENDLESS))
    return begin, end


def remade(graph: Graph, kept: AbstractSet[int]) -> frozenset[int]:
    """The values of forward that backward makes again if it has ``kept``."""
    values = graph.values
    found: set[int] = set()
    frontier = [n for n in graph.needed if n not in kept and not values[n].is_standing]
    while frontier:
        n = frontier.pop()
        if n not in found:
            found.add(n)
            frontier.extend(i for i in values[n].inputs if i not in kept and not values[i].is_standing)
    return frozenset(found)
