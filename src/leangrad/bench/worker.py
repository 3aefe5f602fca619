"""Measure one way on one model in this process: `python -m leangrad.bench.worker ANSWER`, with a job as JSON on stdin.

First plain PyTorch runs three steps; the gradients of the first are the reference. Then the way is applied to a copy of
the model, which is trained until its steps no longer change, and the memory of a step is measured. Last, plain and the
way are timed in alternation, and `Row.ratio` is the median of their ratios. The time is CPU time on a CPU with one
thread, because other programs do not change it, else wall-clock time. A way that changes classes for the whole process
is not alternated: plain is timed before it. The copies share the model's parameters and have gradients of their own.
The row is written to the file ANSWER.
"""

import copy
import gc
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any

import torch
from torch import Tensor

from leangrad.bench.job import Job, Row
from leangrad.bench.machine import describe_machine
from leangrad.bench.peers import NotForThisError
from leangrad.bench.turnstile import alone, make_room
from leangrad.bench.ways import WAYS, Choice, Given
from leangrad.errors import BudgetError
from leangrad.floor import floor
from leangrad.frontier.copies import Copies
from leangrad.frontier.failure import is_out_of_memory, sentence_of
from leangrad.frontier.fit import MOST_ROWS, Search
from leangrad.frontier.fit.rows import count_rows
from leangrad.frontier.meter import Meter, bytes_on, meter_for
from leangrad.frontier.training import Setup, Training
from leangrad.frontier.ways import Way, budget_way, plain_way
from leangrad.timeline.event import format_bytes
from leangrad.verify import check_gradients, check_trainable
from leangrad.verify.comparison import Difference, Outcome, collect, differences, largest
from leangrad.verify.generators import global_states
from leangrad.verify.memory import Memory
from leangrad.verify.subject import Subject
from leangrad.verify.users_code import call_factory, own_frames

__all__ = ["measure_way"]

_BUDGETS = 3  # how many budgets are tried: if one cannot be met, the next is the smallest that `BudgetError` names
_ROUNDING = 1e-6  # a gradient smaller than this fraction of the model's largest gradient is rounding error only
_COMPARED = ("loss", "gradient", "input gradient")


def measure_way(job: Job) -> Row:
    """Measure one way in this process and return its row; if an error is raised, the row says which."""
    choice = WAYS[job.way]
    try:
        return _Measuring(job, choice).run()
    except NotForThisError as reason:
        return Row(job.way, "not for this", note=str(reason))
    except Exception as error:
        trace = "".join(format_exception(error)) if job.whole_traceback else own_frames(error)
        return Row(job.way, "failed", note=sentence_of(error), traceback=trace)


@dataclass
class _Plain:
    """The training of plain PyTorch, and the outcome of its steps."""

    training: Training
    reference: Outcome | None = None  # outcome of the first step; None if plain ran out of memory
    noise: float = 0.0  # largest relative difference between two plain steps from the same state
    draws: bool = False  # whether a step draws random numbers


