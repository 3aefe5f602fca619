"""Time against peak memory, for every way to train a model: plain, lean with budgets, a checkpoint around each block.

Read in this order: `repeated` (the modules that get a checkpoint), `ways` (what is compared), `copies` (copies of a
model that share its tensors), `meter` (how a peak is counted), `failure` (why a way has no figures), `training` (the
training of one way), `picture` and `result` (the output), `comparison` (runs all ways), and `frontier` itself, here.
`fit/` searches the largest batch that fits.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from leangrad.frontier.comparison import Comparison, Progress
from leangrad.frontier.result import Frontier, Point
from leangrad.frontier.training import MakeOptimizer
from leangrad.ledger.observe.active_region import open_region
from leangrad.verify import check_trainable
from leangrad.verify.memory import Memory
from leangrad.verify.subject import Subject

__all__ = ["Frontier", "Point", "frontier"]


def frontier(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    autocast: torch.dtype | None = None,
    points: int = 6,
    steps: int = 10,
    optimizer: MakeOptimizer | None = None,
    progress: Progress | None = None,
) -> Frontier:
    """Measure the time of a training step against its peak memory, from plain down to the smallest peak.

    These ways are compared::

        model                                     # plain
        leangrad.lean(model, budget=...)          # budgets from the plain peak down to the smallest that can be met
        leangrad.lean(model)                      # the floor
        checkpoint(block, x, use_reentrant=False) # around each repeated module

    Each way trains a copy of the model until its plan has settled. Then all ways are timed in one process, a few steps
    of each in alternation, and the medians are compared. Loss and gradients of a first and of a settled step, from the
    same weights and the same random state, are compared bit for bit with plain PyTorch. If a way runs out of memory,
    refuses its budget or fails, its row says so. On a GPU the peak statistics of torch are reset. What a peak includes
    on a GPU and on a CPU is in [Note: what a peak counts] in `meter.py`.

    Afterwards model, batch, `.grad` and random states are restored, also if the model raises; see [Note: What is put
    back] in `verify/memory.py`. The copies share one set of buffers and gradients; only with an optimizer, they have
    one more set of parameters on the device. Hooks of the model's modules run; those of its parameters do not.

    Args:
        model: a module with at least one parameter that requires a gradient, in the mode it is to be trained in.
        batch: a tensor; a tuple or list of positional arguments; or a mapping of keyword arguments.
        loss: a function from the model's output to a scalar. None means what it means for `leangrad.verify`.
        autocast: run forward and loss under `torch.autocast` with this dtype.
        points: how many budgets to try. If lean can go below the floor, a third of the budgets are below it, down to
            the smallest that can be met.
        steps: how many timed steps each way has, rounded up to an even number.
        optimizer: a function from a list of parameters to an optimizer, such as `torch.optim.AdamW`; the memory and
            the time of its step and its state are then included. None means forward and backward only.
        progress: called with the current activity, the number of steps done so far, and the expected total.

    Raises:
        TypeError, ValueError: an argument does not match the description above.

    >>> net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    >>> found = frontier(net, torch.randn(32, 16), points=0, steps=1)
    >>> [(point.way, point.bitwise) for point in found.points[:2]]
    [('plain', None), ('lean', True)]
    """
    subject = Subject.of(model, batch, loss, autocast, caller="frontier")
    check_trainable(model)
    _check_counts(points, steps)
    if open_region() is not None:
        raise ValueError(
            "expected to be outside of `with leangrad.saving()` and of a lean model's forward, which would take the "
            "steps of frontier for its own; call frontier before or after"
        )
    memory = Memory(model, batch, loss)
    try:
        return Comparison(subject, batch, points, steps, optimizer, progress or (lambda *_: None)).run()
    finally:
        memory.restore()
        gc.collect()  # frees copies of the model that are in reference cycles


def _check_counts(points: int, steps: int) -> None:
    if not isinstance(points, int) or points < 0:
        raise ValueError(f"expected points to be 0 or a positive integer, got {points!r}")
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"expected steps to be a positive integer, got {steps!r}")
