"""Simulates a compiled step under a cut: its peak memory, and its work.

[Note: what takes memory] A value that is written to memory (`kernels` decides which) is held from when it is computed
until its last reader has run, and until the last reader of its views. The inputs of a value that is not written are
held until the readers of that value have run. A kept value is held until its last reader in backward. A recomputed
value is computed for its first reader, as late as possible. What forward returns is held to the end, because the caller
holds it. While a value is computed, its scratch is held too. Parameters and batches are not counted: they are allocated
before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from leangrad.policy.copies import Copy, find_copies
from leangrad.policy.graph import Graph, Value
from leangrad.policy.kernels import Fusion, Kernels

__all__ = ["EQUAL", "Outcome", "copies_of", "play"]

EQUAL = 1.002  # peaks within this factor of each other count as equal, where work does not matter


@dataclass(frozen=True)
class Outcome:
    """The simulated outcome of a step under one cut."""

    peak_bytes: int
    peak_at: int  # the value that is computed at the peak
    kept_bytes: int
    work: float  # of the whole step, in bytes moved; from `Replay`: of what is rebuilt alone, in the unit of its costs
    forward_bytes: int = 0  # from `Replay`: the peak of forward, of what is kept and the value that is computed


def play(graph: Graph, kept: frozenset[int], *, reused_reads: int | None = None) -> Outcome:
    """Simulate forward and backward, with ``kept`` held between them.

    reused_reads: `Fusion.reused_reads` for the kernels of backward; None: the same as for forward.
    """
    values = graph.values
    handed_out = [n for n, value in enumerate(values) if value.is_output and not value.is_backward]
    held = graph.handed_out.union(graph.base(n) for n in kept)
    order = sorted(_made_for([*handed_out, *kept], values, frozenset()))
    forward = Kernels(graph, order, held, Fusion(), is_backward=False)
    backward = _backward(graph, kept, reused_reads)
    copies = find_copies(backward)
    peak, at = max(_peak(forward, frozenset(), ()), _peak(backward, held, copies), key=lambda one: one[0])
    work = forward.work() + backward.work(frozenset().union(*(copy.spared for copy in copies)))
    return Outcome(peak, at, graph.kept_bytes(kept), work)


def copies_of(graph: Graph, kept: frozenset[int], *, reused_reads: int | None = None) -> list[Copy]:
    """Return the recomputed values that some readers in backward compute once more, with ``kept`` held from forward."""
    return find_copies(_backward(graph, kept, reused_reads))


def _backward(graph: Graph, kept: frozenset[int], reused_reads: int | None) -> Kernels:
    values = graph.values
    order = _backward_order(graph, kept)
    gradients = {graph.base(n) for n in order if values[n].is_backward and values[n].is_output}
    lasting = gradients.union(graph.handed_out, (graph.base(n) for n in graph.asked_for))
    fusion = Fusion() if reused_reads is None else replace(Fusion(), reused_reads=reused_reads)
    return Kernels(graph, order, lasting, fusion, is_backward=True)


def _backward_order(graph: Graph, kept: AbstractSet[int]) -> list[int]:
    """Return the values that backward computes, in order, each value of forward just before its first reader."""
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
    """Return all values that have to be computed for ``ends``, if ``there`` and standing values exist."""
    found: set[int] = set()
    stack = list(ends)
    while stack:
        n = stack.pop()
        if n not in there and n not in found and not values[n].is_standing:
            found.add(n)
            stack.extend(values[n].inputs)
    return found


def _peak(kernels: Kernels, held: AbstractSet[int], copies: Iterable[Copy]) -> tuple[int, int]:
    """Return the most bytes that are held in a phase, and the value that is computed then.

    held: memories that are held when the phase begins; each is freed after its last reader.
    copies: what readers compute once more; the value is held for the others, its inputs for these.
    """
    graph, order, place, written = kernels.graph, kernels.order, kernels.place, kernels.written
    values = graph.values
    until: dict[int, int] = {}  # of each value: the position at which it is last read
    last = dict.fromkeys(held, -1)  # the same of each memory
    copied = {copy.value: copy.readers for copy in copies}
    for n in reversed(order):
        readers = (r for r in graph.readers[n] if r in place and r not in copied.get(n, ()))
        reads = (place[r] if written[r] else until[r] for r in readers)
        until[n] = max(reads, default=place[n])
        base = graph.base(n)
        last[base] = max(last.get(base, -1), until[n], place[n])
        for i in values[n].inputs:
            if i not in place:  # it was held before the phase
                below = graph.base(i)
                last[below] = max(last.get(below, -1), place[n] if written[n] else until[n])
    for n, using in copied.items():
        end = max(place[r] if written[r] else until[r] for r in using)
        last.update((base, max(last.get(base, -1), end)) for base in kernels.reads[n])
    live = sum(values[base].nbytes for base in held if not values[base].is_standing)
    change = [0] * (len(order) + 1)
    for n in order:
        if written[n] and n not in held:
            change[place[n]] += values[n].nbytes
    for base, k in last.items():
        is_there = base in held or written.get(base, False)
        if is_there and base not in kernels.lasting and not values[base].is_standing:
            change[k + 1] -= values[base].nbytes
    peak, at = live, order[0] if order else 0
    for k, n in enumerate(order):
        live += change[k]
        if live + values[n].scratch > peak:
            peak, at = live + values[n].scratch, n
    return peak, at
