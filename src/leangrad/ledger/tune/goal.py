"""What the user asked for, and how one step on the way there runs."""

from __future__ import annotations

from typing import NamedTuple

from leangrad.ledger.learn.timing import Unpacks

__all__ = ["PRODUCTS", "Goal", "Way"]

PRODUCTS = 8  # that one recipe may run through in a row, where there is a budget


class Goal(NamedTuple):
    """What the user asked for, one of the two."""

    budget: int | float | None = None  # bytes; a float is a share of the device's memory
    slowdown: float | None = None  # of plain's time


class Way(NamedTuple):
    """How one step runs."""

    kept: frozenset[int] | None = None  # the items that are kept; None: all that plain keeps, with no region at all
    timing: Unpacks | None = None  # times every rebuild, or marks it
    products: int | None = None  # the step is recorded anew, with recipes that run through so many products in a row
