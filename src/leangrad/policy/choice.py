"""The cut that an engine takes: of a few candidates the one with the lowest peak, within a bound on the added work.

[Note: candidates] The cheapest cut keeps the fewest bytes, but its peak need not be the lowest: a link of a residual
stream that is made again takes all links before it. So candidates end such chains where a value would be made from more
than so many kept ones, and of the best of them those ends are left out again that do not lower the peak: a chain that
is made again late in backward, when little is held, may be long.

[Note: the bound] If all candidates add more work than allowed, more is kept. A price on what is made again is no way to
keep a little more: blocks that are alike have like prices, and all of them cross it at once. So of what a dearer cut
keeps beside the cheapest one, a part is kept, that of the last layers first: it is gone when the peak comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from leangrad.policy.cut import cheapest_cut, remade
from leangrad.policy.graph import Graph
from leangrad.policy.kernels import Fusion
from leangrad.policy.peak import Outcome, play

__all__ = ["Choice", "choose"]

DEPTHS = (1, 2, 4, 6, 8, 12, 16)  # kept values that one is made again from
PRICES = (0.2, 0.5, 1.0)  # kept bytes for one byte moved
REUSED_READS = (Fusion().reused_reads, 8)  # limits on what the kernels of backward compute anew for each reader
HALVINGS = 6  # of the span in which the part to keep is looked for
MOST_ENDS = 24  # that are tried one by one
NEAR = 1.02  # peaks within this factor of the lowest count as equal: then the least work wins


@dataclass(frozen=True)
class Choice:
    """The values to keep, and how the step plays out with them."""

    kept: frozenset[int]
    outcome: Outcome
    floor: Outcome  # of the cheapest cut
    lowest: Outcome  # of the cut that would be chosen if work did not matter
    is_held_back: bool  # because that would be too much work
    step_work: int  # of the step, if what costs much to make again is kept
    reused_reads: int  # the limit of `Fusion` for the kernels of backward

    @property
    def slowdown(self) -> float:
        """The work of the step with this cut, beside that of the step itself."""
        return self.outcome.work / max(self.step_work, 1)

    @property
    def lowest_slowdown(self) -> float:
        """The same for the cut that would be chosen if work did not matter."""
        return self.lowest.work / max(self.step_work, 1)


Try = tuple[frozenset[int], int, Outcome]  # what is kept, the limit on reads, and how that plays out
Attempt = Callable[[frozenset[int], int], Outcome]  # play one through and remember it


def choose(graph: Graph, *, slowdown: float, limits: Sequence[int] = REUSED_READS) -> Choice:
    """The cut with the lowest simulated peak whose work is at most ``slowdown`` times that of the step itself.

    limits: the values of ``Fusion.reused_reads`` that the engine can have the kernels of backward compiled with; the
        first of them is what it compiles with anyway.
    """
    cheapest = cheapest_cut(graph)
    dearer = [cheapest_cut(graph, price=price) for price in PRICES]
    tried: list[Try] = []

    def attempt(kept: frozenset[int], limit: int) -> Outcome:
        tried.append((kept, limit, play(graph, kept, reused_reads=limit)))
        return tried[-1][2]

    floor = attempt(cheapest, limits[0])
    step = min(floor.work, *(attempt(kept, limits[0]).work for kept in dearer))
    for limit in limits:
        _end_chains(graph, cheapest, limit, attempt)
    bound = slowdown * step
    lowest = min(outcome.peak_bytes for _, _, outcome in tried)
    best = min((one for one in tried if one[2].peak_bytes <= NEAR * lowest), key=_work)
    is_held_back = best[2].work > bound
    if is_held_back:
        _keep_more(graph, best, dearer, bound, attempt)
    allowed = [one for one in tried if one[2].work <= bound] or [min(tried, key=_work)]  # the user may force more work
    lowest = min(outcome.peak_bytes for _, _, outcome in allowed)
    kept, limit, outcome = min((one for one in allowed if one[2].peak_bytes <= NEAR * lowest), key=_work)
    return Choice(kept, outcome, floor, best[2], is_held_back, step, limit)


def _work(one: Try) -> tuple[int, int, int, list[int]]:
    kept, limit, outcome = one
    return outcome.work, outcome.kept_bytes, limit, sorted(kept)


def _keep_more(graph: Graph, best: Try, dearer: Sequence[frozenset[int]], bound: float, attempt: Attempt) -> None:
    """Try cuts that keep a part of what a dearer one keeps: as small a part as the bound allows."""
    kept, limit, _ = best
    for more in dearer:
        added = sorted(more - kept, reverse=True)  # the last layers first
        if not added or attempt(kept.union(added), limit).work > bound:
            continue
        few, many = 0, len(added)
        for _ in range(HALVINGS):
            middle = (few + many) // 2
            if attempt(cheapest_cut(graph, pinned=kept.union(added[:middle])), limit).work > bound:
                few = middle
            else:
                many = middle


def _end_chains(graph: Graph, cheapest: frozenset[int], limit: int, attempt: Attempt) -> None:
    """Try the cheapest cut, the same with chains ended at several depths, and the best of these with fewer ends."""
    lowest, best = attempt(cheapest, limit).peak_bytes, frozenset[int]()
    for ends in dict.fromkeys(_ends(graph, cheapest, depth) for depth in DEPTHS):
        if (peak := attempt(cheapest_cut(graph, pinned=ends), limit).peak_bytes) < lowest:
            lowest, best = peak, ends
    for n in sorted(best, key=lambda n: (-graph.values[n].nbytes, n))[:MOST_ENDS]:
        if (peak := attempt(cheapest_cut(graph, pinned=best - {n}), limit).peak_bytes) < lowest:
            lowest, best = peak, best - {n}


def _ends(graph: Graph, kept: AbstractSet[int], depth: int) -> frozenset[int]:
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
        can_end = value.nbytes and value.view_of is None and value.can_be_kept and not value.is_forced and value.inputs
        if can_end and len(found) > depth:
            ends.add(n)
            found = {n}
        sources[n] = found
    return frozenset(ends)
