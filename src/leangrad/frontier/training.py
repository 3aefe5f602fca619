"""The training of one way: a copy of the model, its training step, and its measurements."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leangrad.errors import BudgetError
from leangrad.frontier.copies import Copies
from leangrad.frontier.failure import sentence_of
from leangrad.frontier.meter import Meter, Reading
from leangrad.frontier.ways import Way
from leangrad.lean import is_lean, ledger_of
from leangrad.switch import disabled
from leangrad.verify.comparison import Outcome, collect, differences
from leangrad.verify.memory import Memory
from leangrad.verify.subject import Subject

__all__ = ["MakeOptimizer", "Setup", "Training", "make_optimizer"]


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


_MOST_STEPS = 60  # most warm-up steps, if the plan does not settle before
_DIFFERENCES = 3  # do not wait for a plan if this many steps differed from the recorded one: it will not settle
_READINGS = 6  # most measured steps with a budget: a plan is corrected up to three times, each seen in the next step


@dataclass(frozen=True)
class Setup:
    """What the trainings of all ways share: model, batch and loss, the copies, the optimizer, and the meter."""

    subject: Subject
    copies: Copies
    optimizer: torch.optim.Optimizer | None
    meter: Meter


class Training:
    """A copy of the model that is trained in one way, and its measurements.

    - `reading`: the memory of a step; None until it is measured.
    - `seconds`: the times of the timed steps; empty until they are measured.
    - `is_bitwise`: whether loss and gradients were bitwise equal to plain PyTorch; None if that is not known.
    - `notes`: the remarks of its row.
    - `has_failed`: whether it ran out of memory, refused its budget or failed, as the last note then says, or cannot
      train the model at all (`Way.prepare` is None).
    - `smallest_budget`: if it refused its budget, the smallest budget that the `BudgetError` names; else None.
    """

    def __init__(self, way: Way, setup: Setup) -> None:
        self.way = way
        self.reading: Reading | None = None
        self.seconds: list[float] = []
        self.is_bitwise: bool | None = None
        self.notes = [way.note] if way.note else []
        self.has_failed = way.prepare is None
        self.smallest_budget: int | None = None
        self._setup = setup
        self._subject: Subject | None = None

    @property
    def subject(self) -> Subject:
        """The copy of the model, with batch and loss; made at the first access, which may raise if the way refuses."""
        if self._subject is None:
            assert self.way.prepare is not None
            model = self._setup.copies.new()
            self.way.prepare(model)
            self._subject = replace(self._setup.subject, model=model)
        return self._subject

    @property
    def plan(self) -> str:
        """The ledger's sentence on its plan, with the predicted peak; "" if the model is not lean or has none."""
        model = self.subject.model
        return ledger_of(model).goal_status if is_lean(model) else ""

    def step(self, at_backward: Callable[[], object] = lambda: None) -> Tensor:
        """Run forward, backward and the optimizer, keep the gradients, and return the loss.

        at_backward: called when forward has ended and backward begins.
        """
        arguments, _ = self.subject.fresh_arguments()
        return self._run(arguments, at_backward)

    def _run(self, arguments: Any, at_backward: Callable[[], object] = lambda: None) -> Tensor:
        with torch.enable_grad():
            with self.subject.under_autocast():
                value = self.subject.forward(arguments)
            at_backward()
            value.backward()
        if self._setup.optimizer is not None:
            self._setup.optimizer.step()
        return value.detach()

    def warm_up(self, memory: Memory, after_step: Callable[[], object]) -> tuple[Outcome, Outcome]:
        """Train until steps no longer change; return the outcomes of the first and the last step.

        memory: the state that the first step starts from; it is restored before the last step.
        after_step: called after each step.
        """
        first = self._outcome(memory)  # the model is still in the state of `memory`
        after_step()
        for n in range(_MOST_STEPS):
            if n >= self.way.warm_up_steps - 2 and self._is_settled():
                break
            self._setup.copies.clear_gradients()
            self.step()
            after_step()
        memory.restore()
        last = self._outcome(memory)
        after_step()
        return first, last

    def _is_settled(self) -> bool:
        """Whether the plan of a lean model is final; also True if the model is not lean, or its steps differ too often.

        On a GPU, lean without a budget measures about two dozen steps before its plan is final.
        """
        model = self.subject.model
        if not is_lean(model) or disabled():
            return True
        ledger = ledger_of(model)
        return ledger.is_settled or ledger.differences >= _DIFFERENCES

    def _outcome(self, memory: Memory) -> Outcome:
        memory.clear_gradients()
        torch.clear_autocast_cache()
        arguments, inputs = self.subject.fresh_arguments()
        value = self._run(arguments)
        outcome = collect(self.subject.model, inputs, value)
        self._setup.copies.clear_gradients()
        return outcome

    def read(self) -> None:
        """Measure the memory of a step; with a budget, repeat until the measured peak no longer corrects the plan."""
        for _ in range(1 if self.way.budget is None else _READINGS):
            before = self.reading
            self._setup.copies.clear_gradients()
            self.reading = self._setup.meter.read(self.step)
            self._setup.copies.clear_gradients()
            if self.reading == before:
                break

    def time(self, steps: int) -> None:
        """Time ``steps`` steps, after an untimed one that refills the caches, where another way's data are."""
        meter = self._setup.meter
        for n in range(steps + 1):
            self._setup.copies.clear_gradients()
            meter.synchronize()
            start = time.perf_counter()
            self.step()
            meter.synchronize()
            if n:
                self.seconds.append(time.perf_counter() - start)
        self._setup.copies.clear_gradients()

    def compare(self, plain: Outcome, outcomes: tuple[Outcome, ...]) -> None:
        """Compare these outcomes with that of plain PyTorch: set `is_bitwise`, and note the differences."""
        found = {(one.kind, one.name): one for outcome in outcomes for one in differences(plain, outcome)}
        apart = [one for one in found.values() if one.kind in ("loss", "gradient", "input gradient")]
        self.is_bitwise = not apart
        if apart:
            largest = max(apart, key=lambda one: one.max_difference)
            what = f"{largest.kind} {largest.name}".rstrip()
            self.notes.append(f"{len(apart)} of loss and gradients differ, {what} by {largest.max_difference:.2g}")
        if others := [one for one in found.values() if one not in apart]:
            kind, name = others[0].kind, others[0].name
            plural = f" and {len(others) - 1} more" if len(others) > 1 else ""
            self.notes.append(f"leaves another {kind} than plain: {name}{plural}")

    def fail(self, error: Exception) -> None:
        """Note that this way has failed and why, and drop its copy of the model."""
        if isinstance(error, BudgetError):
            self.smallest_budget = error.smallest
        self.notes.append(sentence_of(error))
        self.has_failed = True
        self._subject = None
        self._setup.copies.clear_gradients()


def make_optimizer(make: MakeOptimizer | None, model: nn.Module) -> torch.optim.Optimizer | None:
    """Return the optimizer that `make` returns for the trainable parameters of ``model``; None if `make` is None.

    Raises a TypeError if `make` returns something else.
    """
    if make is None:
        return None
    made = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "expected optimizer to be a function of the parameters that gives an optimizer, such as "
            f"torch.optim.AdamW, got one that gives {type(made).__name__}"
        )
    return made
