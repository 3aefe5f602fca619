"""Which plan to try next, where a bound on the time is to be met with as little memory as can be.

[Note: what a plan costs] Rebuilding takes time, and so does watching: an override sees the calls of forward up to the
last one that makes something to be rebuilt (`early_end`). A host that is the limit feels both. What is lost by a plan
is foreseen as a sum of the two, each with a rate that is fitted to what was measured so far. So two plans with the same
work are not alike: the one that rebuilds in the first layers alone is the faster one, and in a convolutional net it is
the one that saves the most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from leangrad.ledger.learn.recorded_step import LAST_SHAPES
from leangrad.policy.cut import remade
from leangrad.policy.relax import Relaxation
from leangrad.policy.replay import Replay

__all__ = ["Pace"]

REACHES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)  # of forward, in which something is rebuilt
AIMS = (0.95, 0.85, 0.7, 0.5, 0.3, 0.15)  # of what may be lost, after so many plans that were too slow
AFTER_ONE = 0.92  # the same, once a plan was fast enough
MOST = 8  # plans that are tried
LITTLE = 0.1  # of what may be lost: so much is left for rebuilding, even where watching should cost more
WORTH = 0.04  # of the memory that can be saved: for less no other plan is tried


class Pace:
    """What was tried for one bound, and what to try next."""

    def __init__(
        self,
        replay: Replay,
        smallest: frozenset[int],
        allowed: float,
        shape_bytes: Callable[[frozenset[int]], int] | None = None,
    ) -> None:
        """``allowed``: what may be lost, as a share of plain's time. ``shape_bytes``: of a plan with LAST_SHAPES."""
        self._replay, self.smallest, self._allowed, self._shape_bytes = replay, smallest, allowed, shape_bytes
        self.lost: dict[frozenset[int], float] = {}  # of what was tried, the plan with the least memory first

    def note(self, kept: frozenset[int], lost: float) -> None:
        """It was tried, and so much was lost."""
        self.lost[kept] = lost

    @property
    def best(self) -> frozenset[int] | None:
        """Of what was tried and is fast enough, the lowest peak.

        Not one that did better than another which rebuilds less, and that was too slow: it was lucky.
        """
        found = [kept for kept, lost in self.lost.items() if lost <= self._allowed and not self._is_too_much(kept)]
        return min(found, key=self._peak, default=None)

    @property
    def tried(self) -> list[tuple[float, float]]:
        """Of each plan that was tried: the share of what can be saved that it saves, and its time over plain's."""
        most, least = self._peak(self.everything), self._peak(self.smallest)
        return [((most - self._peak(kept)) / max(1, most - least), 1 + lost) for kept, lost in self.lost.items()]

    def _is_too_much(self, kept: frozenset[int]) -> bool:
        """Whether a plan that rebuilds less, and no further into forward, was too slow."""
        slow = [other for other, lost in self.lost.items() if lost > self._allowed and other != kept]
        reach, work = self._reach(kept), self._work(kept)
        return any(self._reach(other) <= reach and self._work(other) <= work for other in slow)

    def next(self) -> frozenset[int] | None:
        """The lowest peak that should be fast enough; None: nothing more is worth a try."""
        best = self.best
        if best == self.smallest or len(self.lost) > MOST:
            return None
        most = self._peak(self.everything) if best is None else self._peak(best)
        worth = 0.0 if best is None else WORTH * (self._peak(self.everything) - self._peak(self.smallest))
        too_slow = sum(lost > self._allowed for lost in self.lost.values())
        for aim in AIMS[max(0, too_slow - 1) :] if best is None else (AFTER_ONE,):
            limit = aim * self._allowed
            found = [one for one in self._candidates(limit) if most - self._peak(one) >= max(1, worth)]
            fast = [one for one in found if self._foreseen(one) <= limit]
            if fast:
                return min(fast, key=lambda one: (self._peak(one), self._foreseen(one)))
            if found and best is None:  # none should be: the nearest to it
                return min(found, key=self._foreseen)
        return None

    @cached_property
    def everything(self) -> frozenset[int]:
        """All that may be kept."""
        return self.smallest.union(self._relaxations[0].order)

    @cached_property
    def _relaxations(self) -> Sequence[Relaxation]:
        """One for each of REACHES: all that is made later is kept."""
        whole = Relaxation(self._replay, self.smallest, self._shape_bytes)
        places, base = (
            sorted(whole.order),
            self.smallest if self._shape_bytes is None else self.smallest | {LAST_SHAPES},
        )
        later = [base.union(places[int(reach * len(places)) :]) for reach in REACHES[1:]]
        return [whole, *(Relaxation(self._replay, kept, self._shape_bytes) for kept in later)]

    def _candidates(self, lost: float) -> list[frozenset[int]]:
        """Of each reach, the lowest peak that should lose no more than that."""
        watching, rebuilding = self._rates
        found = []
        for reach, relaxation in zip(REACHES, self._relaxations, strict=True):
            kept = relaxation.at_most(max(lost - watching * reach, LITTLE * lost) / rebuilding)
            if self.everything <= kept and relaxation.order:  # at the least the largest value that is made again
                values = self._replay.graph.values
                kept = self.everything - {max(relaxation.order, key=lambda n: values[n].nbytes)}
            found.append(kept)
        return [
            kept
            for kept in found
            if kept not in self.lost and not self.everything <= kept and not self._is_too_much(kept)
        ]

    def _foreseen(self, kept: frozenset[int]) -> float:
        watching, rebuilding = self._rates
        return watching * self._reach(kept) + rebuilding * self._work(kept)

    @property
    def _rates(self) -> tuple[float, float]:
        """What watching all of forward costs, and a second of rebuilding: the best fit, near the bound above all."""
        points = [(self._reach(kept), self._work(kept), max(lost, 1e-3)) for kept, lost in self.lost.items()]
        if len(points) == 1:
            _, work, lost = points[0]
            return 0.0, lost / max(work, 1e-12)
        weighed = [(reach / lost, work / lost) for reach, work, lost in points]  # times the two rates, each should be 1
        rr, rw, ww = (sum(a[i] * a[j] for a in weighed) for i, j in ((0, 0), (0, 1), (1, 1)))
        r, w = (sum(a[i] for a in weighed) for i in (0, 1))
        det = rr * ww - rw * rw
        watching, rebuilding = ((r * ww - w * rw) / det, (w * rr - r * rw) / det) if det > 1e-12 * rr * ww else (-1, -1)
        if rebuilding <= 0:  # it costs something all the same
            rebuilding = 0.1 * w / max(ww, 1e-12)
            watching = max(0.0, (r - rebuilding * rw) / max(rr, 1e-12))
        elif watching < 0:
            watching, rebuilding = 0.0, w / max(ww, 1e-12)
        return watching, max(rebuilding, 1e-9)

    def _peak(self, kept: frozenset[int]) -> int:
        return self._relaxations[0].play(kept).peak_bytes

    def _work(self, kept: frozenset[int]) -> float:
        return self._relaxations[0].play(kept).work

    def _reach(self, kept: frozenset[int]) -> float:
        """The part of forward in which something is rebuilt under a plan."""
        made = [n for n in remade(self._replay.graph, kept) if n in self._places]
        return (self._places[max(made)] + 1) / len(self._places) if made else 0.0

    @cached_property
    def _places(self) -> dict[int, int]:
        """Of each value that may be kept, its place among them in forward."""
        return {n: place for place, n in enumerate(sorted(self._relaxations[0].order))}
