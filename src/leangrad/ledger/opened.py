"""The region that is open in a thread: one at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

opened = threading.local()
_entered = [0]


def regions_entered() -> int:
    """How many regions have been entered in this process, in any thread."""
    return _entered[0]


def enter(region: object) -> None:
    """``region`` is now the one that is open in this thread."""
    opened.region = region
    _entered[0] += 1


def region_is_open() -> bool:
    """Whether a region is open in this thread, or none may be opened."""
    return getattr(opened, "region", None) is not None


@contextmanager
def no_regions() -> Iterator[None]:
    """Open no region in this thread: lean models run plain."""
    before = getattr(opened, "region", None)
    opened.region = before or no_regions
    try:
        yield
    finally:
        opened.region = before
