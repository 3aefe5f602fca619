"""Recipes that wait for an absent value: the output of an op that is never computed twice, which nobody has kept."""

from __future__ import annotations

import weakref

from leangrad.ledger.values.value import Value


def wait(value: Value) -> None:
    """Enter ``value`` with every input of its recipe that cannot be had yet."""
    for v in value.inputs:
        if v.tensor is None and (v.function is None or v.blocked):
            if v.waiters is None:
                v.waiters = []
            v.waiters.append(weakref.ref(value))


def released(blocked: tuple[Value, ...]) -> int:
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
