"""The peaks of one step, be it below the allocator's own: from the history of what is allocated in it.

[Note: below the allocator's peak] The peak that the allocator counts belongs to the user, and is never reset. A step
that stays below an earlier one, of a validation say, or of the step that was recorded, leaves no trace in it. So the
allocator is asked to note every allocation of one step, and the peaks of forward, of what lies between it and backward,
and of backward are added up from that, and those from one saved tensor to the next. A block of a size that nobody else
asks for marks each of these moments. Who records a history of his own is not disturbed, nor one who begins it in such a
step: then the counters have to do. Whatever becomes of the step, or of its model, the history ends with it: there is
one for the whole process.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import dropwhile
from typing import ClassVar, NamedTuple
from weakref import finalize

from leangrad import _torch

__all__ = ["History", "Parts"]

# Bytes: primes, and more than small tensors have.
START, END, TURN, AFTER, SAVE, READ = MARKS = 4099, 4111, 4127, 4129, 4133, 4139


class Parts(NamedTuple):
    """The most that was allocated beside what stood before a step, in bytes."""

    forward: int
    start: int  # from the end of forward until backward came to the model
    later: int  # from then on until backward ended
    saves: tuple[int, ...] = ()  # of forward: until the first tensor was saved, from that to the next, and so on
    reads: tuple[int, ...] = ()  # of backward: the same of those that it asked for

    @property
    def highest(self) -> int:
        """Of the whole step."""
        return max(self.forward, self.start, self.later)


class History:
    """One step that is listened to: `mark` its moments in order, and `stop` when it has ended."""

    last_end: ClassVar[finalize[[], History] | None] = None  # what ends the one that began last

    def __init__(self, standing: int) -> None:
        self._standing = standing
        self._end = finalize(self, _torch.stop_history)
        self._end.atexit = False
        History.last_end = self._end

    @classmethod
    def begin(cls, standing: int) -> History | None:
        """Listen from now on; None where that cannot be, or where somebody else does so already."""
        if not _torch.start_history():
            return None
        history = cls(standing)
        _torch.mark_history(START)
        return history

    @classmethod
    def is_one_open(cls) -> bool:
        """Whether a step is listened to now, be it another model's: until that has ended, no other can be."""
        return cls.last_end is not None and cls.last_end.alive

    @staticmethod
    def mark(moment: int) -> None:
        """This moment of a step is now: END, TURN or AFTER."""
        _torch.mark_history(moment)

    def stop(self, at_end: _torch.Counters | None, at_turn: _torch.Counters | None) -> Parts | None:
        """Listen no more; the peaks, if all moments have come. What is known of two of them corrects what was asked.

        A block may be larger than what was asked for, by up to a megabyte.
        """
        found = add_up(self._end() or [])
        if found is None or at_end is None or at_turn is None:
            return None
        parts, levels = found
        more = max(
            0, *(now.allocated - self._standing - level for now, level in zip((at_end, at_turn), levels, strict=True))
        )
        forward, start, later, *others = parts
        return Parts(forward + more, start + more, later + more, *(tuple(n + more for n in some) for some in others))


def add_up(events: Iterable[tuple[bool, int]]) -> tuple[Parts, tuple[int, int]] | None:
    """The peaks between the marks, and what stood at END and at TURN; None if a mark is missing.

    events: whether something was allocated, or given back, and its bytes. Of several ends of forward and of backward
    the last counts, of what begins backward the first.
    """
    level = highest = 0
    peaks: dict[int, int] = {}
    levels: dict[int, int] = {}
    saves, reads = [0], list[int]()
    between: list[int] = saves  # those of the phase that runs
    for is_allocated, size in dropwhile(lambda event: event != (True, START), events):
        if size not in MARKS:
            level += size if is_allocated else -size
            highest = max(highest, level)
            if between:
                between[-1] = max(between[-1], level)
        elif size in (SAVE, READ):
            if is_allocated and between is (saves if size == SAVE else reads):
                between.append(level)
        elif is_allocated and size != START and not (size == TURN and TURN in peaks):
            if size != AFTER and AFTER in peaks:  # another pass over the model
                continue
            peaks[size] = max(highest, peaks.get(size, 0))
            levels[size] = level
            highest = level
            between = []
            if size == TURN:
                between = reads
                reads.append(level)
    if not {END, TURN, AFTER} <= peaks.keys():
        return None
    parts = Parts(peaks[END], peaks[TURN], peaks[AFTER], tuple(saves), tuple(reads))
    return parts, (levels[END], levels[TURN])
