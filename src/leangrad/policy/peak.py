"""What a step holds at its worst moment under a cut, by playing it through.

[Note: what takes memory] A pointwise value whose readers compute it themselves takes none, unless it is kept or handed
out; its own inputs are then held until those readers have run. All else is held from when it is made until its last
reader has run, a view as long as its base. What is kept is held until its last reader in backward; what is made again
is made at its first reader, as late as can be. What forward hands out is held to the end, for the caller has it.
Parameters and batches are not counted: they stand before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from leangrad.policy.graph import Graph, Value

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
    handed_out = [n for n, value in enumerate(values) if value.is_output and not value.is_backward]
    forward = sorted(_made_for([*handed_out, *kept], values, frozenset()))
    backward = _backward_order(graph, kept)
    held = frozenset(graph.base(n) for n in (*kept, *handed_out))
    peak, at = _phase(graph, forward, frozenset(), held)
    gradients = {graph.base(n) for n in backward if values[n].is_backward and values[n].is_output}
    gradients |= {graph.base(n) for n in graph.asked_for}
    lasting = gradients.union(graph.base(n) for n in handed_out)
    later, later_at = _phase(graph, backward, held, lasting)
    if later > peak:
        peak, at = later, later_at
    again = set(forward).intersection(backward)
    return Outcome(
        peak,
        at,
        graph.kept_bytes(kept),
        sum(values[n].price for n in again),
        sum(values[n].work for n in forward) + sum(values[n].work for n in backward),
    )


def _backward_order(graph: Graph, kept: AbstractSet[int]) -> list[int]:
    """The values that backward makes, in order, each value of forward just before its first reader."""
    values = graph.values
    order: list[int] = []
    made: set[int] = set(kept)
    asked_for = set(graph.asked_for)
    for n, value in enumerate(values):
        if value.is_backward:
            found = _made_for((i for i in value.inputs if not values[i].is_backward), values, made)
            order.extend(sorted(found))
            order.append(n)
            made |= found
    order.extend(sorted(_made_for(asked_for, values, made)))
    return order


def _made_for(ends: Iterable[int], values: Sequence[Value], there: AbstractSet[int]) -> set[int]:
    """All that has to be made for ``ends``, if ``there`` and what stands anyway is at hand."""
    found: set[int] = set()
    stack = list(ends)
    while stack:
        n = stack.pop()
        if n not in there and n not in found and not values[n].is_standing:
            found.add(n)
            stack.extend(values[n].inputs)
    return found


def _phase(graph: Graph, order: Sequence[int], held: AbstractSet[int], lasting: AbstractSet[int]) -> tuple[int, int]:
    """The most that is held while ``order`` is made, and the value that is being made then.

    held: what stands when the phase begins; each goes after its last reader. lasting: what is held to the end.
    """
    values = graph.values
    place = {n: k for k, n in enumerate(order)}
    is_written = {n: _is_written(graph, n, place, lasting) for n in order}
    until: dict[int, int] = {}  # of each value: the place at which it is last read
    for n in reversed(order):
        reads = (place[r] if is_written[r] else until[r] for r in graph.readers[n] if r in place)
        until[n] = max(reads, default=place[n])
    last = dict.fromkeys(held, -1)  # the same of each memory
    for n in order:
        base = graph.base(n)
        last[base] = max(last.get(base, -1), until[n])
        for i in values[n].inputs:
            if i not in place:  # it stood before
                below = graph.base(i)
                last[below] = max(last.get(below, -1), place[n] if is_written[n] else until[n])
    live = sum(values[base].nbytes for base in held if not values[base].is_standing)
    change = [0] * (len(order) + 1)
    for n in order:
        if is_written[n] and n not in held:
            change[place[n]] += values[n].nbytes
    for base, k in last.items():
        is_there = base in held or is_written.get(base, False)
        if is_there and base not in lasting and not values[base].is_standing:
            change[k + 1] -= values[base].nbytes
    peak, at = live, order[0] if order else 0
    for k, n in enumerate(order):
        live += change[k]
        if live > peak:
            peak, at = live, n
    return peak, at


def _is_written(graph: Graph, n: int, place: dict[int, int], lasting: AbstractSet[int]) -> bool:
    """Whether a value takes memory of its own in a phase; see [Note: what takes memory]."""
    value = graph.values[n]
    if value.view_of is not None:
        return False
    if n in lasting or not value.is_inlined:
        return True
    return any(not graph.values[r].can_inline for r in _readers_through_views(graph, n) if r in place)


def _readers_through_views(graph: Graph, n: int) -> list[int]:
    found, frontier = [], [n]
    while frontier:
        for r in graph.readers[frontier.pop()]:
            if graph.values[r].view_of is not None:
                frontier.append(r)
            else:
                found.append(r)
    return found
