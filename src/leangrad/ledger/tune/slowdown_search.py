"""The search for the plan with the lowest peak that keeps steps within a bound on the time."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from leangrad.ledger.tune.candidate_plans import CandidatePlans
from leangrad.ledger.tune.goal import StepMode
from leangrad.ledger.tune.plan_search import WARM, PlanSearch
from leangrad.ledger.tune.ratios import MOST_PAIRS, Ratios
from leangrad.sizes import size_text

__all__ = ["SlowdownSearch"]

USABLE = 0.97  # share of the allowed loss that a plan may have by its measurements, which are off a little


class SlowdownSearch(PlanSearch):
    """Finds the lowest peak within a bound on the time, relative to plain PyTorch's time.

    Plans are timed in alternation with plain PyTorch, as long as it takes to tell whether they are fast enough: see
    [Note: times on a restless host]. Where plain PyTorch does not fit, its time is estimated: a step of the smallest
    plan less what its rebuilding takes.
    """

    def __init__(self, *args: Any) -> None:
        self._ratios: dict[frozenset[int], Ratios] = {}  # by plan
        super().__init__(*args)

    def step_modes(self) -> Iterator[StepMode]:
        """Yield for one step after another how it is to run."""
        assert self.goal.slowdown is not None
        for _ in range(WARM):
            yield StepMode(self.smallest)
            self.note_peak(self.smallest)
        yield from self.time_rebuilds()
        allowed = USABLE * (self.goal.slowdown - 1)
        candidates = CandidatePlans(self.replay, self.smallest, allowed, self.step.shape_bytes)
        is_measured = self._plain_fits()
        if is_measured:
            plain, lean = yield from self._try_beside_plain(candidates, self.smallest, 1 + allowed)
        else:
            (lean,) = yield from self.shortest(self.smallest)
            plain = lean - self.play(self.smallest).work
            candidates.note(self.smallest, lean / plain - 1)
        confirmed = set[frozenset[int]]()
        while True:
            kept = candidates.next()
            if kept is None:  # the best of many is there by luck in part, and so is the one that just failed: once more
                kept = next((one for one in candidates.doubtful if one not in confirmed), None)
                if kept is None:
                    break
                confirmed.add(kept)
            if is_measured:
                plain, _ = yield from self._try_beside_plain(candidates, kept, 1 + allowed)
            else:
                (seconds,) = yield from self.shortest(kept)
                candidates.note(kept, seconds / plain - 1)
        kept = self.all_kept if candidates.best is None else candidates.best  # ``best`` may be the empty set
        self._say(plain, lean, kept, is_measured=is_measured)
        tried = ", ".join(f"{share:.0%} at {time:.2f}" for share, time in candidates.tried)
        self.status += f"; tried, of what can be saved: {tried}"
        self.peaks.is_settled = self.is_final = True
        mode = self.mode_keeping(kept)
        while True:
            yield mode

    def _try_beside_plain(
        self, candidates: CandidatePlans, kept: frozenset[int], bound: float
    ) -> Generator[StepMode, None, tuple[float, float]]:
        """Time a plan beside plain PyTorch, and note what it loses; returns the shortest time of either.

        If the plan was timed before, these times count too.

        bound: the ratio to plain PyTorch's time up to which a plan is fast enough.
        """
        ratios = self._ratios.setdefault(kept, Ratios())
        before, of_plain, of_plan = ratios.count, list[float](), list[float]()
        while ratios.count == before or (ratios.count - before < MOST_PAIRS and not ratios.is_clear(bound)):
            plain, lean = yield from self.run(None, kept)
            ratios.add(plain, lean)
            of_plain, of_plan = of_plain + plain, of_plan + lean
        candidates.note(kept, ratios.ratio - 1, ratios.doubt)
        return min(of_plain), min(of_plan)

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
