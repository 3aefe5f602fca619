"""Decides where chains of recomputed values end.

[Note: chains] A link of a residual stream, ``out_k = f(c_k) + out_{k-1}``, can be recomputed from ``c_1 … c_k`` alone,
so the cheapest cut keeps no link at all. But to recompute the last link, backward recomputes every earlier one, and
holds each until its own reader has run. It is better to keep some of the links: the chain ends at a kept link.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from leangrad.policy.cut import remade
from leangrad.policy.graph import Graph, Value

__all__ = ["ends_by_length", "ends_by_room", "ends_by_sources", "links"]


def ends_by_sources(graph: Graph, kept: AbstractSet[int], depth: int) -> frozenset[int]:
    """Return the recomputed values that need more than ``depth`` kept values of at least a quarter of their size.

    A value that is returned counts as kept for the values after it.
    """
    values = graph.values
    sources: dict[int, set[int]] = {}
    ends: set[int] = set()
    for n in sorted(remade(graph, kept)):
        value = values[n]
        found: set[int] = set()
        for i in value.inputs:
            if i in sources:
                found |= sources[i]
            elif not values[i].is_standing:
                found.add(graph.base(i))
        found = {b for b in found if 4 * values[b].nbytes >= value.nbytes}
        if _may_end(value) and len(found) > depth:
            ends.add(n)
            found = {n}
        sources[n] = found
    return frozenset(ends)


def ends_by_length(graph: Graph, kept: AbstractSet[int], length: int) -> frozenset[int]:
    """Return every recomputed link that would be more than ``length`` links away from a kept value.

    A link that is returned counts as kept for the links after it.
    """
    can_end = links(graph, kept)
    ends: set[int] = set()
    lengths: dict[int, int] = {}
    for n in sorted(remade(graph, kept)):
        lengths[n] = max((lengths.get(i, 0) for i in graph.values[n].inputs), default=0) + (n in can_end)
        if n in can_end and lengths[n] > length:
            ends.add(n)
            lengths[n] = 0
    return frozenset(ends)


def links(graph: Graph, kept: AbstractSet[int]) -> frozenset[int]:
    """Return the links of chains: the recomputed values at which a chain may end."""
    return frozenset(n for n in remade(graph, kept) if _may_end(graph.values[n]))


def _may_end(value: Value) -> bool:
    is_own = value.nbytes > 0 and value.view_of is None and value.can_be_kept
    return is_own and value.may_end_chain and not value.is_forced and bool(value.inputs)


def ends_by_room(graph: Graph, kept: AbstractSet[int], slack: int) -> frozenset[int]:
    """Return chain ends, so that each chain holds at most ``slack`` bytes more than backward has freed by then.

    Backward frees memory as it proceeds, so a chain may be longer the earlier it lies in the network.
    """
    values = graph.values
    can_end = links(graph, kept)
    left = [sum(values[r].is_backward for r in readers) for readers in graph.readers]
    ends: set[int] = set()
    held: set[int] = set()
    freed = 0
    for value in values:
        if not value.is_backward:
            continue
        read = [i for i in value.inputs if not values[i].is_backward]
        room = freed + slack - sum(values[n].nbytes for n in held)
        stack = list(read)
        while stack:
            n = stack.pop()
            if n in kept or n in ends or n in held or values[n].is_standing:
                continue
            if n in can_end and values[n].nbytes > room:
                ends.add(n)
                continue
            held.add(n)
            room -= values[n].nbytes
            stack.extend(values[n].inputs)
        for n in read:
            left[n] -= 1
            if left[n] == 0 and (n in kept or n in ends):
                freed += values[n].nbytes
        held = {n for n in held if left[n] > 0}
    return frozenset(ends)
