"""The peaks of one step from torch's allocation history, even where they lie below the allocator's peak so far.

[Note: below the allocator's peak] The allocator's peak counter belongs to the user, so leangrad never resets it. A step
that stays below an earlier peak, such as that of a validation or of the recorded step, does not change the counter. So
the allocator records the history of all allocations of one step, and `add_up` computes from it the peaks of forward, of
the time between forward and backward, and of backward, and the peaks from one saved tensor to the next. Each of these
moments is marked in the history by a short-lived block of a size that no other code requests. If the user records a
history already, or begins one during such a step, leangrad leaves it alone and uses the counters only. The history ends
when the step ends or its `History` is collected with the model, because there is only one history per process.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import dropwhile
from typing import ClassVar, NamedTuple
from weakref import finalize

from leangrad import _torch

__all__ = ["History", "Parts"]

# Sizes of the marking blocks in bytes: primes, and larger than small tensors.
STEP_START, FORWARD_END, BACKWARD_START, BACKWARD_END, SAVE, READ = MARKS = 4099, 4111, 4127, 4129, 4133, 4139


class Parts(NamedTuple):
    """The peak of each part of a step, in bytes above the memory that was allocated before the step."""

    forward: int
    start: int  # from the end of forward until backward reached the model
    later: int  # from then on until backward ended
    saves: tuple[int, ...] = ()  # within forward: until the first tensor was saved, from that to the next, and so on
    reads: tuple[int, ...] = ()  # within backward: the same for its reads of saved tensors

    @property
    def highest(self) -> int:
        """The peak of the whole step, in bytes above the memory that was allocated before it."""
        return max(self.forward, self.start, self.later)


class History:
    """Records the allocation history of one step: call `mark` at its moments in order, and `stop` when it has ended."""

    last_end: ClassVar[finalize[[], History] | None] = None  # ends the history that began last; not alive: it has ended

    def __init__(self, standing: int) -> None:
        self._standing = standing
        self._end = finalize(self, _torch.stop_history)
        self._end.atexit = False
        History.last_end = self._end

    @classmethod
    def begin(cls, standing: int) -> History | None:
        """Begin to record the history; returns None if torch cannot, or if a history is being recorded already.

        standing: the bytes that are allocated before the step.
        """
        if not _torch.start_history():
            return None
        history = cls(standing)
        _torch.mark_history(STEP_START)
        return history

    @classmethod
    def is_one_open(cls) -> bool:
        """Whether a step's history is being recorded, of any model: no other can begin until that has ended."""
        return cls.last_end is not None and cls.last_end.alive

    @staticmethod
    def mark(moment: int) -> None:
        """Mark the present place in the history as ``moment``: END, TURN, AFTER, SAVE or READ."""
        _torch.mark_history(moment)

    def stop(self, at_end: _torch.Counters | None, at_turn: _torch.Counters | None) -> Parts | None:
        """End the history and return the peaks; None if a mark is missing or one of the counters is None.

        at_end, at_turn: the allocator's counters at END and at TURN. The history has the requested sizes, and a block
            may be larger than requested, by up to a megabyte. So the larger of the two differences between counters and
            history is added to all peaks.
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
    """Compute the peaks between the marks, and the bytes allocated at END and at TURN; None if a mark is missing.

    events: True for an allocation or False for a release, and its bytes. If forward or backward ends several times
        (END, AFTER), the last time counts; if backward begins several times (TURN), the first time counts.
    """
    level = highest = 0
    peaks: dict[int, int] = {}
    levels: dict[int, int] = {}
    saves, reads = [0], list[int]()
    between: list[int] = saves  # the peaks from tensor to tensor of the present phase; empty: none are taken
    for is_allocated, size in dropwhile(lambda event: event != (True, STEP_START), events):
        if size not in MARKS:
            level += size if is_allocated else -size
            highest = max(highest, level)
            if between:
                between[-1] = max(between[-1], level)
        elif size in (SAVE, READ):
            if is_allocated and between is (saves if size == SAVE else reads):
                between.append(level)
        elif is_allocated and size != STEP_START and not (size == BACKWARD_START and BACKWARD_START in peaks):
            if size != BACKWARD_END and BACKWARD_END in peaks:  # another pass over the model
                continue
            peaks[size] = max(highest, peaks.get(size, 0))
            levels[size] = level
            highest = level
            between = []
            if size == BACKWARD_START:
                between = reads
                reads.append(level)
    if not {FORWARD_END, BACKWARD_START, BACKWARD_END} <= peaks.keys():
        return None
    parts = Parts(peaks[FORWARD_END], peaks[BACKWARD_START], peaks[BACKWARD_END], tuple(saves), tuple(reads))
    return parts, (levels[FORWARD_END], levels[BACKWARD_START])
