"""The largest batch that fits into a given memory, for every way to train a model.

Read in this order: `rows` (changes the number of rows of a batch), `search` (finds the largest number that fits, in few
trials), and `fit` itself, here. Ways, copies and the meter are those of `leangrad.frontier`.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leangrad.errors import BudgetError
from leangrad.frontier.copies import Copies
from leangrad.frontier.failure import is_out_of_memory, sentence_of
from leangrad.frontier.fit.rows import count_rows, with_rows
from leangrad.frontier.fit.search import Trial, largest_fit
from leangrad.frontier.meter import bytes_on, meter_for
from leangrad.frontier.result import text_table
from leangrad.frontier.training import MakeOptimizer, Setup, Training, make_optimizer
from leangrad.frontier.ways import Way, budget_way, checkpoint_way, lean_way, no_checkpoint, plain_way
from leangrad.sizes import parse_size
from leangrad.timeline.event import format_bytes
from leangrad.verify import check_trainable
from leangrad.verify.memory import Memory
from leangrad.verify.subject import Subject

__all__ = ["Fit", "Fitted", "Search", "fit"]

MOST_ROWS = 65_536


@dataclass(frozen=True)
class Fitted:
    """The largest batch of one way.

    - `rows`: its size along dimension 0; 0 if not even one row fits, None if the way cannot train the model.
    - `peak_bytes`: the highest peak of the steps that were run with this batch; None if no row fits.
    - `trials`: how many sizes were tried.
    - `note`: a remark, such as why the way has no largest batch; may be empty.
    """

    way: str
    rows: int | None
    peak_bytes: int | None = None
    trials: int = 0
    note: str = ""


@dataclass(frozen=True)
class Fit:
    """The result of `fit`: a row for each way.

    - `memory`: the memory that the batches have to fit into, in bytes.
    - `device`: the device of the model, such as "cpu" or "cuda:0".
    """

    memory: int
    device: str
    ways: tuple[Fitted, ...]

    def __str__(self) -> str:
        plain = next((fitted.rows for fitted in self.ways if fitted.way == "plain"), None)
        rows = [
            (
                fitted.way,
                "" if fitted.rows is None else str(fitted.rows),
                f"{fitted.rows / plain:.2f}" if fitted.rows and plain else "",
                "" if fitted.peak_bytes is None else format_bytes(fitted.peak_bytes),
                str(fitted.trials),
                fitted.note,
            )
            for fitted in self.ways
        ]
        headings = ("way", "largest batch", "× plain", "peak", "trials", "note")
        title = f"the largest batch within {format_bytes(self.memory)} on {self.device}"
        return title + "\n" + text_table(headings, rows, left=("way", "note"))

    def to_json(self, **kwargs: Any) -> str:
        """Return all attributes as JSON; `kwargs` are passed to `json.dumps`."""
        return json.dumps(dataclasses.asdict(self), **kwargs)


def fit(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    memory: int | str,
    autocast: torch.dtype | None = None,
    most: int = MOST_ROWS,
    optimizer: MakeOptimizer | None = None,
    progress: Callable[[str, int, int], object] = lambda *_: None,
) -> Fit:
    """Search the largest batch that fits into `memory`: plain, with checkpoints, lean, and lean with that budget.

    The batch gets more or fewer rows along dimension 0 of every tensor in it; its own rows are repeated or left out.
    For each size a few real steps are run, and their highest peak counts; a size that runs out of memory does not fit.
    Up to 128 rows the result is exact; above, it may be less than 1% below the largest batch that fits.

    Args:
        model, batch, loss, autocast, optimizer: see `leangrad.frontier`. The loss has to accept any number of rows.
        memory: a number of bytes, or a text such as "24GB" (10^9 bytes) or "24GiB" (2^30). What is counted is in
            `meter.py`, [Note: what a peak counts].
        most: the largest batch that is tried.
        progress: called with the current way and size, the number of finished ways, and the number of all ways.

    Raises:
        TypeError, ValueError: an argument does not match the description above.

    >>> print([fitted.rows for fitted in fit(nn.Linear(8, 8), torch.ones(2, 8), memory=10_000, most=4).ways][0])
    4
    """
    memory = parse_size(memory, "memory")
    if not isinstance(most, int) or most < 1:
        raise ValueError(f"expected most to be a positive integer, got {most!r}")
    subject = Subject.of(model, batch, loss, autocast, caller="fit")
    check_trainable(model)
    rows = count_rows(batch)
    state = Memory(model, batch, loss)
    try:
        search = Search(subject, batch, rows, memory, most, optimizer)
        ways = search.ways()
        found = []
        for n, way in enumerate(ways):
            progress(way.name, n, len(ways))
            found.append(search.run(way, lambda said, n=n: progress(said, n, len(ways))))  # type: ignore[misc]
        progress("done", len(ways), len(ways))
    finally:
        state.restore()
    return Fit(memory, str(search.device), tuple(found))


class Search:
    """The search for the largest batch; `run` searches for one way, and all ways share copies, optimizer and meter."""

    def __init__(
        self, subject: Subject, batch: Any, rows: int, memory: int, most: int, optimizer: MakeOptimizer | None
    ) -> None:
        self.subject, self.batch, self.rows, self.memory, self.most = subject, batch, rows, memory, most
        self.copies = Copies(subject.model, own_values=optimizer is not None)
        self.optimizer = make_optimizer(optimizer, self.copies.first)
        self.device = next(subject.model.parameters()).device
        self.meter = meter_for(self.copies.first, batch)
        self.start = Memory(self.copies.first, batch, subject.loss)
        self.best = rows  # the first size that is tried: the result of the previous way, at first that of the batch

    def ways(self) -> list[Way]:
        """Return all ways that are compared."""
        checkpoint = checkpoint_way(self.copies.first)
        return [plain_way(), checkpoint or no_checkpoint(), lean_way(), self._budget_way()]

    def _budget_way(self) -> Way:
        return budget_way(self.memory, self.meter.budget_for(self.memory))

    def run(self, way: Way, say: Callable[[str], object]) -> Fitted:
        """Search the largest batch of one way.

        say: called with the way and the number of rows before each trial.
        """
        if way.prepare is None:
            return Fitted(way.name, None, note=way.note)
        trials: dict[int, Trial | None] = {}  # by their rows; None for one that failed

        def attempt(rows: int) -> Trial:
            say(f"{way.name}, {rows} rows")
            trials[rows] = None
            trials[rows] = trial = self.attempt(way, rows)
            return trial

        try:
            rows = largest_fit(attempt, self.memory, min(self.best, self.most), self.most)
        except Exception as error:
            if way.name == "plain":
                raise
            return Fitted(way.name, None, trials=len(trials), note=f"{way.note}; {sentence_of(error)}".lstrip("; "))
        self.best = max(rows, 1)
        best = trials.get(rows)
        notes = [way.note] if way.note else []
        if rows == self.most:
            notes.append("no more were tried")
        if rows == 0 and (one := trials.get(1)) and one.needs:
            notes.append(f"one row takes {format_bytes(one.needs)}")
        return Fitted(way.name, rows, best.peak_bytes if best else None, len(trials), "; ".join(notes))

    def attempt(self, way: Way, rows: int) -> Trial:
        """Run a few steps with a batch of ``rows`` rows, and return whether they fit and what they need."""
        self.start.restore()
        self.meter.release()
        # A batch of another size is allocated in addition to the given one, which then does not belong to the step.
        beside = 0 if rows == self.rows else bytes_on(self.device, self.batch)
        self.meter.count_off(beside)
        smallest = None
        try:
            peak = self._peak(way if way.budget is None else self._budget_way(), rows)
            # With a budget a step uses all that is allowed: its peak does not show what another number of rows needs.
            return Trial(rows, peak <= self.memory, None if way.budget else peak, peak)
        except BudgetError as error:
            smallest = max(self.meter.peak_at(error.smallest), self.memory + 1)
        except Exception as error:
            if not is_out_of_memory(error):
                if rows != self.rows:
                    error.add_note(
                        f"leangrad.fit ran this step with {rows} rows, where the batch has {self.rows}: the loss has "
                        "to take any number of rows, so let the model compute it from targets in the batch"
                    )
                raise
        finally:
            self.copies.clear_gradients()
            self.meter.count_off(-beside)
        return Trial(rows, False, smallest)

    def _peak(self, way: Way, rows: int) -> int:
        """Train a new copy of the model for the way's warm-up steps, and return the highest peak in bytes.

        If measuring takes time (``meter.is_free`` is False), only the first two steps, of which lean records the first,
        and the last step are measured.
        """
        given = self.subject
        subject = Subject.of(given.model, with_rows(self.batch, rows), given.loss, given.autocast, caller="fit")
        training = Training(way, Setup(subject, self.copies, self.optimizer, self.meter))
        highest = 0
        for n in range(way.warm_up_steps):
            self.copies.clear_gradients()
            if self.meter.is_free or n < 2 or n == way.warm_up_steps - 1:
                highest = max(highest, self.meter.read(training.step).peak_bytes)
            else:
                training.step()
            if highest > self.memory:
                break
        return highest
