"""The region that is open in a thread; at most one is open at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from leangrad import _torch

current = threading.local()
_entered = [0]


def regions_entered() -> int:
    """Return how many regions have been entered in this process, in any thread."""
    return _entered[0]


def enter(region: object) -> None:
    """Make ``region`` the open region of this thread."""
    current.region = region
    _entered[0] += 1


def region_is_open() -> bool:
    """Whether a region is open in this thread, or ``no_regions`` forbids to open one."""
    return getattr(current, "region", None) is not None


def regions_are_forbidden() -> bool:
    """Whether ``no_regions`` forbids to open a region in this thread."""
    return getattr(current, "region", None) is no_regions


def open_region() -> Any:
    """Return the ``Region`` that is open in this thread, or None."""
    region = getattr(current, "region", None)
    return None if region is no_regions else region


def ledger_saves() -> bool:
    """Whether the open region alone decides about a tensor that is saved now, and no other saved-tensor hooks.

    True if the region's hooks are the innermost ones, or if no hooks are set because the region follows the trace of an
    earlier step. An autograd Function then need not pass its private tensors to the hooks: the region would only keep
    them. False inside a checkpoint, which counts the saved tensors and compares them with those of the first run.
    """
    region = open_region()
    if region is None or getattr(region, "outer", None) is not None:
        return False
    return not _torch.saved_tensor_hooks_active() or (getattr(_torch.innermost_pack_hook(), "__self__", None) is region)


@contextmanager
def no_regions() -> Iterator[None]:
    """Forbid to open a region in this thread: lean models run as in plain PyTorch."""
    before = getattr(current, "region", None)
    current.region = before or no_regions
    try:
        yield
    finally:
        current.region = before
