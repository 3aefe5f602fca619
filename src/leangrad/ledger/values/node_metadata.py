"""What the ledger stores in ``metadata`` of autograd nodes: their values, and constants that nodes do not record."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from leangrad.ledger.values.value import Value

Node = Any  # torch.autograd.graph.Node, whose saved attributes differ from class to class


# The keys under which the ledger writes into a node's metadata. It stores only weak references to values, and plain
# constants: see [Note: what a value may hold].
class _Keys(dict[int, tuple[str, int]]):
    """The metadata keys of values: ``VALUES[nr]`` for the value of output ``nr`` of a node."""

    def __missing__(self, nr: int) -> tuple[str, int]:
        key = self[nr] = ("leangrad", nr)
        return key


VALUES = _Keys()
NOTE = "leangrad.note"  # constants that the node does not record: {name: constant or UnsavedInput}
# A name in that dict. Its constant is a function that runs an op that draws random numbers again, from the state of the
# generator before it ran.
DRAW = "draw"
# Set for an op that is never computed twice: (weak reference to its output, version of that, number of the call).
LIVE = "leangrad.live"
# Set for a product in few bits that may be computed twice: the same pair without the number of the call.
HALF = "leangrad.half"
CAST = "leangrad.cast"  # True: tensors saved from this cast of a parameter are packed as `Cast`, see ``cast.py``
# Set if the node was made by a call inside a region, in a checkpointed segment that is run again: an object that
# identifies the region, see ``checkpoint.py``.
MADE = "leangrad.made"
OPAQUE = "leangrad.opaque"  # True: the output cannot be replayed, most often because of an unrecorded in-place change

with torch.enable_grad():  # leangrad may be imported anywhere
    AccumulateGrad: Any = type((torch.ones((), requires_grad=True) * 1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


def enter(node: Node, nr: int, value: Value) -> None:
    """Store ``value`` in ``node``, as a weak reference, as the value of output ``nr``."""
    node.metadata[VALUES[nr]] = weakref.ref(value)


def join(node: Node, nr: int, value: Value) -> None:
    """Make the values of outputs 0 and 1 of ``node`` siblings: rebuilding one gives the other as well.

    value: that of output ``nr``.
    """
    ref = node.metadata.get(VALUES[1 - nr]) if nr < 2 else None
    other = ref() if ref is not None else None
    if type(other) is Value:  # and not a SavedView, which is rebuilt with its base
        value.sibling, other.sibling = weakref.ref(other), weakref.ref(value)
