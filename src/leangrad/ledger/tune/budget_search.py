"""The search for the fastest plan that stays within a memory budget.

[Note: the course] The recorded step and the next few steps keep the least. In two of them every rebuild is timed. Then
the plan is relaxed: it keeps more, the tensors that are the most expensive to rebuild first, up to the budget. The
predicted peak is compared with the measured one, and the plan is corrected, three times at most. The search approaches
the budget in parts, so that none of these steps should exceed it. Then it takes the fastest of three plans: this one,
the smallest one, and one that keeps all tensors of the last layers. That plan stays until a step differs from the
recorded one; then the search starts over.

One step may exceed the budget knowingly: before `BudgetError` says that nothing fits, the search tries a plan that is
predicted to need too much, if the machine has room for it. Steps in which fused kernels are compared use more memory
than those after them, so the search waits for a few more steps.
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
from leangrad.ledger.tune.goal import PRODUCTS, StepMode
from leangrad.ledger.tune.peaks import MARGIN
from leangrad.ledger.tune.plan_search import WARM, PlanSearch
from leangrad.policy.choice import lowest_peak
from leangrad.policy.peak import Outcome
from leangrad.policy.replay import Replay
from leangrad.sizes import size_text

__all__ = ["BudgetSearch", "Recordings"]

RECORDINGS = 3  # most recordings for one budget: with products, without, and with them again
TIMED_RUNS = 3  # timed steps of each plan when the plans for one budget are compared
FEWER_CALLS = 0.9  # a plan that ends the function mode early is tried below this share of the other's observed calls
CLEARLY_FASTER = 0.97  # a plan counts as the faster one if its time is less than this share of the other's
SHARES = (0.4, 0.8, 1.0)  # of the room between the least memory and the budget, for one step after another
CORRECTIONS = 3  # of a plan whose measured peak differs from the predicted one
ROUNDING = 0.005  # share of a step's memory by which steps of one plan differ on a GPU: the allocator rounds blocks up
MEASURED_STEPS = 3  # most steps of a plan whose memory is measured, until one of them yields a peak
PATIENCE = 8  # most steps with kernel comparisons to wait for: they use more memory than those after them


@dataclass
class Recordings:
    """What is known from the steps that were recorded for one budget, with products and without."""

    count: int = 0  # recorded steps
    least: float = math.inf  # the lower of the peaks of their smallest plans, in bytes: measured, else predicted
    with_products: float = math.inf  # predicted peak of the smallest plan of the recording with products, in bytes


class BudgetSearch(PlanSearch):
    """The search for a budget from one recorded step; it may have another step recorded, with or without products."""

    def __init__(self, recordings: Recordings, *args: Any) -> None:
        recordings.count += 1
        self._recordings = recordings
        self._may_take_recorded = True
        self._has_measured_again = False  # whether the smallest plan was measured again before an error is raised
        self._has_warned = False  # whether the user was warned that a step slightly exceeds the budget
        self.ends_early = False  # whether plans keep all of the last layers: the function mode may end before these
        super().__init__(*args)

    def step_modes(self) -> Iterator[StepMode]:
        """Yield for one step after another how it is to run; see [Note: the course]."""
        peaks, limit = self.peaks, self._limit()
        recorded, extra, replay = math.inf if peaks.peak is None else peaks.took, peaks.excess, self.replay
        if self.others and self._recordings.count == 1 and self._floor_fits(limit):
            self._recordings.with_products = peaks.foreseen(self.play(self.smallest))
            yield StepMode(products=0)
        for n in range(WARM + PATIENCE):
            if n >= WARM and not peaks.has_compared:
                break
            yield from self._check(limit)
            yield from self.measure(self.smallest, is_early=True)
            # The smallest plan has used more than the recorded step: take what that step kept instead.
            if peaks.peak is not None and peaks.took > recorded and not peaks.has_compared:
                peaks.excess = extra
                self.replay = replay  # drops the scratch that was learned from the smallest plan
                self.take_for_smallest(self.step.kept_items())
        if peaks.highest() > limit and peaks.excess is None:  # use what was measured with the recording before
            peaks.excess = peaks.excess_before
        yield from self.time_rebuilds()
        yield from self._check(limit)
        best = self.smallest
        for share in SHARES:
            kept = self._within(limit, share)
            if kept != best:
                yield from self.measure(kept)
                if peaks.peak is None or peaks.peak <= limit:
                    best = kept
        found = best
        if best != self.smallest:
            found = yield from self._fastest(limit, best)
        peaks.is_settled = True
        yield from self._correct(limit, found, may_keep_more=found == best or found != self.smallest)

    def _fastest(self, limit: int, best: frozenset[int]) -> Generator[StepMode, None, frozenset[int]]:
        """Time up to three plans that fit and return the fastest, because predicted times may be wrong.

        The three are ``best``, the smallest plan and one that ends the function mode early. A plan with more memory
        must not be slower than the smallest one; and where the host is the limit, the function mode may cost more than
        the rebuilding: see [Note: the function mode ends early].
        """
        plans = [best, self.smallest]
        self.ends_early = True
        early = self._within(limit, SHARES[-2])  # leaves a reserve: such a plan was not measured yet
        if self.step.ends is not None and self.step.calls_until(early) < FEWER_CALLS * self.step.calls_until(best):
            yield from self.measure(early)
            if self.peaks.peak is None or self.peaks.peak <= limit:
                plans.append(early)
        times = yield from self.shortest(*plans, runs=TIMED_RUNS)
        shortest = min(range(len(plans)), key=times.__getitem__)
        found = plans[shortest] if times[shortest] < CLEARLY_FASTER * times[0] else best
        self.ends_early = found == early != best
        return found

    def _correct(self, limit: int, best: frozenset[int], *, may_keep_more: bool) -> Iterator[StepMode]:
        """Run the plan ``best`` from now on, and correct it where its measured peak differs from the predicted one.

        may_keep_more: False if ``best`` is the smallest plan because one that keeps more was slower.
        """
        peaks = self.peaks
        fitting, corrections, was_above = self.smallest, 0, False
        measured_plan, tries_left, patience = best, MEASURED_STEPS, PATIENCE
        while True:
            # Figures of another plan are no reason for an error: run the smallest plan first, if its peak can be seen.
            if best == self.smallest and (
                self._knows_smallest(limit) or peaks.excess is None or not peaks.can_see(limit)
            ):
                if not self._is_within_rounding(limit):
                    yield from self._check(limit)
                best = self.smallest
            self._say(limit, best)
            if best != measured_plan:
                measured_plan, tries_left, patience = best, MEASURED_STEPS, PATIENCE
            self.is_final = tries_left <= 0
            yield self.with_measurement(self.mode_keeping(best)) if tries_left > 0 else self.mode_keeping(best)
            extra, in_forward, beside_kept = peaks.excess, peaks.forward_excess, peaks.start_excess
            self.note_peak(best)
            if peaks.has_compared and patience > 0:  # wait for the next step: it will use less
                patience -= 1
                continue
            tries_left = 0 if peaks.peak is not None else tries_left - 1  # one measured step of each plan is enough
            if peaks.peak is None or peaks.excess is None:
                continue
            if was_above and extra is not None:  # once a plan was above the limit, predictions are never lowered
                peaks.excess = max(extra, peaks.excess)
                peaks.forward_excess = _higher(in_forward, peaks.forward_excess)
                peaks.start_excess = _higher(beside_kept, peaks.start_excess)
            if peaks.peak > limit:
                was_above, corrections = True, corrections + 1
                smaller = self._within(limit, 1.0) if corrections < CORRECTIONS else fitting
                best = smaller if smaller != best and corrections <= CORRECTIONS else self.smallest
            else:
                fitting = best
                if may_keep_more and not was_above and corrections < CORRECTIONS:
                    best = self._within(limit, 1.0)
                    corrections += best != fitting

    # ----------------------------------------------------------------------------------------------------------- plans

    def _within(self, limit: int, share: float) -> frozenset[int]:
        """The plan with the least work that uses at most ``share`` of the room between the least memory and ``limit``.

        If no plan fits, the result may exceed it.
        """
        least = self._of_smallest(limit)
        target = least + share * max(0.0, limit - least)
        # Plans differ a little in how far they exceed predictions, which is not seen below the allocator's peak.
        margin = 0.0 if self.peaks.can_see(limit) or self.peaks.excess is None else MARGIN

        def fits(outcome: Outcome) -> bool:
            return self.peaks.foreseen(outcome) + margin * outcome.peak_bytes <= target

        relaxations = [self.relaxation, *self.beside]
        if self.ends_early:
            relaxations = [self.relaxed(self.replay, one.kept | {LAST_SHAPES}).with_last(fits) for one in relaxations]
        found = [one.within(fits) for one in relaxations]
        found = [kept for kept in found if fits(self.play(kept))] or found[:1]
        return min(found, key=lambda kept: self.play(kept).work)

    def _plan_anew(self) -> None:
        """Search for the plan with the lowest peak anew, if steps were found to use more before backward begins."""
        if self.peaks.forward_excess is None or not self.may_plan:
            return
        extra = self.peaks.excess or 0

        def play(kept: frozenset[int]) -> Outcome:
            outcome = self.play(kept)
            return replace(outcome, peak_bytes=max(outcome.peak_bytes, self.peaks.until_backward(outcome) - extra))

        least = play(self.smallest)
        if least.peak_bytes > self.play(self.smallest).peak_bytes:
            found = lowest_peak(self.replay.graph, play)
            if play(found).peak_bytes < least.peak_bytes:
                self.take_for_smallest(found)

    def _take_recorded(self, limit: int) -> None:
        """Make the recorded step's plan the smallest one, if it fits: it may need less than the predicted minimum."""
        kept = self.step.kept_items()
        if not self._may_take_recorded or self.peaks.excess is None or kept == self.smallest:
            return
        if self.peaks.foreseen(self.play(kept)) <= limit:
            self._may_take_recorded = False
            self.take_for_smallest(kept)

    def _floor(self) -> Outcome:
        """Predict the plan that runs no product twice, from a recorded step whose recipes run products."""
        (floor,) = self.others
        return self.play(floor)

    def _floor_fits(self, limit: int) -> bool:
        """Whether the plan of `_floor` fits even while its step is recorded.

        A step that is recorded may keep more, here the largest item, because the readers are not known yet.
        """
        more = max((item.nbytes for item in self.step.items if not item.is_fixed), default=0)
        return self.peaks.foreseen(self._floor(), more) <= limit

    # --------------------------------------------------------------------------------------------- what fits the budget

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
        """Whether a peak of ``peak`` bytes is within the budget."""
        return peak <= self._limit()

    def _needs(self, limit: int) -> float:
        """The peak of the smallest plan in bytes as `_of_smallest` says; before any measurement a lower bound of it."""
        if self.peaks.excess is None and not self._knows_smallest(limit):
            return self.peaks.standing() + (1 - MARGIN) * self.play(self.smallest).peak_bytes
        return self._of_smallest(limit)

    def _of_smallest(self, limit: int) -> float:
        """The peak of the smallest plan in bytes: measured if possible, else predicted.

        Measured is better, because plans differ in how far they exceed their predictions.
        """
        if self._knows_smallest(limit):
            assert self.smallest_took is not None
            return self.peaks.standing() + self.smallest_took
        return self.peaks.foreseen(self.play(self.smallest))

    def _knows_smallest(self, limit: int) -> bool:
        return self.smallest_took is not None and self.peaks.can_see(limit)

    def _check(self, limit: int) -> Iterator[StepMode]:
        """If the smallest plan does not fit, try to find or record a smaller one; raise `BudgetError` if none is left.

        In some models the plan that runs no product twice is the smaller one, because a step recorded without products
        keeps fewer sums. A step recorded with products predicts too high a peak for it there, so that plan is tried
        before an error is raised, if the machine has room for it.
        """
        if self._needs(limit) > limit:
            self._plan_anew()
        if self._needs(limit) > limit:
            self._take_recorded(limit)
        is_measured = self.peaks.excess is not None or self.smallest_took is not None
        may_fit = self.peaks.standing() + self._recorded.play(self.smallest).peak_bytes <= limit
        if self._needs(limit) > limit and is_measured and not self._has_measured_again:
            if may_fit:
                yield from self._measure_again()
            elif self.smallest_took is None:  # measure the plan, so that the error names a measured peak
                self._has_measured_again = True
                yield from self.measure(self.smallest, is_early=True)
        if self._needs(limit) <= limit:
            return
        peaks, recordings = self.peaks, self._recordings
        outcome = self.play(self.smallest)
        foreseen = self._of_smallest(limit)
        if peaks.excess is not None and self.smallest_took is None:  # ``excess`` comes from the recorded step
            recorded = self.play(self.step.kept_items())
            foreseen = min(foreseen + MARGIN * outcome.peak_bytes, peaks.foreseen(recorded))
        if peaks.excess is not None or math.isinf(recordings.least):
            recordings.least = min(foreseen, recordings.least)
        if recordings.count < RECORDINGS:
            if self.others and peaks.has_room(peaks.foreseen(self._floor())):
                yield StepMode(products=0)
            elif not self.others and recordings.with_products <= limit:
                yield StepMode(products=PRODUCTS)
        rounding = ROUNDING * max(0.0, recordings.least - peaks.standing()) if peaks.on_gpu else 0.0
        raise self._cannot_be_met(limit, recordings.least + rounding)

    def _measure_again(self) -> Iterator[StepMode]:
        """Drop all measurements and measure the smallest plan once more: the last step may have been unusual.

        Two backward passes over one forward pass with an evaluation in between, for example, use more than later steps.
        """
        self._has_measured_again = True
        self.smallest_took = None
        self.peaks.forget_readings()
        self.use(Replay(self._recorded.graph, self.replay.costs))
        yield from self.measure(self.smallest, is_early=True)

    def _is_within_rounding(self, limit: int) -> bool:
        """Whether the smallest plan exceeds the budget by no more than the allocator's rounding of blocks; warns once.

        That is no reason to stop a training that runs.
        """
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
