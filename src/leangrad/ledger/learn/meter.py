"""The peak of one step on a CPU, where `leangrad.measure` runs it.

Nobody counts the memory of a process's tensors on a CPU but torch's profiler, and a profiler that is set in a step of
the user's cannot be taken back where backward ends. So the figure of `leangrad.measure` is taken where that runs, and
elsewhere there is none.
"""

from __future__ import annotations

from leangrad import _torch
from leangrad.measure.listeners import listen

__all__ = ["Meter"]


class Meter:
    """Hears of one step."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None  # not known, or not yet
        if _torch.is_profiling():
            listen(self)

    def measured(self, peak_bytes: int) -> None:
        """`leangrad.measure` has run the step: so much it took."""
        self.peak_bytes = peak_bytes
