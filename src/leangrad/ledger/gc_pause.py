"""Python's collector pauses while a region is open.

[Note: no collection for what dies by itself]
A ledger makes thousands of small objects in forward, which live until backward has used them and die there without any
help. Python's collector only sees them grow in number, and looks through all that the process holds: a tenth of a
second and more where large libraries are imported, for nothing. So it pauses while a region is open.
"""

from __future__ import annotations

import gc


class GcPause:
    """From here until ``end`` the collector does not run of itself, if it did before."""

    def __init__(self) -> None:
        self._is_on = gc.isenabled()
        if self._is_on:
            gc.disable()

    def end(self) -> None:
        """Let it go on; a second time does nothing."""
        if self._is_on:
            self._is_on = False
            gc.enable()
