"""The cut that an engine takes: of a few candidates the one with the lowest peak, within a bound on the added work.

[Note: candidates] The cheapest cut keeps the fewest bytes, but its peak need not be the lowest: a link of a residual
stream that is made again takes all links before it. So candidates end such chains after every so many joins. Where a
cut would add more work than allowed, making values again is given a price that rises until it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leangrad.policy.cut import cheapest_cut, remade
from leangrad.policy.graph import Graph
from leangrad.policy.peak import Outcome, play

__all__ = ["Choice", "choose"]

DEPTHS = (1, 2, 4, 8)  # joins of a chain that is made again
PRICES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 1e6)  # kept bytes for one byte moved
HALVINGS = 5  # of the span in which a price is looked for
NEAR = 1.01  # peaks within this factor of the lowest count as equal: then the least work wins


@dataclass(frozen=True)
class Choice:
    """The values to keep, how the step plays out with them, and whether the cheapest cut would be too much work."""

    kept: frozenset[int]
    outcome: Outcome
    floor: Outcome  # of the cheapest cut
    is_held_back: bool
    step_work: int  # of the step, with nothing made again

    @property
    def slowdown(self) -> float:
        """The work of the step with this cut, beside that of the step itself."""
        return self.outcome.work / max(self.step_work, 1)

    @property
    def floor_slowdown(self) -> float:
        """The same for the cheapest cut."""
        return self.floor.work / max(self.step_work, 1)


def choose(graph: Graph, *, slowdown: float) -> Choice:
    """The cut with the lowest simulated peak whose work is at most ``slowdown`` times that of the step itself."""
    first = cheapest_cut(graph)
    floor = play(graph, first)
    step = sum(value.work for value in graph.values)
    bound = slowdown * step
    tried = {first: floor}
    for kept in _candidates(graph, first):
        if kept not in tried:
            tried[kept] = play(graph, kept)
    if floor.work > bound:
        tried |= _within(graph, bound)
    allowed = {kept: outcome for kept, outcome in tried.items() if outcome.work <= bound}
    if not allowed:  # the user has forced values to be made again
        least = min(tried, key=lambda kept: (tried[kept].work, sorted(kept)))
        allowed = {least: tried[least]}
    lowest = min(outcome.peak_bytes for outcome in allowed.values())
    near = [(outcome, kept) for kept, outcome in allowed.items() if outcome.peak_bytes <= NEAR * lowest]
    outcome, kept = min(near, key=lambda pair: (pair[0].work, pair[0].kept_bytes, sorted(pair[1])))
    return Choice(kept, outcome, floor, floor.work > bound, step)


def _within(graph: Graph, bound: float) -> dict[frozenset[int], Outcome]:
    """Cuts of as little work as is allowed: a price on what is made again that is just high enough, by bisection."""
    tried: dict[frozenset[int], Outcome] = {}

    def is_within(price: float) -> bool:
        kept = cheapest_cut(graph, price=price)
        tried[kept] = play(graph, kept)
        return tried[kept].work <= bound

    high = next((price for price in PRICES if is_within(price)), PRICES[-1])
    low = max((price for price in PRICES if price < high), default=0.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if is_within(middle):
            high = middle
        else:
            low = middle
    return tried


def _candidates(graph: Graph, first: frozenset[int]) -> Iterator[frozenset[int]]:
    """The cheapest cut with chains ended after so many joins; and with a small price on what is made again."""
    for depth in DEPTHS:
        if pinned := _ends(graph, first, depth):
            yield cheapest_cut(graph, pinned=pinned)
    for price in PRICES[:2]:
        yield cheapest_cut(graph, price=price)


def _ends(graph: Graph, kept: frozenset[int], depth: int) -> frozenset[int]:
    """Of what is made again, the joins at which a chain is as long as ``depth``: each ends there.

    A join reads two values or more that are as large as itself and are not made for nothing: ``x + f(x)``.
    """
    values = graph.values
    again = remade(graph, kept)
    length: dict[int, int] = {}
    ends: set[int] = set()
    for n in sorted(again):
        value = values[n]
        longest = max((length.get(i, 0) for i in value.inputs), default=0)
        large = {graph.base(i) for i in value.inputs if values[i].nbytes >= value.nbytes and _is_made(graph, i)}
        if len(large) > 1 and value.nbytes and value.view_of is None and value.can_be_kept:
            longest += 1
            if longest >= depth:
                ends.add(n)
                longest = 0
        length[n] = longest
    return frozenset(ends)


def _is_made(graph: Graph, n: int) -> bool:
    value = graph.values[n]
    return bool(value.inputs) and not value.is_standing
