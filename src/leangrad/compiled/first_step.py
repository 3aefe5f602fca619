"""The peak of the first step of a compiled graph on a GPU, by the allocator's own counters.

[Note: the first step] The counters are read twice: when forward begins, and when backward has ended. The allocator
knows the highest count since the user last reset it, and nothing here resets it. If that has risen between the two
readings, the peak of the step is known; if not, it is at most what was highest before. It is the peak of all that ran
between the two: it is not told of a graph if another one had its first forward or backward between them, nor if its own
forward ran twice before its first backward. Kernels are tuned in a first step, and cuBLAS takes its workspace: some
tens of MB that later steps do not have. Later steps are not watched and run as if nothing had been. An allocator of the
user's (`torch.cuda.memory.change_current_allocator`) may count nothing: then no peak is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from leangrad._torch import Counters

__all__ = ["FirstStep", "Peak"]


@dataclass(frozen=True)
class Peak:
    """The most that a step held above what stood when it began."""

    nbytes: int
    is_bound: bool  # it is at most so many

    def __str__(self) -> str:
        return f"{'at most ' if self.is_bound else ''}{self.nbytes / 1e6:.3f} MB"


class FirstStep:
    """What is read of the counters in the first step of one graph: see [Note: the first step].

    read: gives the counters of the device that the graph runs on; None: it has none.
    """

    _readings = 0  # of all first steps: if another one's lies between two of ours, something else ran

    def __init__(self, read: Callable[[], Counters | None]) -> None:
        self.peak: Peak | None = None  # not known, or not yet
        self._read = read
        self._start: Counters | None = None
        self._number = 0

    def begin(self) -> None:
        """Forward is about to run."""
        is_first = self._start is None
        FirstStep._readings += 1
        self._number = FirstStep._readings if is_first else -1
        self._start = self._read()

    def end(self) -> None:
        """Backward has run for the first time."""
        is_alone = self._number == FirstStep._readings
        FirstStep._readings += 1
        if self._start is None or not is_alone:
            return
        start, now = self._start, self._read()
        if now is not None and now.highest >= start.highest:  # else the user has reset it meanwhile
            self.peak = Peak(now.highest - start.allocated, is_bound=now.highest == start.highest)
