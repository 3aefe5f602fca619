"""Towards a budget of memory: the fastest plan that stays within it.

[Note: the course] The recorded step and the next few keep the least. Two of them are timed, rebuild by rebuild. Then
the plan is relaxed: more is kept, the dearest to rebuild first, up to the budget. What was foreseen is compared with
what was measured, and the plan is corrected, three times at most; the way to the budget is taken in parts, so that none
of these steps should be above it. Of this plan, the smallest one and one that keeps all of the last layers the fastest
is taken. Then the plan stays, until a step differs from the recorded one: then all begins anew. One step may be above
it knowingly: before `BudgetError` says that nothing fits, a plan is tried of which too much is foreseen, if the machine
has room for that. Steps in which fused kernels are compared take more than those after them: a few more are waited for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from leangrad.errors import BudgetError
from leangrad.ledger.learn.recorded_step import LAST_SHAPES
from leangrad.ledger.tune.course import WARM, Course
from leangrad.ledger.tune.goal import PRODUCTS, Way
from leangrad.ledger.tune.peaks import MARGIN
from leangrad.policy.choice import lowest_peak
from leangrad.policy.peak import Outcome
from leangrad.sizes import size_text

__all__ = ["Recordings", "TowardsBudget"]

RECORDINGS = 3  # with products, without, and with them again
TURNS = 3  # of plans for one budget that are timed
SOONER = 0.9  # of the calls that the override sees under the other plan: more, and its early end is worth no try
SURE = 0.97  # times as long as the other: such a plan is the faster one
SHARES = (0.4, 0.8, 1.0)  # of the room between the least and the budget, that is taken in one step after another
CORRECTIONS = 3
ROUNDING = 0.005  # of what a step takes on a GPU, where the allocator rounds blocks up: two of one plan differ by that
LISTENS = 3  # steps of a plan that are listened to, until one tells what it takes
PATIENCE = 8  # steps in which kernels are compared, which take more than those after them


@dataclass
class Recordings:
    """What is known of the steps that were recorded for one budget: with products, and without."""

    count: int = 0
    least: float = math.inf  # what the smaller of their plans was measured to take
    with_products: float = math.inf  # what is foreseen of the one with products


class TowardsBudget(Course):
    """The course from one recorded step on; another may be recorded, with or without products."""

    def __init__(self, recordings: Recordings, *args: Any) -> None:
        recordings.count += 1
        self._recordings = recordings
        self._may_take_recorded = True
        self._has_warned = False  # of a step that took a hair more than the budget
        self.ends_early = False  # plans keep all of the last layers, so that the override may end before these
        super().__init__(*args)

    def ways(self) -> Iterator[Way]:
        """How one step after another is to run."""
        peaks, limit = self.peaks, self._limit()
        recorded, extra = math.inf if peaks.peak is None else peaks.took, peaks.extra
        if self.others and self._recordings.count == 1 and self._floor_fits(limit):
            self._recordings.with_products = peaks.foreseen(self.play(self.smallest))
            yield Way(products=0)
        for n in range(WARM + PATIENCE):
            if n >= WARM and not peaks.has_compared:
                break
            yield from self._check(limit)
            yield from self.seen(self.smallest, is_early=True)
            if peaks.peak is not None and peaks.took > recorded and not peaks.has_compared:  # nobody foresaw that
                peaks.extra = extra
                self.take_for_smallest(self.step.kept_items())
        if peaks.highest() > limit and peaks.extra is None:  # what was measured of another recording has to do
            peaks.extra = peaks.extra_before
        yield from self.time_rebuilds()
        yield from self._check(limit)
        best = self.smallest
        for share in SHARES:
            kept = self._within(limit, share)
            if kept != best:
                yield from self.seen(kept)
                if peaks.peak is None or peaks.peak <= limit:
                    best = kept
        if best != self.smallest:
            best = yield from self._fastest(limit, best)
        peaks.is_settled = True
        yield from self._correct(limit, best)

    def _fastest(self, limit: int, best: frozenset[int]) -> Generator[Way, None, frozenset[int]]:
        """Of three plans that fit, the one whose steps are the shortest: what is foreseen of the time may be wrong.

        More memory is never to take longer than the smallest plan; and where the host is the limit, what the override
        costs may be more than what is rebuilt: [Note: the override ends early].
        """
        plans = [best, self.smallest]
        self.ends_early = True
        early = self._within(limit, SHARES[-2])  # what such a plan takes beyond what is foreseen nobody knows yet
        if self.step.ends is not None and self.step.calls_until(early) < SOONER * self.step.calls_until(best):
            yield from self.seen(early)
            if self.peaks.peak is None or self.peaks.peak <= limit:
                plans.append(early)
        times = yield from self.shortest(*plans, runs=TURNS)
        shortest = min(range(len(plans)), key=times.__getitem__)
        found = plans[shortest] if times[shortest] < SURE * times[0] else best
        self.ends_early = found == early != best
        return found

    def _correct(self, limit: int, best: frozenset[int]) -> Iterator[Way]:
        """Run a plan from now on; where what it takes is not what was foreseen, another."""
        peaks = self.peaks
        fitting, corrections, was_above = self.smallest, 0, False
        heard, listens, patience = best, LISTENS, PATIENCE
        while True:
            # Before an error is raised for what was measured of another plan, the smallest one runs, if that is seen.
            if best == self.smallest and (self._knows_smallest(limit) or peaks.extra is None or not peaks.sees(limit)):
                if not self._is_hair_above(limit):
                    yield from self._check(limit)
                best = self.smallest
            self._say(limit, best)
            if best != heard:
                heard, listens, patience = best, LISTENS, PATIENCE
            yield self.listened(self.way(best)) if listens > 0 else self.way(best)
            extra, in_forward, beside_kept = peaks.extra, peaks.in_forward, peaks.beside_kept
            self.note_peak(best)
            if peaks.has_compared and patience > 0:  # the next step tells more
                patience -= 1
                continue
            listens = 0 if peaks.peak is not None else listens - 1  # one step of each plan is enough
            if peaks.peak is None or peaks.extra is None:
                continue
            if was_above and extra is not None:  # what was once not foreseen is not forgotten
                peaks.extra = max(extra, peaks.extra)
                peaks.in_forward = _higher(in_forward, peaks.in_forward)
                peaks.beside_kept = _higher(beside_kept, peaks.beside_kept)
            if peaks.peak > limit:
                was_above, corrections = True, corrections + 1
                smaller = self._within(limit, 1.0) if corrections < CORRECTIONS else fitting
                best = smaller if smaller != best and corrections <= CORRECTIONS else self.smallest
            else:
                fitting = best
                if not was_above and corrections < CORRECTIONS:
                    best = self._within(limit, 1.0)
                    corrections += best != fitting

    # ----------------------------------------------------------------------------------------------------------- plans

    def _within(self, limit: int, share: float) -> frozenset[int]:
        """The least work within a share of the room between the least memory and the limit."""
        least = self._of_smallest(limit)
        target = least + share * max(0.0, limit - least)
        # Two plans differ a little in what they take beyond what is foreseen; below the allocator's peak none sees it.
        margin = 0.0 if self.peaks.sees(limit) or self.peaks.extra is None else MARGIN

        def fits(outcome: Outcome) -> bool:
            return self.peaks.foreseen(outcome) + margin * outcome.peak_bytes <= target

        relaxations = [self.relaxation, *self.beside]
        if self.ends_early:
            relaxations = [self.relaxed(self.replay, one.kept | {LAST_SHAPES}).with_last(fits) for one in relaxations]
        found = [one.within(fits) for one in relaxations]
        found = [kept for kept in found if fits(self.play(kept))] or found[:1]
        return min(found, key=lambda kept: self.play(kept).work)

    def _plan_anew(self) -> None:
        """Make the plan that takes the least memory anew, if a step was found to take more before backward begins."""
        if self.peaks.in_forward is None or not self.may_plan:
            return
        extra = self.peaks.extra or 0

        def play(kept: frozenset[int]) -> Outcome:
            outcome = self.play(kept)
            return replace(outcome, peak_bytes=max(outcome.peak_bytes, self.peaks.until_backward(outcome) - extra))

        least = play(self.smallest)
        if least.peak_bytes > self.play(self.smallest).peak_bytes:
            found = lowest_peak(self.replay.graph, play)
            if play(found).peak_bytes < least.peak_bytes:
                self.take_for_smallest(found)

    def _take_recorded(self, limit: int) -> None:
        """Keep what the recorded step kept, if that fits: it may be less than what is foreseen to be the least."""
        kept = self.step.kept_items()
        if not self._may_take_recorded or self.peaks.extra is None or kept == self.smallest:
            return
        if self.peaks.foreseen(self.play(kept)) <= limit:
            self._may_take_recorded = False
            self.take_for_smallest(kept)

    def _floor(self) -> Outcome:
        """The plan that runs no product twice, as a step whose recipes may do so foresees it."""
        (floor,) = self.others
        return self.play(floor)

    def _floor_fits(self, limit: int) -> bool:
        """Whether it fits with what a step may keep while it is recorded: it does not know yet who reads what."""
        more = max((item.nbytes for item in self.step.items if not item.is_fixed), default=0)
        return self.peaks.foreseen(self._floor(), more) <= limit

    # ----------------------------------------------------------------------------------------------------- what fits it

    def _limit(self) -> int:
        budget = self.goal.budget
        if isinstance(budget, float):
            if not self.peaks.on_gpu:
                raise BudgetError(
                    "a budget in percent is a share of a GPU's memory, and this model runs on a CPU; say it in bytes"
                )
            return int(budget * torch.cuda.mem_get_info()[1])
        assert budget is not None
        return budget

    def is_allowed(self, peak: float) -> bool:
        """Whether a step may take so much."""
        return peak <= self._limit()

    def _needs(self, limit: int) -> float:
        """What the smallest plan takes, where that was measured; else what it takes at least."""
        if self.peaks.extra is None and not self._knows_smallest(limit):
            return self.peaks.standing() + (1 - MARGIN) * self.play(self.smallest).peak_bytes
        return self._of_smallest(limit)

    def _of_smallest(self, limit: int) -> float:
        """What the smallest plan was measured to take, else what is foreseen: plans differ in what they take beside."""
        if self._knows_smallest(limit):
            assert self.smallest_took is not None
            return self.peaks.standing() + self.smallest_took
        return self.peaks.foreseen(self.play(self.smallest))

    def _knows_smallest(self, limit: int) -> bool:
        return self.smallest_took is not None and self.peaks.sees(limit)

    def _check(self, limit: int) -> Iterator[Way]:
        """If the smallest plan was measured and does not fit, take a smaller one, or raise an error.

        The plan without products is the smaller one in some models: a step of theirs has fewer sums that are kept. What
        is foreseen of it from a step with products is too much there, so it is tried before an error is raised, if the
        machine has the room.
        """
        if self._needs(limit) > limit:
            self._plan_anew()
        if self._needs(limit) > limit:
            self._take_recorded(limit)
        if self._needs(limit) <= limit:
            return
        peaks, recordings = self.peaks, self._recordings
        outcome = self.play(self.smallest)
        foreseen = self._of_smallest(limit)
        if peaks.extra is not None and self.smallest_took is None:  # it was measured of the recorded step
            recorded = self.play(self.step.kept_items())
            foreseen = min(foreseen + MARGIN * outcome.peak_bytes, peaks.foreseen(recorded))
        if peaks.extra is not None or math.isinf(recordings.least):
            recordings.least = min(foreseen, recordings.least)
        if recordings.count < RECORDINGS:
            if self.others and peaks.has_room(peaks.foreseen(self._floor())):
                yield Way(products=0)
            elif not self.others and recordings.with_products <= limit:
                yield Way(products=PRODUCTS)
        rounding = ROUNDING * max(0.0, recordings.least - peaks.standing()) if peaks.on_gpu else 0.0
        raise self._cannot_be_met(limit, recordings.least + rounding)

    def _is_hair_above(self, limit: int) -> bool:
        """Whether a plan that stands is above the budget by no more than blocks are rounded up: no reason to stop."""
        needs = self._needs(limit)
        above = needs - limit
        if not self.peaks.on_gpu or not 0 < above <= ROUNDING * (needs - self.peaks.standing()):
            return False
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a step took {size_text(above)} more than the budget of {size_text(limit)}, as torch's allocator "
                "rounds blocks up; training goes on with the smallest plan",
                stacklevel=2,
            )
        return True

    def _cannot_be_met(self, limit: int, needs: float) -> BudgetError:
        return BudgetError(
            f"the budget of {size_text(limit)} cannot be met: a step of this model and batch takes at least "
            f"{size_text(needs)}, of which {size_text(self.peaks.standing())} stand before it. Give it that much, make "
            "the batch smaller, or leave more of it to torch.utils.checkpoint.",
            smallest=int(needs),
        )

    def _say(self, limit: int, kept: frozenset[int]) -> None:
        outcome, least = self.play(kept), self.play(self.smallest)
        seconds = f"{1e3 * outcome.work:.1f} of {1e3 * least.work:.1f} ms of rebuilding"
        foreseen = size_text(self.peaks.foreseen(outcome))
        self.status = f"budget {size_text(limit)}: a peak of {foreseen} is foreseen, {seconds} are left"
        reserved = self.peaks.reserved()
        if reserved is not None:
            self.status += f"; torch's allocator has reserved {size_text(reserved)}"


def _higher(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)