class _Measuring:
    """The measurement of one way: the model, its batch, its start state, the meter and the clock."""

    def __init__(self, job: Job, choice: Choice) -> None:
        self.job, self.choice = job, choice
        _seed()
        model, self.batch, loss = call_factory(job.target, **job.options)
        dtype = getattr(torch, job.autocast) if job.autocast else None
        self.subject = Subject.of(model, self.batch, loss, dtype, caller="bench")
        check_trainable(model)
        self.device = next(model.parameters()).device
        self.meter: Meter = meter_for(model, self.batch)
        self.start = Memory(model, self.batch, loss)
        self.notes: list[str] = []
        is_alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        self.clock = time.process_time if is_alone else time.perf_counter

    def run(self) -> Row:
        """Measure everything that the job asks for."""
        self.choice.way(self._given(self.job.budget, self.job.budget))  # raises early if it does not apply to the model
        plain = _Plain(self._training(plain_way()))
        memory = self._ready(plain.training)
        with self._alone():
            last = self._train_plain(plain, memory)
            if self.choice.is_global:
                before = self._time_alone(plain.training) if plain.reference and self.job.rounds else []
        if plain.reference is not None:
            plain.noise = largest(_compared(plain.reference, last))
        with self.choice.around():
            standing = self.meter.standing_bytes()
            training, first_seconds = self._settle(plain, standing)
            assert training.reading is not None
            row = Row(
                self.job.way,
                peak_bytes=training.reading.peak_bytes - self.meter.peak_at(standing),
                kept_bytes=training.reading.kept_bytes,
                first_seconds=first_seconds,
                budget=training.way.budget,
                plan=training.plan,
                rows=_rows_of(self.batch),
                standing_bytes=bytes_on(self.device, self.subject.model, self.batch)
                if self.device.type == "cuda"
                else 0,
                machine=describe_machine(str(self.device)),
            )
            with self._alone() if self.job.rounds else nullcontext():
                if self.job.rounds and plain.reference is not None:
                    if self.choice.is_global:
                        row = _with_times(row, before, self._time_alone(training))
                    else:
                        row = _with_times(row, *self._take_turns(plain.training, training))
                elif self.job.rounds:
                    row = replace(row, seconds=statistics.median(self._time_alone(training)))
            row = replace(row, **self._compare(plain, training))
            if self.job.memory is not None:
                with self._alone():
                    row = replace(row, largest_batch=self._largest_batch(training.way))
        row = replace(row, not_for_this=self._not_for_this())
        if self.job.floor:
            with self._alone():
                found = floor(self.subject.model, self.batch, self.subject.loss, autocast=self.subject.autocast)
            row = replace(row, floor_bytes=found.bytes, float64_error=self._float64_error(plain))
        return replace(row, note="; ".join(self.notes))

    def _not_for_this(self) -> dict[str, str]:
        """Return, by name, why ways in ``job.others`` do not apply to this model, as far as inspecting it shows."""
        found = {}
        for name in self.job.others:
            try:
                WAYS[name].way(self._given(0, 0))
            except NotForThisError as reason:
                found[name] = str(reason)
        return found

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock on the device; before releasing it, free the cached memory that steps have left on it."""
        with alone(self.job.turnstile):
            yield
            if self.job.turnstile:
                self.meter.release()

    # -- the steps that are compared -------------------------------------------------------------------------------

    def _train_plain(self, plain: _Plain, memory: Memory) -> Outcome:
        """Run the steps of plain PyTorch, fill in ``plain``, and return the last outcome; {} if memory ran out.

        memory: the state that the first step starts from.
        """
        before = global_states(self.device)
        try:
            first, last = plain.training.warm_up(memory, _stay)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.notes.append("plain ran out of memory: no gradients and no times to compare with")
            plain.training.fail(error)
            self.meter.release()
            return {}
        check_gradients(first)
        plain.reference = first
        after = {name: state for (kind, name), state in first.items() if kind == "random state"}
        plain.draws = bool(
            differences(
                {("random state", name): state for name, state in before.items()},
                {("random state", name): state for name, state in after.items()},
            )
        )
        return last

    def _settle(self, plain: _Plain, standing: int) -> tuple[Training, float]:
        """Train the way until its steps no longer change, and measure a step; also return the first step's seconds.

        If the budget cannot be met, try again with the smallest budget that the error names.

        standing: bytes allocated on the device before the way is set up.
        """
        budget, told = self.job.budget, self.job.budget and self.job.budget + standing
        for _ in range(_BUDGETS):
            way = self.choice.way(self._given(budget, told))
            training = self._training(way)
            try:
                training, self.outcomes, first_seconds = self._at_work(training)
            except BudgetError as error:
                if error.smallest is None or told is None or error.smallest <= told:
                    raise
                self.notes[:] = [f"{format_bytes(self.job.budget or 0)} cannot be met; the smallest"]
                budget, told = error.smallest - standing, error.smallest
                training.fail(error)
                self.meter.release()
                continue
            self.notes += [note for note in (way.note,) if note]
            if way.budget is not None and training.reading is not None:
                peak = training.reading.peak_bytes - self.meter.peak_at(standing)
                if peak > way.budget:
                    self.notes.append(f"its peak is above its budget of {format_bytes(way.budget)}")
            return training, first_seconds
        raise BudgetError(f"named a larger budget {_BUDGETS} times", told or 0)

    def _at_work(self, training: Training) -> tuple[Training, tuple[Outcome, Outcome], float]:
        """Train until steps no longer change, and measure the memory of a step.

        Returns the training, the outcomes of its first and of a settled step, and the seconds of the first step. A way
        that compiles runs its first step without waiting for the lock on the device: that step takes about a minute and
        hardly uses the device. If it runs out of memory, it is started again with the lock held.
        """
        is_beside = self.choice.compiles and bool(self.job.turnstile)
        for beside in (True, False) if is_beside else (False,):
            try:
                with ExitStack() as device:
                    enter: Callable[[], object] = partial(device.enter_context, self._alone())
                    if not beside:
                        enter()
                        enter = _stay
                    outcomes, first_seconds = self._timed_warm_up(training, enter)
                    training.read()
                break
            except Exception as error:
                if not beside or not is_out_of_memory(error):
                    raise
                training.fail(error)
                self.meter.release()
                training = self._training(training.way)
        return training, outcomes, first_seconds

    def _timed_warm_up(
        self, training: Training, after_first: Callable[[], object]
    ) -> tuple[tuple[Outcome, Outcome], float]:
        """Return the outcomes of the first and of a settled step, and the seconds that the first step took.

        after_first: called after the first step.
        """
        memory = self._ready(training)
        began = time.perf_counter()
        ends: list[float] = []

        def after_step() -> None:
            ends.append(time.perf_counter())
            if len(ends) == 1:
                after_first()

        outcomes = training.warm_up(memory, after_step)
        return outcomes, ends[0] - began

    def _ready(self, training: Training) -> Memory:
        """Restore the start state, which is the same for all ways, and return it as a `Memory`."""
        training.subject  # noqa: B018  (what is not for this model says so before anything is timed)
        self.start.restore()
        return Memory(training.subject.model, self.batch, self.subject.loss)

    def _compare(self, plain: _Plain, training: Training) -> dict[str, Any]:
        """Return `gradient_error` and `bitwise` for the row; {} if plain ran out of memory."""
        if plain.reference is None:
            return {}
        outcomes = self.outcomes
        if self.choice.compiles and plain.draws:
            outcomes = self._drawing_as_eager()
        if plain.noise:
            self.notes.append(f"plain differs from itself by up to {plain.noise:.2g}")
        found = [_compared(plain.reference, outcome) for outcome in outcomes]
        error = max(_largest_error(plain.reference, some) for some in found)
        return {"gradient_error": error, "bitwise": None if plain.noise else not any(found)}

    def _drawing_as_eager(self) -> tuple[Outcome, Outcome]:
        """Compile the model once more, such that it draws the random numbers of eager mode; return its outcomes."""
        self.notes.append("gradients are of a second compilation, which draws eager's random numbers")
        way = self.choice.way(replace(self._given(None, None), draws_as_eager=True))
        return self._at_work(self._training(way))[1]

    def _float64_error(self, plain: _Plain) -> float | None:
        """Return the distance of loss and gradients in plain PyTorch from those in float64.

        None on a GPU, under autocast, if the model draws random numbers, or if it does not run in float64.
        """
        if plain.reference is None or plain.draws or self.device.type != "cpu" or self.subject.autocast is not None:
            return None
        self.start.restore()
        model, batch = copy.deepcopy((self.subject.model, self.batch))
        subject = Subject.of(model.double(), _in_float64(batch), self.subject.loss, None, caller="bench")
        arguments, inputs = subject.fresh_arguments()
        try:
            value = subject.forward(arguments)
            value.backward()
        except RuntimeError:  # the model or the loss works in float32 only
            return None
        if value.dtype is not torch.float64:
            return None
        exact = collect(model, inputs, value)
        wide: Outcome = {
            key: one.double() for key, one in plain.reference.items() if one is not None and key[0] in _COMPARED
        }
        compared: Outcome = {key: exact.get(key) for key in wide}
        return _largest_error(compared, _compared(compared, wide))

    # -- time ------------------------------------------------------------------------------------------------------

    def _take_turns(self, plain: Training, training: Training) -> tuple[list[float], list[float]]:
        """Return the seconds of a step of plain and of the way for each round; the order changes every round."""
        times: tuple[list[float], list[float]] = ([], [])
        for n in self._turns():
            for which in (0, 1) if n % 2 else (1, 0):
                times[which].append(self._turn((plain, training)[which]))
        return times

    def _time_alone(self, training: Training) -> list[float]:
        return [self._turn(training) for _ in self._turns()]

    def _turns(self) -> Iterator[int]:
        """Yield the numbers of the rounds: up to `job.rounds`; after the second, only while `job.seconds` last."""
        began = time.perf_counter()
        for n in range(self.job.rounds):
            if n >= 2 and time.perf_counter() - began > self.job.seconds:
                return
            yield n

    def _turn(self, training: Training) -> float:
        """Return the seconds of a step: the mean of `job.steps` steps in a row, as training runs them.

        One untimed step goes first, because the other way's data are in the caches.
        """
        for n in range(self.job.steps + 1):
            if n == 1:
                self.meter.synchronize()
                began = self.clock()
            self._clear(training)
            training.step()
        self.meter.synchronize()
        taken = self.clock() - began
        self._clear(training)
        return taken / self.job.steps

    # -- parts -----------------------------------------------------------------------------------------------------

    def _training(self, way: Way) -> Training:
        """Return the training of a way on a copy of the model, with the same parameters and its own gradients."""
        return Training(way, Setup(self.subject, Copies(self.subject.model, own_values=False), None, self.meter))

    def _given(self, budget: int | None, told: int | None) -> Given:
        return Given(self.subject.model, self.device, budget, told)

    def _clear(self, training: Training) -> None:
        for parameter in training.subject.model.parameters():
            parameter.grad = None

    def _largest_batch(self, way: Way) -> int | None:
        assert self.job.memory is not None
        self.start.restore()
        gc.collect()
        search = Search(self.subject, self.batch, count_rows(self.batch), self.job.memory, MOST_ROWS, None)
        if way.budget is not None:
            way = budget_way(self.job.memory, search.meter.budget_for(self.job.memory))
        fitted = search.run(way, lambda said: None)
        if fitted.rows is None:
            self.notes.append(f"no largest batch: {fitted.note}")
        return fitted.rows


def _stay() -> None:
    """Do nothing: the callback where the lock on the device is held already, or is not needed."""


def _compared(plain: Outcome, other: Outcome) -> list[Difference]:
    """Return the differences between two outcomes in the loss and the gradients only."""
    return [one for one in differences(plain, other) if one.kind in _COMPARED]


def _largest_error(plain: Outcome, found: list[Difference]) -> float:
    """Return the largest relative difference of the loss or of a gradient, as `leangrad.verify` defines it.

    Gradients that consist of rounding errors only are left out, such as that of a bias before a batch norm, whose true
    gradient is 0.
    """
    if not found:
        return 0.0
    sizes = {key: one.abs().max().item() for key, one in plain.items() if one is not None and key[0] in _COMPARED}
    sizes = {key: size for key, size in sizes.items() if key[0] != "loss"}
    least = _ROUNDING * max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
    counts = [one for one in found if sizes.get((one.kind, one.name), math.inf) >= least]
    return largest(counts + [one for one in found if math.isinf(one.max_difference)])  # a missing gradient counts


def _with_times(row: Row, plain: list[float], own: list[float]) -> Row:
    ratio = statistics.median(b / a for a, b in zip(plain, own))  # noqa: B905  (each may have ended early)
    return replace(row, seconds=statistics.median(own), ratio=ratio)


def _in_float64(batch: Any) -> Any:
    """Return the batch with its floating-point tensors in float64."""
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if type(batch) in (tuple, list):
        return type(batch)(map(_in_float64, batch))
    return {key: _in_float64(one) for key, one in batch.items()} if isinstance(batch, dict) else batch


def _rows_of(batch: Any) -> int | None:
    try:
        return count_rows(batch)
    except ValueError:  # its tensors have no rows in common
        return None


def _seed() -> None:
    """Seed the generators of torch, Python and NumPy, so that every process makes the same model and batch."""
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def main() -> None:
    """Read a job from stdin, measure it, and write its row to the file named on the command line."""
    job = Job(**json.load(sys.stdin))
    if job.turnstile:
        make_room()
    row = measure_way(job)
    row = replace(row, process_seconds=round(sum(os.times()[:4]), 2))  # includes child processes
    Path(sys.argv[1]).write_text(json.dumps(row.as_dict()))


if __name__ == "__main__":
    main()
