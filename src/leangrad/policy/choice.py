"""Chooses the cut that an engine uses: of a few candidates the one with the lowest peak, within a bound on added work.

[Note: candidates] The cheapest cut keeps the fewest bytes, but its peak need not be the lowest: to recompute a link of
a residual stream, backward recomputes all links before it. So other candidates end such chains where a value would be
recomputed from more than a given number of kept values. From the best of these candidates single ends are dropped again
if that lowers the peak: a chain that is recomputed late in backward, when little is held, may be long.

[Note: the bound] If all candidates add more work than allowed, more values are kept. A price on recomputing cannot make
the cut keep just a little more: similar blocks have similar prices, and all of them cross the threshold at once. So a
part is kept of what the usual cut keeps beyond the cheapest one, the last layers first, because these values are freed
before the peak. Also, of what any dearer cut keeps, values of one kind (with the same price per byte and number of
readers, in all blocks) are tried together. The kinds that save the most work per byte added to the peak are kept first.

[Note: the usual cut] Added work is counted from the step that users would have without leangrad. An engine that knows
what is kept in that step passes it as ``usual``. The chosen cut then has no higher peak than that step (up to the
factor ``NEAR``), even if this takes more work than the bound allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import combinations

from leangrad.policy.chains import ends_by_length, ends_by_room, ends_by_sources, links
from leangrad.policy.cut import cheapest_cut
from leangrad.policy.graph import Graph
from leangrad.policy.kernels import Fusion
from leangrad.policy.peak import EQUAL, Outcome, play

__all__ = ["Choice", "choose", "lowest_peak"]

DEPTHS = (1, 2, 4, 6, 8, 12, 16)  # tried limits on how many kept values one value is recomputed from
PRICES = (0.2, 0.5, 1.0)  # tried prices: kept bytes per byte moved to recompute a value
REUSED_READS = (Fusion().reused_reads, 8)  # tried values of `Fusion.reused_reads` for backward
HALVINGS = 6  # bisection steps in the search for the part to keep
MOST_ENDS = 24  # chain ends that are dropped one by one, at most
MOST_KINDS = 16  # kinds of similar values that are tried, at most
LONGEST = 12  # longest chain tried, in links, where all chains have one length
SLACKS = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # tried slacks of `ends_by_room`, in units of the largest link
FIRST = 3  # how many values read at the start of backward, those of the loss, are tried
MOST_REFINED = 1 << 18  # links times reads of backward: about a second of search; above it nothing is refined
REPEATABLE = 4  # with so many repeatable values, simulating a cut takes twice as long
MUCH = 1.1  # factor by which a peak has to fall where several values are kept together
WORTH = 8  # bytes that may be kept per byte by which the peak falls, where single values are kept or recomputed
NEAR = 1.02  # peaks within this factor of the lowest count as equal; the least work decides between them


@dataclass(frozen=True)
class Choice:
    """The values to keep, and the simulated outcome of the step."""

    kept: frozenset[int]
    outcome: Outcome
    floor: Outcome  # outcome of the cheapest cut
    lowest: Outcome  # outcome of the cut that would be chosen if work did not matter
    is_held_back: bool  # whether ``lowest`` was not chosen because it is too much work
    step_work: float  # work of the step with the usual cut
    reused_reads: int  # `Fusion.reused_reads` for the kernels of backward
    usual: Outcome | None = None  # outcome of the usual cut; None if that is not known

    @property
    def slowdown(self) -> float:
        """The work of the step with this cut, divided by that with the usual cut."""
        return self.outcome.work / max(self.step_work, 1)

    @property
    def lowest_slowdown(self) -> float:
        """The same ratio for the cut that would be chosen if work did not matter."""
        return self.lowest.work / max(self.step_work, 1)


Play = Callable[[frozenset[int]], Outcome]
Try = tuple[frozenset[int], int, Outcome]  # what is kept, the limit on reads, and the outcome
Attempt = Callable[[frozenset[int], int], Outcome]  # simulates a cut and records it as tried


def choose(
    graph: Graph,
    *,
    slowdown: float,
    limits: Sequence[int] = REUSED_READS,
    usual: AbstractSet[int] | None = None,
    budget: int | None = None,
) -> Choice:
    """Return the cut with the lowest simulated peak whose work is at most ``slowdown`` times that of the usual cut.

    With ``budget``, return the cut with the least work whose simulated peak is within the budget, whatever the
    slowdown; if there is none, the cut with the lowest peak.

    limits: the values of ``Fusion.reused_reads`` that the engine can compile the kernels of backward with; the first is
        the one that it compiles with by default.
    usual: the values that would be kept without this policy. If None, the least work of a few cuts is taken for the
        work of the usual cut.
    """
    cheapest = cheapest_cut(graph)
    dearer = [cheapest_cut(graph, price=price) for price in PRICES]
    ceiling = None
    if usual is not None:
        bases = frozenset(graph.base(n) for n in usual)
        ceiling = play(graph, bases)  # it may recompute values that are fixed for the policy
        dearer.insert(0, cheapest_cut(graph, pinned={n for n in bases if graph.values[n].can_be_kept}))
    tried: list[Try] = []

    def attempt(kept: frozenset[int], limit: int) -> Outcome:
        tried.append((kept, limit, play(graph, kept, reused_reads=limit)))
        return tried[-1][2]

    floor = attempt(cheapest, limits[0])
    works = [attempt(kept, limits[0]).work for kept in dearer]
    step = works[0] if usual is not None else min(floor.work, *works)
    for limit in limits:
        _end_chains(graph, cheapest, limit, attempt)
    bound = slowdown * step
    lowest = min(outcome.peak_bytes for _, _, outcome in tried)
    best = min((one for one in tried if one[2].peak_bytes <= NEAR * lowest), key=_work)
    if budget is not None:
        _keep_more(graph, best, dearer, lambda outcome: outcome.peak_bytes > budget, attempt)
        kept, limit, outcome = min([one for one in tried if one[2].peak_bytes <= budget] or [best], key=_work)
        return Choice(kept, outcome, floor, best[2], False, step, limit, ceiling)
    if best[2].work > bound:
        _keep_more(graph, best, dearer, lambda outcome: outcome.work <= bound, attempt)
    below = [one for one in tried if ceiling is None or one[2].peak_bytes <= NEAR * ceiling.peak_bytes] or tried
    allowed = [one for one in below if one[2].work <= bound] or [min(below, key=_work)]  # the user may force more
    lowest = min(outcome.peak_bytes for _, _, outcome in allowed)
    kept, limit, outcome = min((one for one in allowed if one[2].peak_bytes <= NEAR * lowest), key=_work)
    is_held_back = best[2].work > bound and outcome.peak_bytes > NEAR * best[2].peak_bytes
    return Choice(kept, outcome, floor, best[2], is_held_back, step, limit, ceiling)


def _work(one: Try) -> tuple[float, int, int, list[int]]:
    kept, limit, outcome = one
    return outcome.work, outcome.kept_bytes, limit, sorted(kept)


def _keep_more(
    graph: Graph, best: Try, dearer: Sequence[frozenset[int]], is_enough: Callable[[Outcome], bool], attempt: Attempt
) -> None:
    """Try cuts that keep a part of what the ``dearer`` ones keep, around the smallest part that ``is_enough``.

    is_enough: whether enough is kept in an outcome: its work is within the bound, or its peak above the budget.
    """
    kept, limit, _ = best
    added = sorted(dearer[0] - kept, reverse=True)  # the last layers first
    if added and is_enough(attempt(kept.union(added), limit)):
        _halve(graph, kept, added, limit, is_enough, attempt)
    _keep_kinds(graph, best, frozenset().union(*dearer) - kept, is_enough, attempt)


def _halve(
    graph: Graph,
    kept: frozenset[int],
    added: Sequence[int],
    limit: int,
    is_enough: Callable[[Outcome], bool],
    attempt: Attempt,
) -> None:
    """Try to keep parts of ``added`` beside ``kept``: find by bisection the smallest first part that ``is_enough``."""
    few, many = 0, len(added)
    for _ in range(HALVINGS):
        middle = (few + many) // 2
        if is_enough(attempt(cheapest_cut(graph, pinned=kept.union(added[:middle])), limit)):
            many = middle
        else:
            few = middle


def _keep_kinds(
    graph: Graph,
    best: Try,
    candidates: AbstractSet[int],
    is_enough: Callable[[Outcome], bool],
    attempt: Attempt,
) -> None:
    """Try cuts that keep whole kinds of values, those first that save the most work per byte added to the peak."""
    kept, limit, least = best
    values = graph.values
    kinds: dict[tuple[int, ...], list[int]] = {}
    for n in sorted(candidates, reverse=True):  # the last layers first
        price = round(8 * values[n].price / max(1, values[n].nbytes))
        kinds.setdefault((price, len(graph.readers[n])), []).append(n)
    largest = sorted(kinds.values(), key=lambda kind: (-len(kind) * values[kind[0]].nbytes, kind))[:MOST_KINDS]
    gains = []
    for kind in largest:
        outcome = attempt(cheapest_cut(graph, pinned=kept.union(kind)), limit)
        spared = least.work - outcome.work
        if spared > 0:
            gains.append((spared / max(1, outcome.peak_bytes - least.peak_bytes), kind))
    gains.sort(key=lambda one: (-one[0], one[1]))
    for _, kind in gains:
        if is_enough(attempt(cheapest_cut(graph, pinned=kept.union(kind)), limit)):
            _halve(graph, kept, kind, limit, is_enough, attempt)
            return
        kept = kept.union(kind)


def _end_chains(graph: Graph, cheapest: frozenset[int], limit: int, attempt: Attempt) -> None:
    """Try the cheapest cut, the same with chains ended at several depths, and the best of these with fewer ends."""
    lowest, best = attempt(cheapest, limit).peak_bytes, frozenset[int]()
    for ends in dict.fromkeys(ends_by_sources(graph, cheapest, depth) for depth in DEPTHS):
        if (peak := attempt(cheapest_cut(graph, pinned=ends), limit).peak_bytes) < lowest:
            lowest, best = peak, ends
    for n in sorted(best, key=lambda n: (-graph.values[n].nbytes, n))[:MOST_ENDS]:
        if (peak := attempt(cheapest_cut(graph, pinned=best - {n}), limit).peak_bytes) < lowest:
            lowest, best = peak, best - {n}


def lowest_peak(graph: Graph, play: Play) -> frozenset[int]:
    """Return the cut with the lowest peak, whatever its work; ties go to the fewest kept bytes, then the least work.

    The best candidate is then refined, unless the graph is too large: single values are kept or recomputed where that
    lowers the peak, and kept values are recomputed where keeping them lowers nothing. Last, values that backward reads
    first are kept in place of what they are computed from where that lowers the peak; several together where that
    lowers it much.
    """
    fixed = frozenset(n for n, value in enumerate(graph.values) if value.is_fixed)
    cheapest = cheapest_cut(graph)
    chains = links(graph, cheapest)
    unit = max((graph.values[n].nbytes for n in chains), default=0)
    ends = [frozenset[int](), *(ends_by_length(graph, cheapest, length) for length in range(LONGEST + 1))]
    ends += [ends_by_room(graph, cheapest, slack * unit) for slack in SLACKS]
    cuts = dict.fromkeys(fixed | cheapest_cut(graph, pinned=pinned) for pinned in dict.fromkeys(ends))
    tried = [(play(kept), kept) for kept in cuts]
    lowest = min(outcome.peak_bytes for outcome, _ in tried)
    near = [one for one in tried if one[0].peak_bytes <= lowest * EQUAL]
    fewest = min(outcome.kept_bytes for outcome, _ in near)
    lean = [one for one in near if one[0].kept_bytes <= fewest * NEAR]
    best, kept = min(lean, key=lambda one: one[0].work)
    repeatable = sum(value.is_repeatable for value in graph.values)
    reads = sum(value.is_backward for value in graph.values)
    if len(chains) * reads * (1 + repeatable // REPEATABLE) > MOST_REFINED:
        return kept
    for n in sorted(chains):
        outcome = play(kept ^ {n})
        is_worth = outcome.kept_bytes - best.kept_bytes <= WORTH * (best.peak_bytes - outcome.peak_bytes)
        if outcome.peak_bytes * EQUAL < best.peak_bytes and is_worth:
            best, kept = outcome, kept ^ {n}
    for n in sorted(kept - fixed):
        outcome = play(kept - {n})
        if outcome.peak_bytes <= best.peak_bytes and outcome.kept_bytes < best.kept_bytes:
            best, kept = outcome, kept - {n}
    first = _first_read(graph, fixed)
    for several in (some for count in range(1, FIRST + 1) for some in combinations(first, count)):
        outcome = play(kept.union(several))
        frees_source = outcome.kept_bytes < best.kept_bytes + sum(graph.values[n].nbytes for n in several)
        if frees_source and outcome.peak_bytes * (EQUAL if len(several) == 1 else MUCH) < best.peak_bytes:
            best, kept = outcome, kept.union(several)
    return kept


def _first_read(graph: Graph, fixed: AbstractSet[int]) -> list[int]:
    """Return what backward reads first, while all is still held. The loss may keep log-probabilities, not logits."""
    read = dict.fromkeys(i for value in graph.values if value.is_backward for i in value.inputs)
    found = [n for n in read if n not in fixed and not graph.values[n].is_backward and graph.values[n].can_be_kept]
    return [n for n in found if graph.values[n].nbytes][:FIRST]
