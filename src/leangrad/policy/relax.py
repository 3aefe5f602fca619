"""Relaxes the plan with the least memory towards less work: it keeps more, where memory is left or time is short.

[Note: gain per byte] Keeping a value saves the work of rebuilding it, and of rebuilding what only it reads. Values are
kept in the order of this gain per byte, the highest first; ties go to the last layers, which backward reads first and
frees first. How many values are kept is found by bisection, since more of them mean more memory and less work. Then
single values are tried: the next ones in that order, and of all others those that save the most work. A value that
still fits is kept, and one that does not may replace a cheaper one. (Logits are expensive to rebuild, and large. But
backward reads them first, and where they are the peak anyway, keeping them costs no memory.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from leangrad.policy.cut import remade
from leangrad.policy.peak import Outcome
from leangrad.policy.replay import Replay

__all__ = ["Relaxation"]

TRIES = 48  # single values that are tried after the bisection, in their order
DEAREST = 16  # of the others, how many are tried, by the work that they save
FINE = 0.002  # peaks within this fraction of each other count as equal
Fits = Callable[[Outcome], bool]


class Relaxation:
    """The plans that keep more than ``kept``: the other values, in the order in which they are worth keeping."""

    def __init__(
        self, replay: Replay, kept: frozenset[int], beside: Callable[[frozenset[int]], int] | None = None
    ) -> None:
        """``beside``: returns the bytes that a plan keeps and that are not in the graph."""
        self._replay, self.kept, self.graph, self._beside = replay, kept, replay.graph, beside
        self._values = replay.graph.values
        self._played: dict[frozenset[int], Outcome] = {}

    def play(self, kept: frozenset[int]) -> Outcome:
        """Simulate the step with ``kept``; outcomes are cached."""
        if kept not in self._played:
            outcome = self._replay.play(kept)
            if self._beside is not None and (more := self._beside(kept)):
                outcome = replace(
                    outcome,
                    peak_bytes=outcome.peak_bytes + more,
                    kept_bytes=outcome.kept_bytes + more,
                    forward_bytes=outcome.forward_bytes + more,
                )
            self._played[kept] = outcome
        return self._played[kept]

    @cached_property
    def order(self) -> Sequence[int]:
        """The values that may be kept instead of rebuilt, highest gain per byte first: see [Note: gain per byte]."""
        gains = self._gains
        return sorted(gains, key=lambda n: (-gains[n] / self._values[n].nbytes, -n))

    @cached_property
    def _gains(self) -> dict[int, float]:
        """For each value that may be kept instead of rebuilt, the work that keeping it saves."""
        graph, costs = self._replay.graph, self._replay.costs
        made = remade(graph, self.kept)
        gains: dict[int, float] = {}
        for n in sorted(made):
            gains[n] = costs[n]
            for i in dict.fromkeys(self._values[n].inputs):
                if i in made and all(r == n for r in graph.readers[i] if r in made or self._values[r].is_backward):
                    gains[n] += gains[i]
        return {n: gain for n, gain in gains.items() if self._values[n].nbytes > 0 and self._values[n].can_be_kept}

    def with_last(self, fits: Fits) -> Relaxation:
        """Return the relaxation of the plan that also keeps the last values of forward, as many as fit."""
        values = sorted(self.order)
        too_early, first = -1, len(values)  # keeping all values from here on: does not fit, fits
        while first - too_early > 1:
            middle = (too_early + first) // 2
            if fits(self.play(self.kept.union(values[middle:]))):
                first = middle
            else:
                too_early = middle
        return Relaxation(self._replay, self.kept.union(values[first:]), self._beside)

    def within(self, fits: Fits) -> frozenset[int]:
        """Return the plan with the least work that fits, by [Note: gain per byte]; ``kept`` if not even that fits."""
        order = self.order
        few, many = 0, len(order) + 1
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (middle, many) if fits(self.play(self.kept.union(order[:middle]))) else (few, middle)
        kept = self.kept.union(order[:few])
        others = sorted(order[few + TRIES :], key=lambda n: (-self._gains[n], -n))
        for n in (*order[few : few + TRIES], *others[:DEAREST]):
            if fits(self.play(kept | {n})):
                kept |= {n}
            else:
                kept = self._swap(kept, n, fits)
        return kept

    def _swap(self, kept: frozenset[int], n: int, fits: Fits) -> frozenset[int]:
        """Keep ``n`` in place of the value of least gain per byte that is large enough, if that fits and saves work."""
        beside = [i for i in reversed(self.order) if i in kept and self._values[i].nbytes >= self._values[n].nbytes]
        for i in beside[:1]:
            other = kept - {i} | {n}
            if self.play(other).work < self.play(kept).work and fits(self.play(other)):
                return other
        return kept

    def at_most(self, work: float) -> frozenset[int]:
        """Return the plan with the lowest peak whose work is at most ``work``; one that keeps all, if there is none.

        The search begins with the plan that saves enough work with the fewest bytes. But what the last layers keep is
        freed before backward reaches the peak. So the search then looks by bisection for the lowest peak within which
        a plan is fast enough.
        """
        best = self._fewest_bytes(work)
        low, high = self.play(self.kept).peak_bytes, self.play(best).peak_bytes
        while high - low > FINE * high:
            middle = (low + high) // 2
            found = self.within(lambda outcome, most=middle: outcome.peak_bytes <= most)  # type: ignore[misc]
            if self.play(found).work <= work:
                best, high = found, min(middle, self.play(found).peak_bytes)
            else:
                low = middle
        return best

    def _fewest_bytes(self, work: float) -> frozenset[int]:
        order = self.order
        few, many = -1, len(order)
        while many - few > 1:
            middle = (few + many) // 2
            if self.play(self.kept.union(order[:middle])).work <= work:
                many = middle
            else:
                few = middle
        return self.kept.union(order[:many])
