"""Pauses Python's automatic garbage collection while a region is open.

[Note: no collection for what dies by itself]
A ledger makes thousands of small objects in forward. They live until backward has used them, and their reference counts
free them there. Python's collector only sees their number grow, and searches all objects of the process: that takes a
tenth of a second or more where large libraries are imported, and finds nothing. So it is paused while a region is open.
"""

from __future__ import annotations

import gc


class GcPause:
    """Pauses automatic garbage collection, if it was enabled, from construction until `end`."""

    def __init__(self) -> None:
        self._is_on = gc.isenabled()
        if self._is_on:
            gc.disable()

    def end(self) -> None:
        """Resume automatic garbage collection; a second call does nothing."""
        if self._is_on:
            self._is_on = False
            gc.enable()
