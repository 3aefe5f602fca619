"""The course of one ledger, through all that happens to its model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from leangrad.errors import BudgetError
from leangrad.ledger.learn.recorded_step import RecordedStep
from leangrad.ledger.tune.course import Course
from leangrad.ledger.tune.goal import Goal, Way
from leangrad.ledger.tune.peaks import Peaks
from leangrad.ledger.tune.to_budget import Recordings, TowardsBudget
from leangrad.ledger.tune.to_slowdown import TowardsSlowdown
from leangrad.policy.replay import Replay

__all__ = ["Tuner"]


class Tuner:
    """From step to step towards a goal: `start` with what was recorded, then `next_way` for each step."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.peaks = Peaks()
        self.course: Course | None = None
        self._ways: Iterator[Way] | None = None
        self._recordings = Recordings()
        self._error: BudgetError | None = None

    @property
    def status(self) -> str:
        """What the summary says."""
        return "" if self.course is None else self.course.status

    @property
    def has_failed(self) -> bool:
        """Whether the budget could not be met."""
        return self._error is not None

    def begin(self, module: nn.Module | None, *, on_gpu: bool) -> None:
        """A step of ``module`` begins."""
        if self._error is not None:
            raise self._error
        self.peaks.begin(module, on_gpu=on_gpu)

    def sees_output(self, output: object) -> None:
        """Forward handed this out."""
        self.peaks.sees_output(output)

    def end_step(self) -> None:
        """Another step begins, which is not of this course."""
        self.peaks.end_step()

    def start(self, step: RecordedStep, replay: Replay, kept: frozenset[int] | None, outputs_nbytes: int) -> None:
        """A step was recorded; ``kept``: the plan that takes the least memory; without one, what the step kept.

        outputs_nbytes: of what its region handed out. A loss that is computed outside keeps about as many.
        """
        self.peaks.outside = outputs_nbytes
        of, status = (self.goal, self.peaks, step, replay, kept), self.status
        self.course = TowardsSlowdown(*of) if self.goal.budget is None else TowardsBudget(self._recordings, *of)
        self.course.status = status  # of the course before, until there is more to say
        self._ways = self.course.ways()
        self.peaks.is_recorded = True

    def restart(self) -> None:
        """A step differs from the recorded one."""
        self.peaks.restart()
        self._ways = None
        self._recordings = Recordings()

    def next_way(self) -> Way:
        """How the step that has just begun is to run."""
        assert self._ways is not None
        try:
            way = next(self._ways)
        except BudgetError as error:
            self._error = error
            raise
        if way.products is not None:  # another step, of which nothing is known yet
            self.peaks.extra_before, self.peaks.extra = self.peaks.extra, None
            self.peaks.is_settled = False  # nor what it takes: its plans are timed anew
        return way
