"""The time of a plan's steps relative to that of plain steps, and how certain it is.

[Note: times on a restless host] On many machines the host changes its speed from step to step: by a few percent on a
quiet one, by a fifth on a shared one. The shortest of a few steps is then a matter of luck, and so is the choice of a
plan by it. So each step of a plan is timed beside a plain one, the ratio of the plan is the Hodges-Lehmann estimate of
these ratios (the median of all means of two of them; it withstands outliers, and needs a third fewer steps than the
median), and its standard error follows from their spread. A plan that is clearly faster or slower than the bound needs
few steps; one near the bound is timed until its ratio is certain, within limits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from itertools import combinations_with_replacement

__all__ = ["Ratios"]

SHORTEST = 1e-9  # seconds; a clock that stands still, as in a test, is no error
PRECISE = 0.006  # standard error below which a ratio is certain enough, however near the bound
CLEAR = 2.0  # standard errors from the bound by which a ratio is clearly above or below it
MOST_PAIRS = 24  # pairs that are timed in one go, if the ratio stays uncertain


class Ratios:
    """The ratios of the steps of one plan to plain steps, each timed just before its own."""

    def __init__(self) -> None:
        self._logs: list[float] = []  # the logarithms of the ratios

    def add(self, plain: Iterable[float], lean: Iterable[float]) -> None:
        """Add the times of plain steps, and of the step of the plan after each."""
        pairs = zip(plain, lean, strict=True)
        self._logs += [math.log(max(mine, SHORTEST) / max(other, SHORTEST)) for other, mine in pairs]

    @property
    def count(self) -> int:
        """How many pairs were timed."""
        return len(self._logs)

    @property
    def ratio(self) -> float:
        """The time of a step of the plan over that of a plain one."""
        return math.exp(statistics.median((a + b) / 2 for a, b in combinations_with_replacement(self._logs, 2)))

    @property
    def doubt(self) -> float:
        """The standard error of `ratio`.

        The spread is measured by the median deviation, which outliers do not move; 1.4826 makes it that of a normal
        distribution. The last factor allows for the few pairs by which the centre and the spread were found.
        """
        middle, n = statistics.median(self._logs), self.count
        spread = 1.4826 * statistics.median(abs(one - middle) for one in self._logs)
        return self.ratio * spread / math.sqrt(n) * (1 + 2 / n)

    def is_clear(self, bound: float) -> bool:
        """Whether it is certain enough on which side of ``bound`` the ratio lies."""
        return self.doubt <= PRECISE or abs(self.ratio - bound) > CLEAR * self.doubt
