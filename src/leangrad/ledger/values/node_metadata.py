"""What the ledger writes on the nodes of autograd: their values, and the constants that they forget."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from leangrad.ledger.values.value import Value

Node = Any  # torch.autograd.graph.Node, whose saved attributes differ from class to class


# What we write into a node's metadata. Weak references only, and plain constants: see [Note: what a value may hold].
class _Keys(dict[int, tuple[str, int]]):
    """Where a node's metadata hold the value of its output ``nr``: ``VALUES[nr]``."""

    def __missing__(self, nr: int) -> tuple[str, int]:
        key = self[nr] = ("leangrad", nr)
        return key


VALUES = _Keys()
NOTE = "leangrad.note"  # constants that the node forgets: {name: constant or Operand}
DRAW = "draw"  # such a constant: what runs an op that draws random numbers again, from the state that it drew from
# This op is never computed twice: (weak reference to its output, version, number of the call).
LIVE = "leangrad.live"
CAST = "leangrad.cast"  # what was saved of it went the short way: see ``cast.py``
MADE = "leangrad.made"  # by a call inside of a region in a segment that is run again: see ``checkpoint.py``
OPAQUE = "leangrad.opaque"  # the output was changed behind autograd's back: it cannot be replayed

with torch.enable_grad():  # leangrad may be imported anywhere
    AccumulateGrad: Any = type((torch.ones((), requires_grad=True) * 1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


def enter(node: Node, nr: int, value: Value) -> None:
    """Let ``node`` know the value of its output ``nr``."""
    node.metadata[VALUES[nr]] = weakref.ref(value)


def join(node: Node, nr: int, value: Value) -> None:
    """Let the values of outputs 0 and 1 of ``node`` know each other: rebuilding one gives the other as well."""
    ref = node.metadata.get(VALUES[1 - nr]) if nr < 2 else None
    other = ref() if ref is not None else None
    if type(other) is Value:  # a view is rebuilt with its base
        value.kin, other.kin = weakref.ref(other), weakref.ref(value)
