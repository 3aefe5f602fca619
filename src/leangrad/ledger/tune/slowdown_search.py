"""The search for the plan with the lowest peak that keeps steps within a bound on the time."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Iterator
from typing import Any

from leangrad.ledger.tune.candidate_plans import CandidatePlans
from leangrad.ledger.tune.goal import StepMode
from leangrad.ledger.tune.plan_search import WARM, PlanSearch
from leangrad.sizes import size_text

__all__ = ["SlowdownSearch"]


class SlowdownSearch(PlanSearch):
    """Finds the lowest peak within a bound on the time, relative to plain PyTorch's time.

    Plans are timed in alternation with plain PyTorch. Where that does not fit, its time is estimated: a step of the
    smallest plan less what its rebuilding takes.
    """

    def __init__(self, *args: Any) -> None:
        self._timed: dict[frozenset[int], tuple[list[float], list[float]]] = {}  # by plan: times of plain and of it
        super().__init__(*args)

    def step_modes(self) -> Iterator[StepMode]:
        """Yield for one step after another how it is to run."""
        assert self.goal.slowdown is not None
        for _ in range(WARM):
            yield StepMode(self.smallest)
            self.note_peak(self.smallest)
        yield from self.time_rebuilds()
        is_measured = self._plain_fits()
        if is_measured:
            plain, lean, ratio = yield from self._beside_plain(self.smallest)
        else:
            (lean,) = yield from self.shortest(self.smallest)
            plain = lean - self.play(self.smallest).work
            ratio = lean / plain
        candidates = CandidatePlans(self.replay, self.smallest, self.goal.slowdown - 1, self.step.shape_bytes)
        candidates.note(self.smallest, ratio - 1)
        confirmed = set[frozenset[int]]()
        while True:
            kept = candidates.next()
            if kept is None:  # the best of many is there by luck in part: time it once more
                kept = candidates.best
                if kept is None or kept in confirmed:
                    break
                confirmed.add(kept)
            if is_measured:
                plain, _, ratio = yield from self._beside_plain(kept)
            else:
                (seconds,) = yield from self.shortest(kept)
                ratio = seconds / plain
            candidates.note(kept, ratio - 1)
        kept = self.all_kept if candidates.best is None else candidates.best  # ``best`` may be the empty set
        self._say(plain, lean, kept, is_measured=is_measured)
        tried = ", ".join(f"{share:.0%} at {time:.2f}" for share, time in candidates.tried)
        self.status += f"; tried, of what can be saved: {tried}"
        self.peaks.is_settled = self.is_final = True
        while True:
            yield self.mode_keeping(kept)

    def _beside_plain(self, kept: frozenset[int]) -> Generator[StepMode, None, tuple[float, float, float]]:
        """Time plain PyTorch and a plan; returns both times, and the plan's slowdown as [Note: time] defines it.

        If the plan was timed before, these times count too.
        """
        plain, lean = yield from self.run(None, kept)
        before = self._timed.setdefault(kept, ([], []))
        before[0].extend(plain)
        before[1].extend(lean)
        plain, lean = before
        by_turn = statistics.median(mine / other for mine, other in zip(lean, plain, strict=True))
        return min(plain), min(lean), max(min(lean) / min(plain), by_turn)

    def _plain_fits(self) -> bool:
        return self.peaks.has_room(self.peaks.foreseen(self.play(self.all_kept), self.step.unkept_bytes))

    def _say(self, plain: float, lean: float, kept: frozenset[int], *, is_measured: bool) -> None:
        least, now = self.play(self.smallest), self.play(kept)
        how = "measured" if is_measured else "plain does not fit: foreseen"
        self.status = (
            f"slowdown {self.goal.slowdown:g}: plain takes {1e3 * plain:.1f} ms ({how}), the least memory "
            f"{1e3 * lean:.1f} ms; saved tensors take {size_text(now.peak_bytes)} at most, "
            f"{size_text(least.peak_bytes)} at the least"
        )
