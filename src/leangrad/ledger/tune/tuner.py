"""Runs the search of one ledger, and starts it over when the model's steps change."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from leangrad.errors import BudgetError
from leangrad.ledger.learn.recorded_step import RecordedStep
from leangrad.ledger.tune.budget_search import BudgetSearch, Recordings
from leangrad.ledger.tune.goal import Goal, StepMode
from leangrad.ledger.tune.peaks import Peaks
from leangrad.ledger.tune.plan_search import PlanSearch
from leangrad.ledger.tune.slowdown_search import SlowdownSearch
from leangrad.policy.replay import Replay

__all__ = ["Tuner"]


class Tuner:
    """Runs the search of one ledger: call `start` with a recorded step, then `next_step_mode` for each step."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.peaks = Peaks()
        self.search: PlanSearch | None = None
        self._step_modes: Iterator[StepMode] | None = None
        self._recordings = Recordings()
        self._error: tuple[str, int] | None = None  # message and ``smallest``: the error itself would hold its frames

    @property
    def status(self) -> str:
        """The text about the search in the ledger's summary."""
        return "" if self.search is None else self.search.status

    @property
    def is_final(self) -> bool:
        """Whether the plan is found, and was corrected by measured steps as far as these showed a difference."""
        return self.search is not None and self._step_modes is not None and self.search.is_final

    @property
    def has_failed(self) -> bool:
        """Whether the budget could not be met."""
        return self._error is not None

    def begin(self, module: nn.Module | None, *, on_gpu: bool) -> None:
        """Take the readings at the beginning of a step of ``module``; raises again a `BudgetError` of before."""
        if self._error is not None:
            raise BudgetError(*self._error)
        if self._needs_readings:
            self.peaks.begin(module, on_gpu=on_gpu)

    @property
    def _needs_readings(self) -> bool:
        """Whether a reading can still change the plan: one for a bound on the time, once final, stays."""
        return self.goal.budget is not None or not self.is_final

    def note_output(self, output: object) -> None:
        """Note that forward has ended and returned ``output``."""
        if self._needs_readings:
            self.peaks.note_output(output)

    def end_step(self) -> None:
        """Take the readings at the end of a step: the next step belongs to another ledger."""
        if self._needs_readings:
            self.peaks.end_step()

    def start(self, step: RecordedStep, replay: Replay, kept: frozenset[int] | None, outputs_nbytes: int) -> None:
        """Start a search from the recorded ``step``.

        replay: predicts the peak and the work of the step under a plan.
        kept: the plan with the lowest predicted peak; None: the plan is what the step kept.
        outputs_nbytes: the bytes of the region's outputs. A loss that is computed outside of it keeps about as many.
        """
        self.peaks.outside = outputs_nbytes
        of, status = (self.goal, self.peaks, step, replay, kept), self.status
        self.search = SlowdownSearch(*of) if self.goal.budget is None else BudgetSearch(self._recordings, *of)
        self.search.status = status  # that of the search before, until this one has its own
        self._step_modes = self.search.step_modes()
        self.peaks.is_recorded = True

    def restart(self) -> None:
        """Drop the search and all readings, because a step differs from the recorded one."""
        self.peaks.restart()
        self._step_modes = None
        self._recordings = Recordings()

    def next_step_mode(self) -> StepMode:
        """Return how the step that has just begun is to run."""
        assert self._step_modes is not None
        try:
            mode = next(self._step_modes)
        except BudgetError as error:
            self._error = str(error), error.smallest
            raise
        if mode.products is not None:  # this step is recorded anew: nothing is measured of its plans yet
            self.peaks.excess_before, self.peaks.excess = self.peaks.excess, None
            self.peaks.is_settled = False  # its plans are timed anew
        return mode
