"""Where chains of values that are made again end.

[Note: chains] A link of a residual stream, ``out_k = f(c_k) + out_{k-1}``, can be made again from ``c_1 … c_k`` alone,
so the cheapest cut keeps no link at all. But the last link takes every earlier one with it, and each is held until its
own reader comes. Some links are better kept: there the chain ends.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from leangrad.policy.cut import remade
from leangrad.policy.graph import Graph, Value

__all__ = ["ends_by_length", "ends_by_room", "ends_by_sources", "links"]


def ends_by_sources(graph: Graph, kept: AbstractSet[int], depth: int) -> frozenset[int]:
    """Of what is made again, the values that would be made from more than ``depth`` kept ones of about their size."""
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
    """Of what is made again, every link that would be more than ``length`` links away from what is kept."""
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
    """The links of chains: of what is made again, the values at which a chain may end."""
    return frozenset(n for n in remade(graph, kept) if _may_end(graph.values[n]))


def _may_end(value: Value) -> bool:
    is_own = value.nbytes > 0 and value.view_of is None and value.can_be_kept
    return is_own and value.may_end_chain and not value.is_forced and bool(value.inputs)


def ends_by_room(graph: Graph, kept: AbstractSet[int], slack: int) -> frozenset[int]:
    """Let each chain grow until it holds ``slack`` bytes more than backward has freed by then.

    Backward frees memory as it goes, so a chain may be the longer the earlier it lies in the network.
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
