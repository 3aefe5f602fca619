"""The region that is open in a thread: one at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from leangrad import _torch

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


def regions_are_forbidden() -> bool:
    """Whether no region may be opened in this thread."""
    return getattr(opened, "region", None) is no_regions


def open_region() -> Any:
    """The ``Region`` that is open in this thread, or None."""
    region = getattr(opened, "region", None)
    return None if region is no_regions else region


def ledger_saves() -> bool:
    """Whether a tensor that is saved now is the open region's to decide on, and no other hooks'.

    Its hooks are the innermost ones; or there are none, because it follows the trace of an earlier step. Whoever saves
    tensors then need not hand over what is their own: the region would only keep it. Not so inside a checkpoint, which
    counts what is saved and compares it with what was saved the first time.
    """
    region = open_region()
    if region is None or getattr(region, "outer", None) is not None:
        return False
    return not _torch.saved_tensor_hooks_active() or (getattr(_torch.innermost_pack_hook(), "__self__", None) is region)


@contextmanager
def no_regions() -> Iterator[None]:
    """Open no region in this thread: lean models run plain."""
    before = getattr(opened, "region", None)
    opened.region = before or no_regions
    try:
        yield
    finally:
        opened.region = before
