"""The cut that an engine takes: of a few candidates the one with the lowest peak, within a bound on the added work.

[Note: candidates] The cheapest cut keeps the fewest bytes, but its peak need not be the lowest: a link of a residual
stream that is made again takes all links before it. So candidates end such chains where a value would be made from more
than so many kept ones, and of the best of them those ends are left out again that do not lower the peak: a chain that
is made again late in backward, when little is held, may be long.

[Note: the bound] If all candidates add more work than allowed, more is kept. A price on what is made again is no way to
keep a little more: blocks that are alike have like prices, and all of them cross it at once. So of what the usual cut
keeps beside the cheapest one, a part is kept, that of the last layers first: it is gone when the peak comes. And of
what any dearer cut keeps, values of one kind, which have the same price for a byte in all blocks, are tried together;
the kinds that spare the most work for what they add to the peak are kept first.

[Note: the usual cut] What counts as added work is what a step takes beyond the one that users would have without us. An
engine that knows what would be kept there says so, and what is chosen has no higher peak than that, even if it takes
more work than the bound allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from leangrad.policy.chains import ends_by_length, ends_by_room, ends_by_sources, links
from leangrad.policy.cut import cheapest_cut
from leangrad.policy.graph import Graph
from leangrad.policy.kernels import Fusion
from leangrad.policy.peak import EQUAL, Outcome, play

__all__ = ["Choice", "choose", "lowest_peak"]

DEPTHS = (1, 2, 4, 6, 8, 12, 16)  # kept values that one is made again from
PRICES = (0.2, 0.5, 1.0)  # kept bytes for one byte moved
REUSED_READS = (Fusion().reused_reads, 8)  # limits on what the kernels of backward compute anew for each reader
HALVINGS = 6  # of the span in which the part to keep is looked for
MOST_ENDS = 24  # that are tried one by one
MOST_KINDS = 16  # of values that are alike, in all blocks
LONGEST = 12  # links in a chain, where all chains are ended alike
SLACKS = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # in units of the largest link
FIRST = 3  # values that backward reads: those of the loss
MOST_REFINED = (
    1 << 18
)  # links times reads of backward, which takes about a second; beyond that the best candidate is taken
REPEATABLE = 4  # values that may be made again: with so many, playing a cut through takes twice as long
WORTH = 8  # bytes that may be kept for each byte that the peak falls, where single values are kept or made again
NEAR = 1.02  # peaks within this factor of the lowest count as equal: then the least work wins


@dataclass(frozen=True)
class Choice:
    """The values to keep, and how the step plays out with them."""

    kept: frozenset[int]
    outcome: Outcome
    floor: Outcome  # of the cheapest cut
    lowest: Outcome  # of the cut that would be chosen if work did not matter
    is_held_back: bool  # because that would be too much work
    step_work: float  # of the step with the usual cut
    reused_reads: int  # the limit of `Fusion` for the kernels of backward
    usual: Outcome | None = None  # of the usual cut, where that is known

    @property
    def slowdown(self) -> float:
        """The work of the step with this cut, beside that with the usual one."""
        return self.outcome.work / max(self.step_work, 1)

    @property
    def lowest_slowdown(self) -> float:
        """The same for the cut that would be chosen if work did not matter."""
        return self.lowest.work / max(self.step_work, 1)


Play = Callable[[frozenset[int]], Outcome]
Try = tuple[frozenset[int], int, Outcome]  # what is kept, the limit on reads, and how that plays out
Attempt = Callable[[frozenset[int], int], Outcome]  # play one through and remember it


def choose(
    graph: Graph,
    *,
    slowdown: float,
    limits: Sequence[int] = REUSED_READS,
    usual: AbstractSet[int] | None = None,
    budget: int | None = None,
) -> Choice:
    """The cut with the lowest simulated peak whose work is at most ``slowdown`` times that of the usual one.

    With a budget it is the cut with the least work whose simulated peak is within it, whatever the slowdown; where none
    is, the one with the lowest peak.

    limits: the values of ``Fusion.reused_reads`` that the engine can have the kernels of backward compiled with; the
        first of them is what it compiles with anyway.
    usual: what would be kept without this policy; if that is not known, the least work of a few cuts stands for it.
    """
    cheapest = cheapest_cut(graph)
    dearer = [cheapest_cut(graph, price=price) for price in PRICES]
    ceiling = None
    if usual is not None:
        bases = frozenset(graph.base(n) for n in usual)
        ceiling = play(graph, bases)  # it may make again what the policy never does
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
    allowed = [one for one in below if one[2].work <= bound] or [min(below, key=_work)]  # the user may force more work
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
    """Try cuts that keep a part of what dearer ones keep: around the smallest part with which it ``is_enough``."""
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
    """Try to keep parts of ``added`` beside what is kept: around the smallest one with which it ``is_enough``."""
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
    """Try cuts that keep those kinds of values first that spare the most work for each byte of the peak."""
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
    """The cut with the lowest peak, whatever its work; among equal ones the fewest kept bytes, then the least work.

    After the best of the candidates is found, single values are kept or made again where that lowers the peak, then
    what is kept to no purpose is made again.
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
    for n in _first_read(graph, fixed):
        outcome = play(kept | {n})
        frees_source = outcome.kept_bytes < best.kept_bytes + graph.values[n].nbytes
        if frees_source and outcome.peak_bytes * EQUAL < best.peak_bytes:
            best, kept = outcome, kept | {n}
    return kept


def _first_read(graph: Graph, fixed: AbstractSet[int]) -> list[int]:
    """What backward reads while all is still alive: under a loss, log-probabilities may be kept instead of logits."""
    read = dict.fromkeys(i for value in graph.values if value.is_backward for i in value.inputs)
    return [n for n in read if graph.values[n].nbytes and not graph.values[n].is_backward and n not in fixed][:FIRST]
