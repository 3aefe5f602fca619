"""Recipes that wait for an absent value: the output of an op that is never computed twice, which nobody has kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, Self, TypeVar

from torch import Tensor


class WaitingValue(Protocol):
    """What is asked of a value whose recipe may wait, or that others wait for."""

    tensor: Tensor | None
    function: Callable[..., Any] | None
    inputs: tuple[Self, ...]
    nbytes: int
    blocked: tuple[Self, ...]  # the absent values that its recipe waits for
    waiters: list[weakref.ref[Self]] | None  # whose recipes wait for this one

    def unblocked(self) -> None:
        """Nothing is missing any more."""


V = TypeVar("V", bound=WaitingValue)


def blocking(values: Iterable[V]) -> tuple[V, ...]:
    """The absent values under ``values``, each once."""
    found: list[V] = []
    for v in values:
        if v.tensor is not None:
            continue
        for b in v.blocked if v.function is not None else (v,):
            if b not in found:
                found.append(b)
    return tuple(found)


def wait(value: V) -> None:
    """Enter ``value`` with every input of its recipe that cannot be had yet."""
    for v in value.inputs:
        if v.tensor is None and (v.function is None or v.blocked):
            if v.waiters is None:
                v.waiters = []
            v.waiters.append(weakref.ref(value))


def notify(value: V) -> None:
    """``value`` can be had now: look again at every recipe that waited for it."""
    waiters, value.waiters = value.waiters, None
    for ref in waiters or ():
        waiter = ref()
        if waiter is not None and waiter.blocked:
            waiter.blocked = blocking(waiter.inputs)
            if not waiter.blocked:
                waiter.unblocked()


def released(blocked: tuple[V, ...]) -> int:
    """The bytes of kept tensors that need nothing but ``blocked`` to be rebuilt."""
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
