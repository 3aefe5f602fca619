"""Trains one model twice, plain and lean, from the same seed and on the same batches, and compares both."""

import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.demo.case import Case
from leangrad.floor import Floor, floor
from leangrad.lean import lean
from leangrad.measure import Measurement, measure
from leangrad.verify.comparison import difference

__all__ = ["Comparison", "compare"]

_WARM_UP_STEPS = 2  # lean records its first step, and caches fill; compared but not timed


@dataclass(frozen=True)
class Comparison:
    """The result of one case.

    - `plain`, `lean`: memory of one step after the training: forward and backward, including gradients.
    - `floor_bytes`: fewest bytes that such a step can keep, from `leangrad.floor`.
    - `time_ratio`: median, over the steps after the first two, of lean's time over plain's, including the optimizer.
    - `gradient_difference`: largest relative difference of any gradient in any step; None if all were the same bit for
      bit.
    - `plain_loss`, `lean_loss`: the loss of the last step.
    """

    name: str
    plain: Measurement
    lean: Measurement
    floor_bytes: int
    time_ratio: float
    gradient_difference: float | None
    plain_loss: float
    lean_loss: float


def compare(case: Case, steps: int, on_step: Callable[[], object] = lambda: None, *, seed: int = 0) -> Comparison:
    """Train `case` for `steps` steps, alternating between plain and lean; call `on_step` after each pair of steps.

    The global random state is restored afterwards.

    >>> from leangrad.demo import gpt
    >>> comparison = compare(gpt(2, 16, layers=1, width=32), steps=3)
    >>> comparison.gradient_difference is None, comparison.plain_loss == comparison.lean_loss
    (True, True)
    """
    if steps < 1:
        raise ValueError(f"expected at least one step, got {steps}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = case.make_model()
        plain_side, lean_side = _Side(model), _Side(lean(copy.deepcopy(model)))
        generator = torch.Generator().manual_seed(seed)
        apart: list[float] = []
        for step in range(steps):
            inputs, targets = case.make_batch(generator)
            # The order alternates, so that neither side always runs with the other's data in the caches.
            for side in (plain_side, lean_side) if step % 2 else (lean_side, plain_side):
                torch.manual_seed(seed + step)  # both draw the same dropout masks
                side.train(inputs, targets)
            apart += _differences(plain_side.model, lean_side.model)
            on_step()
        return Comparison(
            name=case.name,
            plain=plain_side.measured(inputs, targets),
            lean=lean_side.measured(inputs, targets),
            floor_bytes=plain_side.floor(inputs, targets).bytes,
            time_ratio=_time_ratio(plain_side.seconds, lean_side.seconds),
            gradient_difference=max(apart) if apart else None,
            plain_loss=plain_side.loss,
            lean_loss=lean_side.loss,
        )


class _Side:
    """One of the two models with its optimizer, the time of each step and the last loss."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.seconds: list[float] = []
        self.loss = math.nan

    def train(self, inputs: Tensor, targets: Tensor) -> None:
        """Run one training step. The gradients are left in place, to be compared."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = _loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.loss = loss.item()

    def measured(self, inputs: Tensor, targets: Tensor) -> Measurement:
        """Measure the memory of one more forward and backward."""
        self.optimizer.zero_grad()
        return measure(lambda: _loss(self.model(inputs), targets).backward(), timed_runs=0)

    def floor(self, inputs: Tensor, targets: Tensor) -> Floor:
        """Compute the least that such a step has to keep."""
        return floor(self.model, inputs, lambda logits: _loss(logits, targets))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _differences(plain: nn.Module, lean: nn.Module) -> list[float]:
    """Return the relative difference of each gradient that is not the same bit for bit."""
    pairs = zip(plain.parameters(), lean.parameters(), strict=True)
    return [apart for p, q in pairs if (apart := difference(p.grad, q.grad)) is not None]


def _time_ratio(plain: list[float], lean: list[float]) -> float:
    ratios = [b / a for a, b in zip(plain, lean, strict=True)]
    return statistics.median(ratios[_WARM_UP_STEPS:] or ratios)
