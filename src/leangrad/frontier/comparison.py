"""The comparison of all ways: each is warmed up and measured alone, then all are timed in alternation."""

import statistics
from collections.abc import Callable
from typing import Any

from leangrad.frontier.copies import Copies
from leangrad.frontier.failure import is_out_of_memory
from leangrad.frontier.meter import Meter, bytes_on, meter_for
from leangrad.frontier.result import Frontier, Point
from leangrad.frontier.training import MakeOptimizer, Setup, Training, make_optimizer
from leangrad.frontier.ways import Way, budget_way, checkpoint_way, lean_way, no_checkpoint, plain_way
from leangrad.switch import NAME, disabled
from leangrad.verify import check_gradients
from leangrad.verify.comparison import Outcome, differences
from leangrad.verify.memory import Memory
from leangrad.verify.subject import Subject

__all__ = ["Comparison", "Progress"]

Progress = Callable[[str, int, int], object]  # called with the current activity, the steps done, and the total

_STEPS_IN_A_TURN = 2  # timed steps of each way in one round
_SAME = 0.02  # no budgets below the floor are tried if the smallest is less than this fraction of the floor below it


class Comparison:
    """The comparison: each way is warmed up and measured alone, then all are timed in alternation.

    - `start`: the state that every way starts from.
    - `reference`: the outcome of the first step in plain PyTorch; None before it, or if two plain steps differ.
    - `standing`: bytes on the device, without the optimizer's state, when last counted; None before the first way ran.
    - `done`, `total`: finished steps, and all that are expected, for `progress`.
    """

    def __init__(
        self, subject: Subject, batch: Any, points: int, steps: int, optimizer: MakeOptimizer | None, progress: Progress
    ) -> None:
        copies = Copies(subject.model, own_values=optimizer is not None)
        self.device = next(subject.model.parameters()).device
        made = make_optimizer(optimizer, copies.first)
        meter = meter_for(copies.first, batch)
        self.setup = Setup(subject, copies, made, meter)
        self.start = Memory(copies.first, batch, subject.loss)
        self.batch = batch
        self.points = points
        self.rounds = -(-steps // _STEPS_IN_A_TURN)
        self.notes: list[str] = []
        self.reference: Outcome | None = None
        self.standing: int | None = None
        self.progress = progress
        self.done = 0
        self.total = sum(way.warm_up_steps for way in (plain_way(), lean_way(), plain_way()))
        self.total += points * budget_way(1, 1).warm_up_steps + self.rounds * (3 + points)

    @property
    def meter(self) -> Meter:
        """The meter that counts the memory of the steps."""
        return self.setup.meter

    def run(self) -> Frontier:
        """Measure every way and return the result."""
        plain = self._settle(plain_way())
        floor = self._settle(lean_way())
        lean = self._budgets(plain, floor) if self.points and not disabled() else []
        checkpoint = self._checkpoint()
        lean = sorted([floor, *lean], key=lambda training: -_size(training))
        trainings = [plain, *lean, checkpoint]
        self._time([training for training in trainings if not training.has_failed])
        if disabled():
            self.notes.append(f"{NAME} is set: lean was plain too, and nothing was shown")
        self.progress("done", self.total, self.total)
        rows = tuple(_point(training, plain) for training in trainings)
        return Frontier(type(self.setup.subject.model).__name__, str(self.device), rows, "; ".join(self.notes))

    def _settle(self, way: Way) -> Training:
        """Warm a way up, compare its outcomes with plain PyTorch, and measure its memory; return its training.

        An error is noted in the training; only an error of plain other than out of memory is raised.
        """
        training = Training(way, self.setup)
        end = self.done + way.warm_up_steps
        said = way.name if way.budget is None else f"{way.name} {way.budget / 1e6:,.0f} MB"
        self._count_off_leftovers()
        try:
            self.start.restore()
            outcomes = training.warm_up(
                Memory(training.subject.model, self.batch, self.setup.subject.loss),
                lambda: self._advance(said, self.done < end),
            )
            if way.name == "plain":
                self._take_reference(*outcomes)
            elif self.reference is not None:
                training.compare(self.reference, outcomes)
            training.read()
            if self.standing is None:
                self.standing = self._standing()
        except Exception as error:
            if way.name == "plain" and not is_out_of_memory(error):
                raise
            training.fail(error)
        if training.has_failed:
            self.meter.release()
        self._advance(said, end - self.done)
        return training

    def _take_reference(self, first: Outcome, last: Outcome) -> None:
        check_gradients(first)
        found = [one for one in differences(first, last) if one.kind in ("loss", "gradient", "input gradient")]
        if not found:
            self.reference = first
            return
        apart = max(one.max_difference for one in found)
        self.notes.append(f"plain differs from itself by up to {apart:.2g}, so no bits were compared")

    def _standing(self) -> int:
        """Return the bytes that are allocated on the device, without the optimizer's state."""
        state = self.setup.optimizer.state.values() if self.setup.optimizer is not None else ()
        return self.meter.standing_bytes() - bytes_on(self.device, list(state))

    def _count_off_leftovers(self) -> None:
        """Exclude memory that earlier ways still hold, such as their scratch, from the peaks of later ways."""
        if self.standing is not None:
            standing = self._standing()
            self.meter.count_off(standing - self.standing)
            self.standing = standing

    def _budgets(self, plain: Training, floor: Training) -> list[Training]:
        """Measure lean with budgets from the plain peak down to the smallest that can be met."""
        smallest = self._smallest()
        high = plain.reading.peak_bytes if plain.reading else self.meter.capacity()
        low = floor.reading.peak_bytes if floor.reading else smallest
        below = self.points - self.points * 2 // 3
        if smallest is None or low is None or smallest > (1 - _SAME) * low:
            below = 0
        above = self.points - below
        trainings = []
        if high is not None and low is not None and high > low:
            for n in range(above):
                trainings.append(self._with_budget(high - (high - low) * n // above))
        if smallest is not None and low is not None and below:
            for n in range(1, below):
                trainings.append(self._with_budget(low - (low - smallest) * n // below))
            trainings.append(self._at_the_smallest(smallest))
        return trainings

    def _with_budget(self, budget: int, note: str = "") -> Training:
        self._count_off_leftovers()
        return self._settle(budget_way(budget, self.meter.budget_for(budget), note))

    def _smallest(self) -> int | None:
        """Return the smallest peak of lean; None if it fails.

        Lean gets a budget that cannot be met. The result is the smallest peak that the error names, or if there is no
        error, the peak that is reached.
        """
        self._advance("lean, the smallest", 0)
        self._count_off_leftovers()
        training = Training(budget_way(1, self.meter.budget_for(1)), self.setup)
        try:
            self.start.restore()
            for _ in range(training.way.warm_up_steps):
                self.setup.copies.clear_gradients()
                training.step()
            training.read()
        except Exception as error:  # if lean itself fails, the rows of the other budgets say so
            training.fail(error)
        self.setup.copies.clear_gradients()
        self.meter.release()
        if training.smallest_budget:
            return self.meter.peak_at(training.smallest_budget)
        return training.reading.peak_bytes if training.reading else None

    def _at_the_smallest(self, smallest: int) -> Training:
        """Measure lean with the smallest budget; try again if lean names a larger one after it has run more steps."""
        for _ in range(3):
            training = self._with_budget(smallest, "the smallest")
            if not training.smallest_budget:
                break
            smallest = self.meter.peak_at(training.smallest_budget)
        return training

    def _checkpoint(self) -> Training:
        way = checkpoint_way(self.setup.copies.first)
        return Training(no_checkpoint(), self.setup) if way is None else self._settle(way)

    def _time(self, trainings: list[Training]) -> None:
        """Time the ways in alternation, each round in another order."""
        for n in range(self.rounds):
            first = n % max(1, len(trainings))
            for training in trainings[first:] + trainings[:first]:
                if not training.has_failed:
                    self._turn(training)
                self._advance(f"timing, round {n + 1} of {self.rounds}")

    def _turn(self, training: Training) -> None:
        try:
            training.time(_STEPS_IN_A_TURN)
        except Exception as error:
            training.fail(error)
            training.seconds.clear()
        if training.has_failed:
            self.meter.release()

    def _advance(self, what: str, steps: int = 1) -> None:
        self.done += steps
        self.total = max(self.total, self.done)
        self.progress(what, self.done, self.total)


def _size(training: Training) -> float:
    """Return the key that the rows of lean are sorted by: the budget, or for lean without a budget its peak."""
    if training.way.budget is not None:
        return training.way.budget
    return training.reading.peak_bytes if training.reading else 0


def _point(training: Training, plain: Training) -> Point:
    reading, seconds = training.reading, training.seconds
    ratio = None
    if seconds and plain.seconds:
        ratio = statistics.median(own / other for own, other in zip(seconds, plain.seconds, strict=True))
    return Point(
        way=training.way.name,
        budget=training.way.budget,
        peak_bytes=reading.peak_bytes if reading else None,
        kept_bytes=reading.kept_bytes if reading else None,
        seconds=statistics.median(seconds) if seconds else None,
        ratio=ratio,
        bitwise=training.is_bitwise if training is not plain else None,
        note="; ".join(training.notes),
    )
