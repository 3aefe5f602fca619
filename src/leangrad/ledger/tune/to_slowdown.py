"""Towards a bound on the time: the least memory with which a step takes no longer than that."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Iterator

from leangrad.ledger.tune.course import WARM, Course
from leangrad.ledger.tune.goal import Way
from leangrad.ledger.tune.pace import Pace
from leangrad.sizes import size_text

__all__ = ["TowardsSlowdown"]


class TowardsSlowdown(Course):
    """Plans are timed beside plain, or, where plain does not fit, beside what is left of a step without rebuilding."""

    def ways(self) -> Iterator[Way]:
        """How one step after another is to run."""
        assert self.goal.slowdown is not None
        for _ in range(WARM):
            yield Way(self.smallest)
            self.note_peak(self.smallest)
        yield from self.time_rebuilds()
        is_measured = self._plain_fits()
        if is_measured:
            plain, lean, ratio = yield from self._beside_plain(self.smallest)
        else:
            (lean,) = yield from self.shortest(self.smallest)
            plain = lean - self.play(self.smallest).work
            ratio = lean / plain
        pace = Pace(self.replay, self.smallest, self.goal.slowdown - 1, self.step.shape_bytes)
        pace.note(self.smallest, ratio - 1)
        while (kept := pace.next()) is not None:
            if is_measured:
                plain, _, ratio = yield from self._beside_plain(kept)
            else:
                (seconds,) = yield from self.shortest(kept)
                ratio = seconds / plain
            pace.note(kept, ratio - 1)
        kept = self.all_kept if pace.best is None else pace.best  # which may be empty
        self._say(plain, lean, kept, is_measured=is_measured)
        tried = ", ".join(f"{share:.0%} at {time:.2f}" for share, time in pace.tried)
        self.status += f"; tried, of what can be saved: {tried}"
        self.peaks.is_settled = True
        while True:
            yield self.way(kept)

    def _beside_plain(self, kept: frozenset[int]) -> Generator[Way, None, tuple[float, float, float]]:
        """The times of plain and of a plan, and by how much longer the plan takes: see [Note: time]."""
        plain, lean = yield from self.run(None, kept)
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
