"""Time against peak memory, for every way to train a model: plain, lean with budgets, a checkpoint around each block.

Read in this order: `repeated` (where a checkpoint stands), `ways` (what is compared), `copies` (the model, many times
in the memory of one), `meter` (what a peak counts), `failure` (why a way has no figures), `training` (one way at work),
`picture` and `result` (what comes out), `comparison` (all ways in turns), and `frontier` itself, here. `fit/` searches
the largest batch that fits.
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
    """Measure the time of a training step against its peak memory, from plain down to the smallest.

    The ways that are compared::

        model                                     # plain
        leangrad.lean(model, budget=...)          # budgets from plain's peak down to the smallest that can be met
        leangrad.lean(model)                      # the floor
        checkpoint(block, x, use_reentrant=False) # around each repeated module

    Each way trains a copy of the model until its plan has settled. Then the ways take turns in one process, a few
    steps each, and the medians are compared. Loss and gradients of a first and of a settled step, from the same
    weights and the same random state, are compared with plain's bit for bit. A way that runs out of memory, refuses or
    fails has a row that says so. What a peak counts on a GPU and on a CPU: see [Note: what a peak counts] in
    `meter.py`; on a GPU the peak statistics of torch are reset.

    Afterwards model, batch, `.grad` and random states are as before, also if the model raises; see [Note: What is put
    back] in `verify/memory.py`. The copies share one set of buffers and gradients; with an optimizer, and only then,
    one more set of parameters stands on the device. Hooks of the model's modules run; those of its parameters do not.

    Args:
        model: a module with at least one parameter that requires a gradient, in the mode it is to be trained in.
        batch: a tensor; a tuple or list of positional arguments; or a mapping of keyword arguments.
        loss: called with the model's output, gives a scalar. None means what it means for `leangrad.verify`.
        autocast: run forward and loss under `torch.autocast` with this dtype.
        points: how many budgets to try. A third of them are below the floor, down to the smallest that can be met,
            if lean can go below it.
        steps: how many timed steps each way has.
        optimizer: gives an optimizer for the parameters it is called with, such as `torch.optim.AdamW`, whose step
            and state then count too. None means forward and backward.
        progress: called with what is going on, the steps done so far, and how many there will be in all.

    Raises:
        TypeError, ValueError: an argument is not what is said above.

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
        gc.collect()  # copies of the model that are in circles


def _check_counts(points: int, steps: int) -> None:
    if not isinstance(points, int) or points < 0:
        raise ValueError(f"expected points to be 0 or a positive integer, got {points!r}")
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"expected steps to be a positive integer, got {steps!r}")
