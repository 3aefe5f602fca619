"""From step to step towards what the user asked for: a budget of memory, or a bound on the time.

[Note: the course] The recorded step and the next few keep the least. One of them is timed, rebuild by rebuild. Then the
plan is relaxed: more is kept, the dearest to rebuild first, up to the budget, or until the bound on the time is met.
What was foreseen is compared with what was measured, and the plan is corrected, three times at most; the way to a
budget is taken in parts, so that none of these steps should be above it. Then the plan stays, until a step differs from
the recorded one: then all begins anew. One step may be above it knowingly: before `BudgetError` says that nothing fits,
a plan is tried of which too much is foreseen, if the machine has room for that.

[Note: peaks] On a GPU the allocator's counters are read when a step begins. They are never reset, so the peak of a step
is known if it is the highest so far; what it took beyond what was foreseen is added to all that is foreseen later. They
are read too when forward ends and when backward comes to the model. What a step takes until then, the casts that
autocast keeps, the last layers of forward, and after it a loss outside of the model, stands beside what is kept and not
beside what backward makes again. (A value that is being made in forward stands there whether it is kept or not.) What
it takes after backward, in the optimizer, is the same for all plans; the first step makes the optimizer's state
besides. A user who resets them before each step would wipe out what we came to read: so they are read when backward
ends as well, once the plan is settled only for such a user. On a CPU nobody counts but `leangrad.measure`: where that
runs a step, its figure is taken, at any time; before that the plan is what is foreseen, with a margin.

[Note: time] A step lasts from its beginning to that of the next one, on the clock of the device: forward, backward and
all else that the user does in it. Of a few steps the shortest counts; where a bound on the time has to hold, so must
the median of how much longer each was than the plain one before it: the shortest of few steps is a matter of luck.
"""

from __future__ import annotations

import math
import os
import statistics
import warnings
from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.errors import BudgetError
from leangrad.ledger.learn.meter import Meter
from leangrad.ledger.learn.recorded_step import RecordedStep
from leangrad.ledger.learn.timing import Stopwatch, Timing
from leangrad.ledger.tune.pace import Pace
from leangrad.policy.choice import lowest_peak
from leangrad.policy.graph import Graph
from leangrad.policy.peak import Outcome
from leangrad.policy.relax import Relaxation
from leangrad.policy.replay import Replay
from leangrad.sizes import size_text
from leangrad.trees import tensors_in

__all__ = ["PRODUCTS", "Goal", "Tuner", "Way", "first_graded"]

PRODUCTS = 8  # that one recipe may run through in a row, where there is a budget
RECORDINGS = 3  # with products, without, and with them again
WARM = 3  # steps before one is timed: kernels are proven and caches filled in the first ones
RUNS = 4  # of each way, in turns
TURNS = 3  # the same, where the ways are plans for one budget
SURE = 0.97  # times as long as the other: such a plan is the faster one
SHARES = (0.6, 0.9, 1.0)  # of the room between the least and the budget, that is taken in one step after another
CORRECTIONS = 3
MARGIN = 0.05  # of what is foreseen, where nothing was measured
QUIET = 1 << 20  # bytes that may be allocated between forward and backward where nothing else runs
ROOM = 0.95  # of a device's memory that plain may take while it is timed


class Goal(NamedTuple):
    """What the user asked for, one of the two."""

    budget: int | float | None = None  # bytes; a float is a share of the device's memory
    slowdown: float | None = None  # of plain's time


class Way(NamedTuple):
    """How one step runs."""

    kept: frozenset[int] | None = None  # the items that are kept; None: all that plain keeps, with no region at all
    timing: Timing | None = None  # times every rebuild
    products: int | None = None  # the step is recorded anew, with recipes that run through so many products in a row


class _Moment(NamedTuple):
    """The beginning of a step, which is the end of the one before it."""

    time: Any
    counters: _torch.Counters | None  # of a GPU
    meter: Meter | None  # of a CPU
    highest: int | None = None  # the allocator's peak when the backward pass before it ended, where that was read
    end: _torch.Counters | None = None  # when the forward pass before it ended
    turn: _torch.Counters | None = None  # when that backward pass came to the model
    is_end: bool = False  # and no beginning: the next step is of another course


