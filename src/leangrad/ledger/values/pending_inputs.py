"""Recipes that wait for absent values: outputs of ops that are never computed twice, and that are not kept so far."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, Self, TypeVar

from torch import Tensor


class WaitingValue(Protocol):
    """What this file needs of a value whose recipe may wait, or that other recipes wait for: see `Value`."""

    tensor: Tensor | None  # the kept tensor
    function: Callable[..., Any] | None  # what rebuilds it; with neither tensor nor function the value is absent
    inputs: tuple[Self, ...]  # the values that its recipe reads
    nbytes: int
    blocked: tuple[Self, ...]  # the absent values that its recipe waits for
    waiters: list[weakref.ref[Self]] | None  # the values whose recipes wait for this one

    def unblocked(self) -> None:
        """Called when the recipe no longer waits for any value."""


V = TypeVar("V", bound=WaitingValue)


def blocking(values: Iterable[V]) -> tuple[V, ...]:
    """Returns the absent values among ``values`` and in their recipes, each once."""
    found: list[V] = []
    for v in values:
        if v.tensor is not None:
            continue
        for b in v.blocked if v.function is not None else (v,):
            if b not in found:
                found.append(b)
    return tuple(found)


def wait(value: V) -> None:
    """Add ``value`` to the ``waiters`` of each of its inputs that is absent or waits itself."""
    for v in value.inputs:
        if v.tensor is None and (v.function is None or v.blocked):
            if v.waiters is None:
                v.waiters = []
            v.waiters.append(weakref.ref(value))


def notify(value: V) -> None:
    """Update every recipe that waits for ``value``, which is kept now or can be rebuilt."""
    waiters, value.waiters = value.waiters, None
    for ref in waiters or ():
        waiter = ref()
        if waiter is not None and waiter.blocked:
            waiter.blocked = blocking(waiter.inputs)
            if not waiter.blocked:
                waiter.unblocked()


def released(blocked: tuple[V, ...]) -> int:
    """Returns the bytes of kept tensors that could be rebuilt if the absent values ``blocked`` were kept."""
    seen: set[int] = set()
    total = 0
    stack = list(blocked)
    while stack:
        for ref in stack.pop().waiters or ():
            w = ref()
            if w is None or id(w) in seen or any(b not in blocked for b in w.blocked):
                continue
            seen.add(id(w))
            if w.tensor is not None:
                total += w.nbytes
            stack.append(w)
    return total
