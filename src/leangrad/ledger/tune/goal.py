"""What the user asked for (`Goal`), and how one step of the search runs (`StepMode`)."""

from __future__ import annotations

from typing import NamedTuple

from leangrad.ledger.learn.timing import UnpackHook

__all__ = ["PRODUCTS", "Goal", "StepMode"]

PRODUCTS = 3  # most products in a row in one recipe before there is a plan: a residual branch seldom has more


class Goal(NamedTuple):
    """What the user asked for: a memory budget or a bound on the time. One of the two is set."""

    budget: int | float | None = None  # bytes; a float is a share of the device's memory
    slowdown: float | None = None  # longest time of a step, as a multiple of plain PyTorch's


class StepMode(NamedTuple):
    """How one step runs."""

    kept: frozenset[int] | None = None  # the items to keep; None: run plain PyTorch, without a region
    timing: UnpackHook | None = None  # replaces the unpack hook: times every rebuild, or marks every save and read
    products: int | None = None  # record this step, with recipes of at most so many products in a row; None: do not
