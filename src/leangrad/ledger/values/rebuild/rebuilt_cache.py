"""Rebuilt tensors that are cached for their next readers, and dropped at the latest when backward ends."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor

from leangrad._torch import after_backward


class CachedValue(Protocol):
    """A value that caches its rebuilt tensor."""

    memo: Tensor | None  # the cached tensor


memos: dict[int, list[weakref.ref[CachedValue]]] = {}  # by the id of the backward pass: the values that cache a tensor


def remember(value: CachedValue, task: int) -> None:
    """Drop the ``memo`` of ``value`` when the backward pass ``task`` ends, if it still has one.

    A reader that is no part of this backward pass does not read it, so counting readers is not enough.
    """
    held = memos.get(task)
    if held is None:
        fresh = list[weakref.ref[CachedValue]]()
        held = memos.setdefault(task, fresh)  # setdefault: the engine has a thread for each device
        if held is fresh and not after_backward(lambda: _forget(task)):
            del memos[task]
    held.append(weakref.ref(value))


def _forget(task: int) -> None:
    for ref in memos.pop(task, ()):
        value = ref()
        if value is not None:
            value.memo = None
