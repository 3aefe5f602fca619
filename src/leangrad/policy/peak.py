"""What a step holds at its worst moment under a cut, by playing it through.

[Note: what takes memory] A pointwise value whose readers compute it themselves takes none; its own inputs are then held
until those readers have run. All else is held from when it is made until its last reader has run, a view as long as its
base. What is kept is held until its last reader in backward; what is made again is made at its first reader, as late as
can be. Outputs are held to the end, parameters and batches are not counted: they stand before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from leangrad.policy.graph import Graph

__all__ = ["Outcome", "play"]


@dataclass(frozen=True)
class Outcome:
    """How a step plays out under one cut."""

    peak_bytes: int
    peak_at: int  # the value that is being made then
    kept_bytes: int
    price_bytes: int  # moved to make values again
    work: int  # of the whole step, with what is made again


def play(graph: Graph, kept: frozenset[int]) -> Outcome:
    """Play forward and backward through with ``kept`` held between them."""
    values = graph.values
    forward = [n for n, v in enumerate(values) if not v.is_backward]
    backward, again = _backward_order(graph, kept)
    held = frozenset({graph.base(n) for n in kept})
    outputs = frozenset(graph.base(n) for n in forward if values[n].is_output)
    peak, at = _phase(graph, forward, {}, held | outputs)
    standing = {b: values[b].nbytes for b in held | outputs if not values[b].is_standing}
    last, last_at = _phase(
        graph, backward, standing, frozenset(graph.base(n) for n in backward if values[n].is_output and n not in again)
    )
    if last > peak:
        peak, at = last, last_at
    made_twice = [values[n] for n in again]
    return Outcome(
        peak,
        at,
        graph.kept_bytes(kept),
        sum(v.price for v in made_twice),
        sum(v.work for v in values) + sum(v.work for v in made_twice),
    )


def _backward_order(graph: Graph, kept: AbstractSet[int]) -> tuple[list[int], set[int]]:
    """The values that backward makes, in order, each that is made again just before its first reader; and those."""
    values = graph.values
    order: list[int] = []
    again: set[int] = set()
    for n, value in enumerate(values):
        if not value.is_backward:
            continue
        stack = [i for i in value.inputs if not values[i].is_backward]
        found: set[int] = set()
        while stack:
            i = stack.pop()
            if i in kept or i in again or i in found or values[i].is_standing:
                continue
            found.add(i)
            stack.extend(values[i].inputs)
        order.extend(sorted(found))
        again |= found
        order.append(n)
    return order, again


def _phase(
    graph: Graph, order: Sequence[int], held: dict[int, int], lasting: AbstractSet[int]
) -> tuple[int, int]:
    """The most that is held while ``order`` is made, and the value that is being made then.

    held: what stands when the phase begins, with its bytes; it goes after its last reader, unless it is ``lasting``.
    """
    values = graph.values
    place = {n: k for k, n in enumerate(order)}
    end = len(order)
    takes = {n: _takes_memory(graph, n, place) for n in order}
    until: dict[int, int] = {}  # of each value: when its memory is last read
    for n in reversed(order):
        last = place[n]
        for r in graph.readers[n]:
            if r in place:
                last = max(last, until[r] if not takes[r] else place[r])
        until[n] = last
    free_at: dict[int, int] = dict.fromkeys(held, -1)
    for n in order:
        base = graph.base(n)
        if takes[n] or base != n:
            free_at[base] = max(free_at.get(base, -1), until[n])
        for i in values[n].inputs:  # an input that stood before
            if i not in place:
                below = graph.base(i)
                free_at[below] = max(free_at.get(below, -1), until[n] if not takes[n] else place[n])
    change = [0] * (end + 2)
    live = sum(held.values())
    begun = set(held)
    for n in order:
        base = graph.base(n)
        if takes[n] and base not in begun and not values[base].is_standing:
            begun.add(base)
            change[place[n]] += values[base].nbytes
    for base in begun:
        if base not in lasting:
            change[free_at[base] + 1] -= values[base].nbytes if base not in held else held[base]
    peak, at = live, order[0] if order else 0
    for k, n in enumerate(order):
        live += change[k]
        if live > peak:
            peak, at = live, n
    return peak, at


def _takes_memory(graph: Graph, n: int, place: dict[int, int]) -> bool:
    """Whether a value is written to memory in a phase; see [Note: what takes memory]."""
    value = graph.values[n]
    if value.view_of is not None or not value.is_inlined or value.is_output:
        return True
    readers = [r for r in _readers_through_views(graph, n) if r in place]
    return any(not graph.values[r].can_inline for r in readers)


def _readers_through_views(graph: Graph, n: int) -> list[int]:
    found, frontier = [], [n]
    while frontier:
        for r in graph.readers[frontier.pop()]:
            if graph.values[r].view_of is not None:
                frontier.append(r)
            else:
                found.append(r)
    return found