class Tuner:
    """The course of one ledger towards its goal."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.status = ""
        self._error: BudgetError | None = None
        self._moments: list[_Moment] = []  # of the steps of this course
        self._is_settled = False  # no step is timed any more
        self._recordings = 0  # of this course: with products, and without
        self._least = math.inf  # what the smaller of their plans was measured to take
        self._with_products = math.inf  # what is foreseen of the one with products
        self._course: Iterator[Way] | None = None
        self._peak: int | None = None  # of the last step, where that was measured
        self._took = 0  # the same, without what stood before the step
        self._extra: int | None = None  # what a step took beyond what was foreseen, where that was measured
        self._extra_before: int | None = None  # the same, where the step was recorded anew
        self._in_forward: int | None = None  # the same, until forward ended
        self._beside_kept: int | None = None  # what it took beside what it kept, from then on until backward began
        self._after = 0  # the peak of what comes after backward, with all that stands; 0: not known
        self._on_gpu = False
        self._has_warned = False  # of what is reserved
        self._is_reset = False  # the user resets the allocator's peak between steps
        self._after_backward: int | None = None  # the allocator's peak, of this step
        self._at_end: _torch.Counters | None = None  # when forward ended
        self._at_turn: _torch.Counters | None = None  # when backward came to the model

    def begin(self, *, on_gpu: bool) -> None:
        """A step begins."""
        if self._error is not None:
            raise self._error
        self._on_gpu = on_gpu
        now = self._now()
        if now.counters is not None and (now.highest or 0) > now.counters.highest:
            self._is_reset = True
        self._moments.append(now)
        if self._is_settled or self._course is None:
            del self._moments[:-3]

    def _now(self, *, is_end: bool = False) -> _Moment:
        on_gpu = self._on_gpu
        counters = _counters() if on_gpu else None
        meter = None if on_gpu or is_end else Meter()
        time = None if self._is_settled else Stopwatch(on_gpu=on_gpu).now()
        highest, self._after_backward = self._after_backward, None
        end, self._at_end = self._at_end, None
        turn, self._at_turn = self._at_turn, None
        return _Moment(time, counters, meter, highest, end, turn, is_end)

    def sees_output(self, output: object) -> None:
        """Forward handed this out: note the peak when backward has come to it, and when it has ended.

        Several outputs may have a backward pass each: the first to come begins it, and the last ends it.
        """
        meter = self._moments[-1].meter if self._moments else None
        if (meter is not None and meter.listens) or (self._on_gpu and (self._is_reset or not self._is_settled)):
            made = list(_graded(output))
            if made and meter is not None:
                meter.hands_out()
            elif made:
                self._at_end = _counters()
            for one in made:
                one.register_hook(self._at_backward if meter is None else lambda _: meter.turns_back())

    def _at_backward(self, _: Tensor) -> None:
        if self._at_turn is None:
            self._at_turn = _counters()
        _torch.after_backward(self._read_after_backward)

    def _read_after_backward(self) -> None:
        counters = _counters()
        self._after_backward = None if counters is None else counters.highest

    @property
    def has_failed(self) -> bool:
        """Whether the budget could not be met."""
        return self._error is not None

    def end_step(self) -> None:
        """Another step begins, which is not of this course."""
        if self._moments and not self._moments[-1].is_end:
            self._moments.append(self._now(is_end=True))

    def start(self, step: RecordedStep, replay: Replay, kept: frozenset[int] | None, outputs_nbytes: int) -> None:
        """A step was recorded; ``kept``: the plan that takes the least memory; without one, what the step kept.

        outputs_nbytes: of what its region handed out. A loss that is computed outside keeps about as many.
        """
        self._outside = outputs_nbytes
        self._step, self._replay = step, replay
        self._recordings += 1
        self._smallest_took: int | None = None  # what was measured of the smallest plan, above what stood before it
        self._may_plan = kept is not None
        self._may_take_recorded = True
        plans = [step.kept_items() if kept is None else kept]
        if any(value.products for value in replay.graph.values):
            plans.append(self._without_products())
        self._smallest, *self._others = plans
        self._use(replay)
        self._note_peak(step.kept_items(), is_recorded=True)
        self._course = self._towards_budget() if self.goal.budget is not None else self._towards_slowdown()

    def _use(self, replay: Replay) -> None:
        self._replay = replay
        self._relaxation = Relaxation(replay, self._smallest)
        self._beside = [Relaxation(replay, kept) for kept in self._others]

    def _without_products(self) -> frozenset[int]:
        """The plan that takes the least memory and runs no product twice."""
        values = self._replay.graph.values
        graph = Graph(tuple(replace(value, is_fixed=True) if value.products else value for value in values))
        return lowest_peak(graph, Replay(graph).play)

    def restart(self) -> None:
        """A step differs from the recorded one."""
        self._course, self._moments, self._is_settled = None, [], False
        self._recordings, self._after = 0, 0
        self._extra = self._extra_before = self._in_forward = self._beside_kept = None
        self._least = self._with_products = math.inf

    def next_way(self) -> Way:
        """How the step that has just begun is to run."""
        assert self._course is not None
        try:
            way = next(self._course)
        except BudgetError as error:
            self._error = error
            raise
        if way.products is not None:  # another step, of which nothing is known yet
            self._extra_before, self._extra = self._extra, None
        return way

    # ------------------------------------------------------------------------------------------------------- a budget

    def _towards_budget(self) -> Iterator[Way]:
        limit = self._limit()
        recorded, extra = math.inf if self._peak is None else self._took, self._extra
        if self._others and self._recordings == 1 and self._foreseen(self._floor(), self._recording_keeps()) <= limit:
            self._with_products = self._foreseen(self._relaxation.play(self._smallest))
            yield Way(products=0)
        for _ in range(WARM):
            yield from self._check(limit)
            yield Way(self._smallest)
            self._note_peak(self._smallest)
            if self._peak is not None and self._took > recorded:  # nobody foresaw that
                self._smallest, self._extra, self._smallest_took = self._step.kept_items(), extra, None
                self._use(self._replay)
        if self._highest() > limit and self._extra is None:  # what was measured of another recording has to do
            self._extra = self._extra_before
        yield from self._time_rebuilds()
        yield from self._check(limit)
        best = self._smallest
        for share in SHARES:
            kept = self._within(limit, share)
            if kept != best:
                yield Way(kept)
                self._note_peak(kept)
                if self._peak is None or self._peak <= limit:
                    best = kept
        if best != self._smallest:  # what is foreseen of the time may be wrong: more memory is never to take longer
            more, least = yield from self._shortest(best, self._smallest, runs=TURNS)
            best = self._smallest if least < SURE * more else best
        self._is_settled = True
        fitting, corrections, was_above = self._smallest, 0, False
        while True:
            # Before an error is raised for what was measured of another plan, the smallest one runs, if that is seen.
            if best == self._smallest and (self._knows_smallest(limit) or self._extra is None or not self._sees(limit)):
                yield from self._check(limit)
                best = self._smallest
            self._say_budget(limit, best)
            yield self._way(best)
            extra, in_forward, beside_kept = self._extra, self._in_forward, self._beside_kept
            self._note_peak(best)
            if self._peak is None or self._extra is None:
                continue
            if was_above and extra is not None:  # what was once not foreseen is not forgotten
                self._extra = max(extra, self._extra)
                self._in_forward = _higher(in_forward, self._in_forward)
                self._beside_kept = _higher(beside_kept, self._beside_kept)
            if self._peak > limit:
                was_above, corrections = True, corrections + 1
                smaller = self._within(limit, 1.0) if corrections < CORRECTIONS else fitting
                best = smaller if smaller != best and corrections <= CORRECTIONS else self._smallest
            else:
                fitting = best
                if not was_above and corrections < CORRECTIONS:
                    best = self._within(limit, 1.0)
                    corrections += best != fitting

    def _within(self, limit: int, share: float) -> frozenset[int]:
        """The least work within a share of the room between the least memory and the limit."""
        least = self._of_smallest(limit)
        target = least + share * max(0.0, limit - least)
        # Two plans differ a little in what they take beyond what is foreseen; below the allocator's peak none sees it.
        margin = 0.0 if self._sees(limit) or self._extra is None else MARGIN

        def fits(outcome: Outcome) -> bool:
            return self._foreseen(outcome) + margin * outcome.peak_bytes <= target

        play = self._relaxation.play
        found = [one.within(fits) for one in (self._relaxation, *self._beside)]
        found = [kept for kept in found if fits(play(kept))] or found[:1]
        return min(found, key=lambda kept: play(kept).work)

    def _limit(self) -> int:
        budget = self.goal.budget
        if isinstance(budget, float):
            if not self._on_gpu:
                raise BudgetError(
                    "a budget in percent is a share of a GPU's memory, and this model runs on a CPU; say it in bytes"
                )
            return int(budget * torch.cuda.mem_get_info()[1])
        assert budget is not None
        return budget

    def _needs(self, limit: int) -> float:
        """What the smallest plan takes, where that was measured; else what it takes at least."""
        if self._extra is None and not self._knows_smallest(limit):
            return self._standing() + (1 - MARGIN) * self._relaxation.play(self._smallest).peak_bytes
        return self._of_smallest(limit)

    def _of_smallest(self, limit: int) -> float:
        """What the smallest plan was measured to take, else what is foreseen: plans differ in what they take beside."""
        if self._knows_smallest(limit):
            assert self._smallest_took is not None
            return self._standing() + self._smallest_took
        return self._foreseen(self._relaxation.play(self._smallest))

    def _knows_smallest(self, limit: int) -> bool:
        return self._smallest_took is not None and self._sees(limit)

    def _sees(self, limit: int) -> bool:
        """Whether a step that takes more than the limit is seen to."""
        return self._is_reset or self._highest() <= limit

    def _floor(self) -> Outcome:
        """The plan that runs no product twice, as a step whose recipes may do so foresees it."""
        (floor,) = self._others
        return self._relaxation.play(floor)

    def _recording_keeps(self) -> int:
        """What a step may keep while it is recorded, beyond what its plan does: it does not know yet who reads what."""
        return max((item.nbytes for item in self._step.items if not item.is_fixed), default=0)

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
        outcome = self._relaxation.play(self._smallest)
        foreseen = self._of_smallest(limit)
        if self._extra is not None and self._smallest_took is None:  # it was measured of the recorded step
            recorded = self._relaxation.play(self._step.kept_items())
            foreseen = min(foreseen + MARGIN * outcome.peak_bytes, self._foreseen(recorded))
        if self._extra is not None or math.isinf(self._least):
            self._least = min(foreseen, self._least)
        if self._recordings < RECORDINGS:
            if self._others and self._has_room(self._foreseen(self._floor())):
                yield Way(products=0)
            elif not self._others and self._with_products <= limit:
                yield Way(products=PRODUCTS)
        raise self._cannot_be_met(limit, self._least)

    def _cannot_be_met(self, limit: int, needs: float) -> BudgetError:
        return BudgetError(
            f"the budget of {size_text(limit)} cannot be met: a step of this model and batch takes at least "
            f"{size_text(needs)}, of which {size_text(self._standing())} stand before it. Give it that much, make the "
            "batch smaller, or leave more of it to torch.utils.checkpoint.",
            smallest=int(needs),
        )

    def _standing(self) -> int:
        """What stands before a step: parameters, optimizer state, a batch."""
        counters = self._moments[-1].counters
        return 0 if counters is None else counters.allocated

    def _highest(self) -> int:
        """The allocator's peak so far."""
        counters = self._moments[-1].counters
        return 0 if counters is None else counters.highest

    def _foreseen(self, outcome: Outcome, more: int = 0) -> float:
        """The peak of the next step, if its saved tensors and gradients take what ``outcome`` says, and ``more``."""
        guess = int(self._outside + MARGIN * (outcome.peak_bytes + more))
        later = self._extra if self._extra is not None else guess
        return max(
            self._standing() + more + max(outcome.peak_bytes + later, self._until_backward(outcome)), self._after
        )

    def _until_backward(self, outcome: Outcome) -> int:
        """The same, before backward comes to the model; 0: nothing was measured."""
        forward = 0 if self._in_forward is None else outcome.forward_bytes + self._in_forward
        return max(forward, 0 if self._beside_kept is None else outcome.kept_bytes + self._beside_kept)

    def _plan_anew(self) -> None:
        """Make the plan that takes the least memory anew, if a step was found to take more before backward begins."""
        if self._in_forward is None or not self._may_plan:
            return
        extra = self._extra or 0

        def play(kept: frozenset[int]) -> Outcome:
            outcome = self._relaxation.play(kept)
            return replace(outcome, peak_bytes=max(outcome.peak_bytes, self._until_backward(outcome) - extra))

        least = play(self._smallest)
        if least.peak_bytes > self._relaxation.play(self._smallest).peak_bytes:
            found = lowest_peak(self._replay.graph, play)
            if play(found).peak_bytes < least.peak_bytes:
                self._smallest, self._smallest_took = found, None
                self._use(self._replay)

    def _take_recorded(self, limit: int) -> None:
        """Keep what the recorded step kept, if that fits: it may be less than what is foreseen to be the least."""
        kept = self._step.kept_items()
        if not self._may_take_recorded or self._extra is None or kept == self._smallest:
            return
        if self._foreseen(self._relaxation.play(kept)) <= limit:
            self._may_take_recorded, self._smallest, self._smallest_took = False, kept, None
            self._use(self._replay)

    def _note_peak(self, kept: frozenset[int], *, is_recorded: bool = False) -> None:
        """Compare what the last step took, in which ``kept`` was kept, with what was foreseen."""
        stood = self._compare(kept)
        if self._peak is not None and kept == self._smallest and not is_recorded:
            self._smallest_took = self._peak - stood

    def _compare(self, kept: frozenset[int]) -> int:
        """The same; returns what stood before that step."""
        self._peak = None
        last = [(a, b) for a, b in pairwise(self._moments[-3:]) if not a.is_end][-1:]
        if not last:
            return 0
        before, now = last[0]
        outcome = self._relaxation.play(kept)
        if before.counters is not None and now.counters is not None:
            self._warn_of_retries(before.counters, now.counters)
            self._read_counters(before.counters, now, now.counters.highest, outcome)
        elif before.meter is not None and before.meter.peak_bytes is not None:
            self._read_meter(before.meter, before.meter.peak_bytes, outcome)
        return 0 if before.counters is None else before.counters.allocated

    def _read_counters(self, before: _torch.Counters, now: _Moment, highest: int, outcome: Outcome) -> None:
        highest = max(highest, now.highest or 0)
        if highest <= before.highest:
            return
        in_backward = highest if now.highest is None else now.highest
        self._peak, self._took = highest, in_backward - before.allocated
        if in_backward < highest:
            self._after = highest
        if in_backward > before.highest:
            self._extra = self._took - outcome.peak_bytes
            if now.end is None or now.turn is None:
                return
            if now.end.highest > before.highest:
                self._in_forward = now.end.highest - before.allocated - outcome.forward_bytes
            if now.turn.highest > before.highest:
                # Where nothing seems to have run between forward and backward, nothing stood there but what stands now.
                is_quiet = now.turn.highest == now.end.highest and now.turn.allocated - now.end.allocated < QUIET
                highest = now.turn.allocated if is_quiet else now.turn.highest
                self._beside_kept = highest - before.allocated - outcome.kept_bytes
                if now.turn.highest >= in_backward:  # how high it stood later nobody knows, but what it began with
                    hidden = now.turn.allocated - before.allocated - outcome.kept_bytes - self._outside
                    self._extra = min(self._extra, int(max(0, hidden) + MARGIN * outcome.peak_bytes))

    def _read_meter(self, meter: Meter, peak_bytes: int, outcome: Outcome) -> None:
        self._peak = self._took = peak_bytes
        self._extra = peak_bytes - outcome.peak_bytes
        if (
            meter.forward_bytes is None
            or meter.start_bytes is None
            or meter.later_bytes is None
            or meter.after_bytes is None
        ):
            return
        self._took = max(meter.forward_bytes, meter.start_bytes, meter.later_bytes)
        self._in_forward = meter.forward_bytes - outcome.forward_bytes
        self._beside_kept = meter.start_bytes - outcome.kept_bytes
        self._extra = max(meter.later_bytes - outcome.peak_bytes, min(0, self._took - outcome.peak_bytes))
        if self._course is not None:  # else it is the recorded step, in which the optimizer may make its state
            self._after = meter.after_bytes

    def _warn_of_retries(self, before: _torch.Counters, now: _torch.Counters) -> None:
        """What is reserved may not fit the device where what is allocated does: the allocator's blocks have gaps."""
        if now.retries > before.retries and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a step of at most {size_text(now.highest)} was too much for the GPU as torch's allocator divides it "
                f"({size_text(now.reserved)} are reserved): it gave back what it had cached and tried again, which "
                "takes time. Set PYTORCH_ALLOC_CONF=expandable_segments:True, or give a smaller budget.",
                stacklevel=2,
            )

    def _say_budget(self, limit: int, kept: frozenset[int]) -> None:
        outcome, least = self._relaxation.play(kept), self._relaxation.play(self._smallest)
        seconds = f"{1e3 * outcome.work:.1f} of {1e3 * least.work:.1f} ms of rebuilding"
        self.status = (
            f"budget {size_text(limit)}: a peak of {size_text(self._foreseen(outcome))} is foreseen, {seconds} are left"
        )
        counters = self._moments[-1].counters
        if counters is not None:
            self.status += f"; torch's allocator has reserved {size_text(counters.reserved)}"

    # -------------------------------------------------------------------------------------------------- a bound on time

    def _towards_slowdown(self) -> Iterator[Way]:
        assert self.goal.slowdown is not None
        for _ in range(WARM):
            yield Way(self._smallest)
            self._note_peak(self._smallest)
        yield from self._time_rebuilds()
        is_measured = self._plain_fits()
        if is_measured:
            plain, lean, ratio = yield from self._beside_plain(self._smallest)
        else:
            (lean,) = yield from self._shortest(self._smallest)
            plain = lean - self._relaxation.play(self._smallest).work
            ratio = lean / plain
        pace = Pace(self._replay, self._smallest, self.goal.slowdown - 1)
        pace.note(self._smallest, ratio - 1)
        while (kept := pace.next()) is not None:
            if is_measured:
                plain, _, ratio = yield from self._beside_plain(kept)
            else:
                (seconds,) = yield from self._shortest(kept)
                ratio = seconds / plain
            pace.note(kept, ratio - 1)
        kept = pace.best or self._all_kept
        self._say_slowdown(plain, lean, kept, is_measured=is_measured)
        self._is_settled = True
        while True:
            yield self._way(kept)

    def _way(self, kept: frozenset[int]) -> Way:
        """Keep ``kept``; where that is all that there is, run plain, if plain is allowed what it keeps beside it."""
        if not self._all_kept <= kept:
            return Way(kept)
        foreseen = self._foreseen(self._relaxation.play(kept), self._step.unkept_bytes)
        fits = self.goal.budget is None or foreseen <= self._limit()
        return Way(None if fits else kept)

    def _beside_plain(self, kept: frozenset[int]) -> Generator[Way, None, tuple[float, float, float]]:
        """The times of plain and of a plan, and by how much longer the plan takes: see [Note: time]."""
        plain, lean = yield from self._run(None, kept)
        by_turn = statistics.median(mine / other for mine, other in zip(lean, plain, strict=True))
        return min(plain), min(lean), max(min(lean) / min(plain), by_turn)

    def _shortest(self, *ways: frozenset[int] | None, runs: int = RUNS) -> Generator[Way, None, list[float]]:
        """The times of the shortest step of each way."""
        times = yield from self._run(*ways, runs=runs)
        return [min(some) for some in times]

    def _run(self, *ways: frozenset[int] | None, runs: int = RUNS) -> Generator[Way, None, list[list[float]]]:
        """Some steps of each way in turns: what is kept, None for plain. Their times.

        The first step of a turn does not count: what the one before it left in caches and allocators is of another
        kind.
        """
        stopwatch = Stopwatch(on_gpu=self._on_gpu)
        times: list[list[float]] = [[] for _ in ways]
        for _ in range(runs):
            for n, kept in enumerate(ways):
                yield Way(kept)
                first = len(self._moments) - 1
                yield Way(kept)
                begin, end = self._moments[first : first + 2]
                times[n].append(stopwatch.seconds(begin.time, end.time))
        return times

    @property
    def _all_kept(self) -> frozenset[int]:
        return self._smallest.union(self._relaxation.order)

    def _plain_fits(self) -> bool:
        return self._has_room(self._foreseen(self._relaxation.play(self._all_kept), self._step.unkept_bytes))

    def _has_room(self, peak: float) -> bool:
        """Whether the machine has so much memory, whatever the budget is."""
        if self._on_gpu:
            return peak <= ROOM * torch.cuda.mem_get_info()[1]
        try:
            return peak <= ROOM * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        except (AttributeError, OSError, ValueError):  # not a Unix
            return True

    def _say_slowdown(self, plain: float, lean: float, kept: frozenset[int], *, is_measured: bool) -> None:
        least, now = self._relaxation.play(self._smallest), self._relaxation.play(kept)
        how = "measured" if is_measured else "plain does not fit: foreseen"
        self.status = (
            f"slowdown {self.goal.slowdown:g}: plain takes {1e3 * plain:.1f} ms ({how}), the least memory "
            f"{1e3 * lean:.1f} ms; saved tensors take {size_text(now.peak_bytes)} at most, "
            f"{size_text(least.peak_bytes)} at the least"
        )

    # ------------------------------------------------------------------------------------------------------------ costs

    def _time_rebuilds(self) -> Iterator[Way]:
        """One step in which every rebuild is timed; from then on work is told in seconds."""
        timing, items = Timing(on_gpu=self._on_gpu), self._step.items
        yield Way(self._smallest, timing)
        self._note_peak(self._smallest)
        costs = timing.costs(items, [saved.item for saved in self._step.saved], self._smallest)
        cheap = [n for n in costs if not items[n].products]
        spent = sum(max(costs[n]) for n in cheap)
        rate = spent / max(1, sum(items[n].nbytes for n in cheap))  # of what was kept in this step, and so not timed
        seconds = [0.0 if item.is_fixed else rate * item.nbytes for item in items]
        seconds += [0.0] * (len(self._replay.graph.values) - len(items))
        for n, second in self._evened({n: max(cost) for n, cost in costs.items()}).items():
            seconds[n] = second
        self._use(Replay(self._replay.graph, seconds))

    def _evened(self, costs: dict[int, float]) -> dict[int, float]:
        """The same cost for tensors that are alike, those of equal blocks: their mean.

        One timing of each differs by chance, and then the plan would keep some of these and some of those. Of equal
        ones the last layers' are kept first, and where nothing is rebuilt any more the override ends: `early_end`.
        """
        items, ops = self._step.items, {s.item: s.made_by[0] for s in self._step.saved if s.made_by is not None}
        alike: dict[Any, list[int]] = {}
        for n in costs:
            kind = (ops.get(n), items[n].nbytes, items[n].products, len(items[n].inputs), items[n].may_end_chain)
            alike.setdefault(kind, []).append(n)
        return {n: sum(costs[i] for i in some) / len(some) for some in alike.values() for n in some}


def first_graded(output: object) -> Tensor | None:
    """The first tensor that backward may begin at, of what a forward handed out."""
    return next(_graded(output), None)


def _graded(output: object) -> Iterator[Tensor]:
    return (t for t in tensors_in(output) if t.grad_fn is not None and type(t) is Tensor)


def _higher(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)


def _counters() -> _torch.Counters | None:
    return _torch.cuda_counters(torch.device("cuda", torch.cuda.current_device()))
