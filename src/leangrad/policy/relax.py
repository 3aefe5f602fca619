"""From the cut with the least memory towards less work: what is kept beside it, if there is room, or if time is short.

[Note: gain per byte] To keep a value saves making it again, and what is made for it alone. Values are taken by that
gain for each of their bytes, the dearest first; of equal ones, those of the last layers first, which backward reads
first and lets go first. How many of them are taken is found by halving: more of them is more memory and less work. Then
single values are tried that still fit, and one that does not may push out a cheaper one: the next in that order, and of
all others those that save the most work. (Logits are dear to make again and large; but backward reads them first, and
where they are the peak anyway, to keep them costs nothing.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from leangrad.policy.cut import remade
from leangrad.policy.peak import Outcome
from leangrad.policy.replay import Replay

__all__ = ["Relaxation"]

TRIES = 48  # single values that are tried after the halving, in their order
DEAREST = 16  # and of the others, by the work that they save
FINE = 0.002  # of a peak: two plans that are no further apart are taken for equal
Fits = Callable[[Outcome], bool]


class Relaxation:
    """All that may be kept beside ``kept``, in the order in which it is worth it."""

    def __init__(
        self, replay: Replay, kept: frozenset[int], beside: Callable[[frozenset[int]], int] | None = None
    ) -> None:
        """``beside``: the bytes that a plan keeps of which the graph does not know."""
        self._replay, self.kept, self.graph, self._beside = replay, kept, replay.graph, beside
        self._values = replay.graph.values
        self._played: dict[frozenset[int], Outcome] = {}

    def play(self, kept: frozenset[int]) -> Outcome:
        """How the step plays out with ``kept``."""
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
        """What is made again, the highest gain per byte first: see [Note: gain per byte]."""
        gains = self._gains
        return sorted(gains, key=lambda n: (-gains[n] / self._values[n].nbytes, -n))

    @cached_property
    def _gains(self) -> dict[int, float]:
        """Of each value that may be kept: the work that this saves."""
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
        """All that may be kept beside ``kept`` and all values from one of forward on: the first one that fits."""
        values = sorted(self.order)
        too_early, first = -1, len(values)  # what is made from there on does not fit, and fits
        while first - too_early > 1:
            middle = (too_early + first) // 2
            if fits(self.play(self.kept.union(values[middle:]))):
                first = middle
            else:
                too_early = middle
        return Relaxation(self._replay, self.kept.union(values[first:]), self._beside)

    def within(self, fits: Fits) -> frozenset[int]:
        """The least work that fits. Where not even ``kept`` does, it is that."""
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
        """Keep ``n`` in the stead of the cheapest one that is kept and large enough, if that is less work."""
        beside = [i for i in reversed(self.order) if i in kept and self._values[i].nbytes >= self._values[n].nbytes]
        for i in beside[:1]:
            other = kept - {i} | {n}
            if self.play(other).work < self.play(kept).work and fits(self.play(other)):
                return other
        return kept

    def at_most(self, work: float) -> frozenset[int]:
        """The lowest peak with which the work is at most so much; all, if it never is.

        The fewest bytes that spare so much work are a beginning. But what the last layers keep is gone before backward
        comes to the peak: of the plans for one peak or another, the one with the lowest is taken that is fast enough.
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
