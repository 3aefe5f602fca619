"""Python's collector rests while a ledger works.

[Note: no collection for what dies by itself]
A ledger makes thousands of small objects in forward, which live until backward has used them and die there without any
help. Python's collector only sees them grow in number, and looks through all that the process holds: a tenth of a
second and more where large libraries are imported, for nothing. So it rests while a region is open. When it goes on,
these objects do not count: the number of new objects at which it begins to look is raised by theirs, until the next
region begins.
"""

from __future__ import annotations

import gc
import threading

Threshold = tuple[int, int, int]

_lock = threading.RLock()  # a finalizer may end a rest while this very thread holds it
_raised: tuple[Threshold, Threshold] | None = None  # the thresholds as they were, and as we have set them


class Rest:
    """From here until ``end`` the collector does not run of itself, if it did before."""

    def __init__(self) -> None:
        self._is_on = gc.isenabled()
        if self._is_on:
            gc.disable()
            _lower()
            self._young = gc.get_count()[0]

    def end(self) -> None:
        """Let it go on; a second time does nothing."""
        if self._is_on:
            self._is_on = False
            _raise(gc.get_count()[0] - self._young)
            gc.enable()


def _raise(made: int) -> None:
    """Let so many objects not count."""
    global _raised
    with _lock:
        before = gc.get_threshold()
        if _raised is not None and before == _raised[1]:  # another thread's region has ended just now
            before = _raised[0]
        if before[0] > 0 and made > 0:  # with 0 it is switched off
            ours = (before[0] + made, *before[1:])
            gc.set_threshold(*ours)
            _raised = before, ours


def _lower() -> None:
    """Let all count again, unless somebody else has set the thresholds since."""
    global _raised
    with _lock:
        if _raised is not None and gc.get_threshold() == _raised[1]:
            gc.set_threshold(*_raised[0])
        _raised = None
