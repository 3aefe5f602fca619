"""Chooses the plan to try next in the search for the lowest peak within a bound on the time.

[Note: what a plan costs] Rebuilding takes time, and so does watching: the function mode sees the calls of forward up to
the last one that makes a tensor to be rebuilt (`early_end`). Both slow a step down if the host is the limit. The
predicted loss of a plan is the sum of the two, each with a rate that is fitted to the plans measured so far. So two
plans with the same work may differ: the one that rebuilds only in the first layers is faster, and in a convolutional
net it is also the one that saves the most memory.

[Note: measured and predicted] On a host whose speed changes, a plan's measured loss is off by some percent, and the
best of several measurements is too good. But all of them together fix the two rates well. So the expected loss of a
plan is the mean of its measured loss and the predicted one, weighted by how certain each is. On a quiet machine that is
the measured loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

from leangrad.ledger.learn.recorded_step import LAST_SHAPES
from leangrad.policy.cut import remade
from leangrad.policy.relax import Relaxation
from leangrad.policy.replay import Replay

__all__ = ["CandidatePlans"]

REACHES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)  # a plan rebuilds only in so much of forward
AIMS = (0.95, 0.85, 0.7, 0.5, 0.3, 0.15)  # share of the allowed loss to aim at, by how many plans were too slow
AFTER_ONE = 0.92  # the same, once a plan was fast enough
MOST = 8  # plans that are tried beside the smallest one
LITTLE = 0.1  # least share of the loss aimed at that is left for rebuilding, even if watching should cost more
MODEL_ERROR = 0.25  # standard error of a predicted loss, as a share of it
WORTH = 0.04  # share of the memory that can be saved: a further plan is tried only if it should save so much more


class CandidatePlans:
    """The plans that were tried for one bound on the time, and the choice of the next one."""

    def __init__(
        self,
        replay: Replay,
        smallest: frozenset[int],
        allowed: float,
        shape_bytes: Callable[[frozenset[int]], int] | None = None,
    ) -> None:
        """``smallest``: the plan with the lowest peak, from which all others are relaxed.

        allowed: the time that a plan may lose, as a share of plain PyTorch's time.
        shape_bytes: gives the bytes that a plan with LAST_SHAPES keeps beside its items; None: no plan has that.
        """
        self._replay, self.smallest, self._allowed, self._shape_bytes = replay, smallest, allowed, shape_bytes
        # The measured loss of each plan tried, as a share of plain PyTorch's time; the smallest plan is the first.
        self.lost: dict[frozenset[int], float] = {}
        self._doubt: dict[frozenset[int], float] = {}  # the standard error of each of these losses

    def note(self, kept: frozenset[int], lost: float, doubt: float = 0.0) -> None:
        """Note that the plan ``kept`` was tried and lost ``lost``, as a share of plain PyTorch's time.

        doubt: the standard error of ``lost``.
        """
        self.lost[kept], self._doubt[kept] = lost, doubt

    def expected(self, kept: frozenset[int]) -> float:
        """The loss of a plan that was tried, by its measurement and by those of all: [Note: measured and predicted]."""
        lost, doubt = self.lost[kept], self._doubt[kept]
        if not doubt:
            return lost
        predicted = self._foreseen(kept)
        of_measured, of_predicted = doubt**-2, (MODEL_ERROR * max(predicted, self._allowed)) ** -2
        return (of_measured * lost + of_predicted * predicted) / (of_measured + of_predicted)

    @property
    def best(self) -> frozenset[int] | None:
        """The plan with the lowest peak among those that were tried and are fast enough; None if there is none.

        A plan does not count if one that rebuilds less was too slow: then its short time was luck.
        """
        found = [kept for kept in self.lost if not self._is_slow(kept) and not self._is_too_much(kept)]
        return min(found, key=self._peak, default=None)

    @property
    def tried(self) -> list[tuple[float, float]]:
        """For each plan tried: its share of the memory that can be saved, and its time divided by plain PyTorch's."""
        most, least = self._peak(self.everything), self._peak(self.smallest)
        return [((most - self._peak(kept)) / max(1, most - least), 1 + lost) for kept, lost in self.lost.items()]

    def _is_too_much(self, kept: frozenset[int]) -> bool:
        """Whether another plan that rebuilds no more, and no further into forward, was too slow."""
        slow = [other for other in self.lost if other != kept and self._is_slow(other, beyond_doubt=True)]
        reach, work = self._reach(kept), self._work(kept)
        return any(self._reach(other) <= reach and self._work(other) <= work for other in slow)

    def _is_slow(self, kept: frozenset[int], *, beyond_doubt: bool = False) -> bool:
        """Whether a plan that was tried loses more than is allowed."""
        return self.expected(kept) - beyond_doubt * self._doubt[kept] > self._allowed

    def next(self) -> frozenset[int] | None:
        """The plan with the lowest peak that is predicted to be fast enough; None: no further plan is worth a try."""
        best = self.best
        if best == self.smallest or len(self.lost) > MOST:
            return None
        most = self._peak(self.everything) if best is None else self._peak(best)
        worth = 0.0 if best is None else WORTH * (self._peak(self.everything) - self._peak(self.smallest))
        if best is not None and (failed := [peak for peak in map(self._peak, self._failed()) if peak < most]):
            return self._between(most, max(failed), worth)
        too_slow = sum(map(self._is_slow, self.lost))
        for aim in AIMS[max(0, too_slow - 1) :] if best is None else (AFTER_ONE,):
            limit = aim * self._allowed
            found = [one for one in self._candidates(limit) if most - self._peak(one) >= max(1, worth)]
            fast = [one for one in found if self._foreseen(one) <= limit]
            if fast:
                return min(fast, key=lambda one: (self._peak(one), self._foreseen(one)))
            if found and best is None:  # none is predicted to be fast enough: try the fastest
                return min(found, key=self._foreseen)
        return None

    @property
    def doubtful(self) -> list[frozenset[int]]:
        """The two plans by which the search has ended: the best one, and the next one below, which was too slow."""
        best = self.best
        most = self._peak(self.everything if best is None else best)
        failed = [kept for kept in self._failed() if self._peak(kept) < most]
        return [*([] if best is None else [best]), *sorted(failed, key=self._peak)[-1:]]

    def _failed(self) -> list[frozenset[int]]:
        """The plans that were predicted to be fast enough, and were not."""
        return [kept for kept in self.lost if kept != self.smallest and self._is_slow(kept)]

    def _between(self, most: int, least: int, worth: float) -> frozenset[int] | None:
        """The plan that is predicted to be the fastest of those with a peak halfway between ``most`` and ``least``.

        The loss is not quite linear: where the GPU has been the limit and the host becomes it, a prediction from fast
        plans is far too good. So after a failure the search goes half the way to the plan that failed, not to where the
        prediction points. None if that would save less than ``worth``.
        """
        target = (most + least) / 2
        if most - target < max(1, worth):
            return None
        found = [one.within(lambda outcome: outcome.peak_bytes <= target) for one in self._relaxations]
        found = [kept for kept in found if self._peak(kept) <= target and kept not in self.lost]
        found = [kept for kept in found if not self._is_too_much(kept)]
        return min(found, key=lambda one: (self._foreseen(one), self._peak(one)), default=None)

    @cached_property
    def everything(self) -> frozenset[int]:
        """The plan that keeps all that may be kept."""
        return self.smallest.union(self._relaxations[0].order)

    @cached_property
    def _relaxations(self) -> Sequence[Relaxation]:
        """One relaxation for each of REACHES, in which all that forward makes after that part is kept."""
        whole = Relaxation(self._replay, self.smallest, self._shape_bytes)
        places, base = (
            sorted(whole.order),
            self.smallest if self._shape_bytes is None else self.smallest | {LAST_SHAPES},
        )
        later = [base.union(places[int(reach * len(places)) :]) for reach in REACHES[1:]]
        return [whole, *(Relaxation(self._replay, kept, self._shape_bytes) for kept in later)]

    def _candidates(self, lost: float) -> list[frozenset[int]]:
        """For each of REACHES the plan with the lowest peak that is predicted to lose no more than ``lost``."""
        watching, rebuilding = self._rates
        found = []
        for reach, relaxation in zip(REACHES, self._relaxations, strict=True):
            kept = relaxation.at_most(max(lost - watching * reach, LITTLE * lost) / rebuilding)
            if self.everything <= kept and relaxation.order:  # rebuild at least the largest value
                values = self._replay.graph.values
                kept -= {max(relaxation.order, key=lambda n: values[n].nbytes)}
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
        """What watching all of forward loses, and what a second of rebuilding loses, as shares of plain PyTorch's time.

        They are a least-squares fit. Errors count relative to the loss, so plans with small losses, near the bound,
        count the most, and relative to the doubt about it.
        """
        points = [(self._reach(kept), self._work(kept), max(lost, 1e-3)) for kept, lost in self.lost.items()]
        if len(points) == 1:
            _, work, lost = points[0]
            return 0.0, lost / max(work, 1e-12)
        # For each plan watching * reach + rebuilding * work should be its loss, give or take its error.
        errors = [
            math.hypot(lost, self._doubt[kept] / MODEL_ERROR)
            for kept, (_, _, lost) in zip(self.lost, points, strict=True)
        ]
        weighed = [
            (reach / error, work / error, lost / error)
            for error, (reach, work, lost) in zip(errors, points, strict=True)
        ]
        rr, rw, ww, r, w = (sum(a[i] * a[j] for a in weighed) for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2)))
        det = rr * ww - rw * rw
        watching, rebuilding = ((r * ww - w * rw) / det, (w * rr - r * rw) / det) if det > 1e-12 * rr * ww else (-1, -1)
        if rebuilding <= 0:  # rebuilding does cost something: set a small rate, and fit the other to it
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
        """The share of forward, from its beginning, up to the last value that a plan rebuilds."""
        made = [n for n in remade(self._replay.graph, kept) if n in self._places]
        return (self._places[max(made)] + 1) / len(self._places) if made else 0.0

    @cached_property
    def _places(self) -> dict[int, int]:
        """The place of each value that may be kept, among all of these in forward's order."""
        return {n: place for place, n in enumerate(sorted(self._relaxations[0].order))}
