"""Measures the peak of the first step of a compiled graph on a GPU, by the allocator's own counters.

[Note: the first step] The counters are read twice: when the first forward begins, and when the first backward has
ended. The allocator's peak counter is the maximum since the user last reset it; nothing here resets it. If the counter
has risen between the two readings, the peak of the step is known; if not, the peak is at most the old maximum. The
measured peak is that of all that ran between the two readings. So none is reported for a graph if another graph had its
first forward or backward between them, nor if its own forward ran twice before its first backward. In a first step
kernels are tuned and cuBLAS allocates its workspace: some tens of MB that later steps do not have. Later steps are not
measured and have no overhead. A custom allocator (`torch.cuda.memory.change_current_allocator`) may have no counters:
then no peak is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from leangrad._torch import Counters

__all__ = ["FirstStep", "Peak"]


@dataclass(frozen=True)
class Peak:
    """The most bytes that a step held above what was allocated when it began."""

    nbytes: int
    is_bound: bool  # True if the peak is only known to be at most ``nbytes``

    def __str__(self) -> str:
        return f"{'at most ' if self.is_bound else ''}{self.nbytes / 1e6:.3f} MB"


class FirstStep:
    """Measures the peak of the first step of one graph: see [Note: the first step].

    read: returns the counters of the device that the graph runs on; None if its allocator has none.
    """

    _readings = count(1)  # of all instances: another one's between two of ours shows that another graph ran

    def __init__(self, read: Callable[[], Counters | None]) -> None:
        self.peak: Peak | None = None  # None until it is known, or if it cannot be known
        self._read = read
        self._start: Counters | None = None
        self._number = 0

    def begin(self) -> None:
        """Read the counters before forward runs."""
        is_first = self._start is None
        number = next(FirstStep._readings)
        self._number = number if is_first else -1
        self._start = self._read()

    def end(self) -> None:
        """Read the counters after the first backward, and compute the peak."""
        is_alone = next(FirstStep._readings) == self._number + 1
        if self._start is None or not is_alone:
            return
        start, now = self._start, self._read()
        if now is not None and now.highest >= start.highest:  # else the user has reset the peak in between
            self.peak = Peak(now.highest - start.allocated, is_bound=now.highest == start.highest)
