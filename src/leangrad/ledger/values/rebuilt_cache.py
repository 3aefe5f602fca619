"""Rebuilt tensors that are held for readers to come, and let go at the latest when backward ends."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor

from leangrad._torch import after_backward


class CachedValue(Protocol):
    """A value that holds a tensor for readers to come."""

    memo: Tensor | None


memos: dict[int, list[weakref.ref[CachedValue]]] = {}  # by backward pass


def remember(value: CachedValue, task: int) -> None:
    """Let go of the value's memo at the end of this backward pass: a reader that takes no part in it never comes."""
    held = memos.get(task)
    if held is None:
        held = memos[task] = []
        if not after_backward(lambda: _forget(task)):
            del memos[task]
    held.append(weakref.ref(value))


def _forget(task: int) -> None:
    for ref in memos.pop(task, ()):
        value = ref()
        if value is not None:
            value.memo = None
