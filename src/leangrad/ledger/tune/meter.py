"""The peak of one step on a CPU, where `leangrad.measure` runs it.

Nobody counts the memory of a process's tensors on a CPU but torch's profiler, and a profiler that is set in a step of
the user's cannot be taken back where backward ends. So the figure of `leangrad.measure` is taken where that runs, and
elsewhere there is none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from leangrad import _torch
from leangrad.measure.listeners import Course, listen

__all__ = ["Meter"]


class Meter:
    """Hears of one step."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None  # not known, or not yet
        self.forward_bytes: int | None = None  # the same until forward had ended
        self.start_bytes: int | None = None  # from then on until backward came to the model
        self.later_bytes: int | None = None  # from then on until it ended
        self.after_bytes: int | None = None  # and after that, in the optimizer's step
        self.save_bytes: tuple[int, ...] = ()  # of forward, until the first tensor was saved, then from one to the next
        self.read_bytes: tuple[int, ...] = ()  # of backward, the same of those that it asked for
        self._saves: list[int] = []  # when they were
        self._reads: list[int] = []
        self._handed_out: int | None = None  # when forward had ended
        self._turn: int | None = None  # when backward came to the model
        self._end: int | None = None  # when it ended
        self.listens = _torch.is_profiling()
        if self.listens:
            listen(self)

    def hands_out(self) -> None:
        """Forward has ended."""
        self._handed_out = time.time_ns()

    def turns_back(self) -> None:
        """Backward has come to the model."""
        if self._turn is None:
            self._turn = time.time_ns()
        _torch.after_backward(self._ends)

    def saves(self) -> None:
        """A tensor was saved."""
        self._saves.append(time.time_ns())

    def reads(self) -> None:
        """Backward asks for a saved tensor."""
        self._reads.append(time.time_ns())

    def _ends(self) -> None:
        self._end = time.time_ns()

    def measured(self, peak_bytes: int, course: Course) -> None:
        """`leangrad.measure` has run the step: so much it took."""
        self.peak_bytes, handed_out, turn, end = peak_bytes, self._handed_out, self._turn, self._end
        if handed_out is not None and turn is not None and end is not None:
            self.forward_bytes = max((held for when, held in course if when < handed_out), default=0)
            self.start_bytes = max((held for when, held in course if handed_out <= when < turn), default=0)
            self.later_bytes = max((held for when, held in course if turn <= when < end), default=0)
            self.after_bytes = max((held for when, held in course if end <= when), default=0)
            self.save_bytes = tuple(_most_between([0, *self._saves, handed_out], course))
            self.read_bytes = tuple(_most_between([turn, *self._reads, end], course))


def _most_between(moments: Sequence[int], course: Course) -> Iterator[int]:
    """What was held at most from each of these moments until the next one."""
    at = held = 0
    for begin, end in pairwise(moments):
        while at < len(course) and course[at][0] < begin:
            held = course[at][1]
            at += 1
        most = held
        while at < len(course) and course[at][0] < end:
            held = course[at][1]
            most = max(most, held)
            at += 1
        yield most
