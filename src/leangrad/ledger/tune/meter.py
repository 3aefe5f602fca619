"""The peak of one step on a CPU, known only if `leangrad.measure` runs the step.

On a CPU only torch's profiler counts the memory of a process's tensors, and a profiler that was started inside a user's
step cannot be stopped where backward ends. So a `Meter` takes its figures from `leangrad.measure` if that runs the
step, and has none otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from leangrad import _torch
from leangrad.measure.listeners import MemoryCurve, register

__all__ = ["Meter"]


class Meter:
    """Notes the times of one step's phases, and computes their peaks when `leangrad.measure` reports the step.

    Bytes are those that the step has allocated itself; times are those of `time.time_ns`.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = None  # of the whole step; None: not known, or not yet
        self.forward_bytes: int | None = None  # the peak until forward ended; None: not known
        self.start_bytes: int | None = None  # the peak from then on until backward reached the model
        self.later_bytes: int | None = None  # the peak from then on until backward ended
        self.after_bytes: int | None = None  # the peak after that, in the optimizer's step
        self.save_bytes: tuple[int, ...] = ()  # peaks in forward: until the first save, then from one save to the next
        self.read_bytes: tuple[int, ...] = ()  # peaks in backward: the same for its reads of saved tensors
        self._saves: list[int] = []  # times at which tensors were saved
        self._reads: list[int] = []  # times at which backward read saved tensors
        self._handed_out: int | None = None  # time at which forward ended
        self._turn: int | None = None  # time at which backward reached the model
        self._end: int | None = None  # time at which backward ended
        self.is_registered = _torch.is_profiling()  # whether this meter waits for the figures of `leangrad.measure`
        if self.is_registered:
            register(self)

    def note_forward_end(self) -> None:
        """Note the time at which forward has ended."""
        self._handed_out = time.time_ns()

    def note_backward_start(self) -> None:
        """Note the time at which backward first reaches the model, and have the time noted at which it ends."""
        if self._turn is None:
            self._turn = time.time_ns()
        _torch.after_backward(self._ends)

    def note_save(self) -> None:
        """Note the time at which a tensor is saved."""
        self._saves.append(time.time_ns())

    def note_read(self) -> None:
        """Note the time at which backward reads a saved tensor."""
        self._reads.append(time.time_ns())

    def _ends(self) -> None:
        self._end = time.time_ns()

    def measured(self, peak_bytes: int, curve: MemoryCurve) -> None:
        """Compute the peaks of the step's parts; `leangrad.measure` calls this when it has run the step.

        curve: the time of each change of memory, and the bytes that the step holds after it.
        """
        self.peak_bytes, handed_out, turn, end = peak_bytes, self._handed_out, self._turn, self._end
        if handed_out is not None and turn is not None and end is not None:
            self.forward_bytes = max((held for when, held in curve if when < handed_out), default=0)
            self.start_bytes = max((held for when, held in curve if handed_out <= when < turn), default=0)
            self.later_bytes = max((held for when, held in curve if turn <= when < end), default=0)
            self.after_bytes = max((held for when, held in curve if end <= when), default=0)
            self.save_bytes = tuple(_most_between([0, *self._saves, handed_out], curve))
            self.read_bytes = tuple(_most_between([turn, *self._reads, end], curve))


def _most_between(moments: Sequence[int], curve: MemoryCurve) -> Iterator[int]:
    """The most bytes that were held from each of ``moments`` until the next one."""
    at = held = 0
    for begin, end in pairwise(moments):
        while at < len(curve) and curve[at][0] < begin:
            held = curve[at][1]
            at += 1
        most = held
        while at < len(curve) and curve[at][0] < end:
            held = curve[at][1]
            most = max(most, held)
            at += 1
        yield most
